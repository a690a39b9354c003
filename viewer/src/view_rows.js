// The page of rows: the filter, the table, and the chosen row beside it.

import { detail } from "./detail.js";
import { el, segments, unseen } from "./dom.js";
import { counted } from "./format.js";
import { parse } from "./filter.js";
import { table } from "./table.js";

const MOST = 1_000_000; // rows of the table: a browser's boxes are no higher than some 33 million pixels
const HIDDEN = ["prompt_key", "pictures", "number"]; // columns for the page's own use
const EXAMPLES = ["score<1", "step>=10", "finish=length", "-correct", '"the answer"'];

// `app` has rows, runs, source and tagOf(run, step); `went(place)` is called with each row that is opened.
// Returns {element, refresh(), show(place), key(event)}; a place is {run, step, number}, or null.
export function rowsView(app, { went }) {
  let [sort, filter, shownRow, number, alone] = [["step", -1], "", null, "advantages", null];
  const box = el("input", {
    type: "search",
    id: "filter",
    placeholder: "Search, or score<1 step>=20 finish=length",
    attrs: { "aria-label": "Filter rows", "aria-describedby": "count", autocomplete: "off", spellcheck: "false" },
    on: { input: () => select((filter = box.value)) },
  });
  const count = el("span", { id: "count", className: "dim", attrs: { role: "status" } });
  const problem = el("p", { className: "problem", hidden: true, attrs: { role: "alert" } });
  const presets = el("div", { className: "presets" });
  const which = el("div", { className: "which" });
  const grid = table({ pick: (row) => open(row), sortBy });
  const empty = el("p", { className: "empty", hidden: true });
  const unread = el("p", { className: "note warn unread", hidden: true });
  const list = el(
    "section",
    { className: "list" },
    unseen("Rows"),
    el("div", { className: "bar-line" }, box, count),
    presets,
    problem,
    unread,
    which,
    empty,
    grid.element,
  );
  const pane = el("section", { className: "pane", attrs: { "aria-label": "The chosen row" } });
  const element = el("div", { className: "split" }, list, pane);
  let opening = 0;

  function sortBy(name) {
    const begin = ["score", "length"].includes(name) || name.startsWith("score.") ? 1 : -1;
    sort = sort[0] === name ? [name, -sort[1]] : [name, name === "prompt" || name === "response" ? 1 : begin];
    refresh();
  }

  function select() {
    const { rows } = app;
    const { order, wrong } = ordered();
    unread.hidden = app.unread.length === 0;
    unread.textContent = app.unread.map(([title, step]) => `${title}: no row of step ${step} can be read.`).join(" ");
    problem.hidden = !wrong;
    problem.textContent = wrong ?? "";
    const steps = new Set(app.runs.flatMap((run, i) => run.samples.map(([step]) => `${i}/${step}`))).size;
    count.textContent =
      order.length === rows.count
        ? `${counted(rows.count, "row")}, ${counted(steps, "step")}`
        : `${order.length.toLocaleString("en")} of ${counted(rows.count, "row")}`;
    empty.hidden = order.length > 0;
    empty.textContent = rows.count
      ? "No row passes the filter."
      : app.loading
        ? "Rows are being read …"
        : "No rows yet: a run keeps those of each step in its samples directory, unless log.samples is 0.";
    grid.element.hidden = order.length === 0;
    grid.update({ rows, runs: app.runs, order, sort }, shownRow ? rowAt(shownRow) : null);
  }

  function ordered() {
    const { keep, problem: wrong } = parse(filter, app.rows.columns);
    const runs = app.rows.columns.get("run");
    const order = app.rows.ordered(alone === null ? keep : (row) => runs[row] === alone && keep(row), sort);
    order.splice(MOST);
    return { order, wrong };
  }

  function rowAt({ run, step, number: place }) {
    const row = app.rows.find(run, step, place);
    return row < 0 ? null : row;
  }

  function refresh() {
    const preset = (name, words, order) =>
      el("button", { type: "button", className: "preset", textContent: name, on: { click: () => look(words, order) } });
    presets.replaceChildren(
      preset("Lowest score", "", ["score", 1]),
      preset("Highest score", "", ["score", -1]),
      preset("Longest", "", ["length", -1]),
      preset("Cut off", "finish=length", ["step", -1]),
      preset("Newest", "", ["step", -1]),
    );
    const choices = [[null, "All runs"], ...app.runs.map((run, i) => [i, run.title])];
    which.replaceChildren(
      ...(app.runs.length > 1 ? [segments("Run", choices, alone, (run) => ((alone = run), refresh()))] : []),
    );
    select();
    if (!shownRow && !pane.childElementCount) pane.replaceChildren(invitation());
  }

  // Set the filter and the order, and open the first row.
  function look(words, order) {
    box.value = filter = words;
    sort = order;
    refresh();
    if (grid.last() >= 0) grid.choose(0);
  }

  async function open(row) {
    const [run, step, place] = ["run", "step", "number"].map((name) => app.rows.get(name, row));
    shownRow = { run, step, number: place };
    element.classList.add("opened");
    went(shownRow);
    const mine = ++opening;
    try {
      const tag = app.tagOf(run, step);
      const file = await app.source.row(run, step, place, tag);
      const images = await imagesOf(row, run, step, tag);
      if (mine !== opening) return;
      const now = rowAt(shownRow) ?? row;
      const back = el("button", {
        type: "button",
        className: "back",
        textContent: "← Rows",
        on: { click: () => element.classList.remove("opened") },
      });
      const coloured = (name) => (number = name);
      const go = (other) => choose(other);
      const data = { rows: app.rows, row: now, runs: app.runs, file, images };
      pane.replaceChildren(
        back,
        unseen("The chosen row"),
        detail(data, { open: go, numbers: { chosen: number }, coloured }),
      );
      pane.scrollTop = 0;
    } catch (error) {
      if (mine === opening)
        pane.replaceChildren(
          el("p", { className: "problem", textContent: `This row cannot be read: ${error.message}` }),
        );
    }
  }

  // The images of a row's prompt, which the first row of its group holds.
  async function imagesOf(row, run, step, tag) {
    const column = app.rows.get("pictures", row) ? await app.source.images(run, step, tag) : null;
    if (!column) return [];
    const places = app.rows.group(row).map((each) => app.rows.get("number", each));
    return places.map((place) => column[place]).find((images) => images?.length) ?? [];
  }

  function choose(row) {
    const place = ordered().order.indexOf(row);
    if (place >= 0) grid.choose(place);
    else open(row);
    grid.reveal();
  }

  function show(place) {
    const row = place && rowAt(place);
    if (row === null || row === undefined) return;
    if (shownRow && shownRow.run === place.run && shownRow.step === place.step && shownRow.number === place.number)
      return;
    choose(row);
  }

  function invitation() {
    const codes = EXAMPLES.map((each) => el("code", { textContent: each }));
    const names = [...app.rows.columns.keys()].filter((name) => !HIDDEN.includes(name));
    return el(
      "div",
      { className: "invitation" },
      unseen("The chosen row"),
      el("h3", { textContent: "Choose a row" }),
      el("p", { textContent: "“Lowest score” opens the worst response; click a heading to sort." }),
      el("p", { className: "note" }, "Filters: ", ...codes.flatMap((code) => [code, " "])),
      el("p", { className: "note", textContent: `Columns: ${names.join(", ")}` }),
      el(
        "p",
        { className: "note" },
        "Keys: ",
        ...["j", "k", "Home", "End", "/", "Esc"].flatMap((key) => [el("kbd", { textContent: key }), " "]),
      ),
    );
  }

  function key(event) {
    const { key: name, target } = event;
    if (target === box) {
      if (name === "Escape") box.blur();
      if (name === "Enter" || name === "ArrowDown") {
        event.preventDefault();
        grid.element.focus();
        grid.choose(Math.max(0, grid.place()));
      }
      return;
    }
    if (["INPUT", "SELECT", "TEXTAREA"].includes(target.tagName)) return;
    if (name === "/") {
      event.preventDefault();
      box.focus();
      box.select();
    }
    if (name === "Escape") {
      element.classList.remove("opened");
      grid.element.focus();
    }
    const step = { j: 1, k: -1 }[name] ?? (pane.contains(target) ? undefined : moves(grid)[name]);
    if (step === undefined) return;
    event.preventDefault();
    grid.choose(grid.place() < 0 ? 0 : grid.place() + step);
  }

  return { element, refresh, show, key, look, arrived: grid.reveal };
}

// How far each key moves from row to row.
function moves(grid) {
  return { ArrowDown: 1, ArrowUp: -1, PageDown: grid.page(), PageUp: -grid.page(), Home: -Infinity, End: Infinity };
}
