// The table of rows: only those in sight are in the page, and the keyboard moves the chosen one.

import { elementScroll, observeElementOffset, observeElementRect, Virtualizer } from "@tanstack/virtual-core";
import { el } from "./dom.js";
import { isNumber, short, tail } from "./format.js";

const HEIGHT = 30; // pixels of a row
const MOST = 180; // letters of a cell

// Columns of the table: [name, heading, class].
export function headings(rows, runs) {
  const parts = rows.parts.length > 1 && runs.length === 1 ? rows.parts.slice(0, 2) : [];
  return [
    ...(runs.length > 1 ? [["run", "Run", "run"]] : []),
    ["step", "Step", "num"],
    ["score", "Score", "score"],
    ...parts.map((name) => [name, name.slice("score.".length), "num part"]),
    ["length", "Tokens", "num wide-only"],
    ["finish", "End", "wide-only"],
    ["prompt", "Prompt", "text"],
    ["response", "Response", "text"],
  ];
}

// `pick(row)` opens a row. Returns {element, update({rows, runs, order, sort}), choose(place), chosen}.
export function table({ pick, sortBy }) {
  const body = el("div", { className: "rows", attrs: { role: "presentation" } });
  const head = el("div", { className: "table-head", attrs: { role: "row", "aria-rowindex": 1 } });
  const element = el(
    "div",
    { className: "table", attrs: { role: "grid", tabindex: 0, "aria-label": "Sampled rows" } },
    head,
    body,
  );
  let view = { rows: null, runs: [], order: [], sort: ["step", -1], columns: [], range: [0, 1] };
  let chosen = -1;

  const virtual = new Virtualizer({
    count: 0,
    getScrollElement: () => element,
    estimateSize: () => HEIGHT,
    scrollPaddingStart: HEIGHT, // below the head, which stays
    scrollMargin: HEIGHT,
    overscan: 8,
    scrollToFn: elementScroll,
    observeElementRect,
    observeElementOffset,
    onChange: () => draw(),
  });
  virtual._didMount();

  function draw() {
    virtual._willUpdate();
    body.style.height = `${virtual.getTotalSize()}px`;
    const items = virtual.getVirtualItems().slice(0, 100);
    body.replaceChildren(...items.map((item) => line(item.index, item.start - HEIGHT)));
    element.setAttribute("aria-activedescendant", chosen >= 0 ? `row-${chosen}` : "");
  }

  function line(place, start) {
    const row = view.order[place];
    const cells = view.columns.map(([name, , css]) => cell(name, css, row));
    const className = place === chosen ? "row chosen" : "row";
    const attrs = { role: "row", "aria-rowindex": place + 2, "aria-selected": String(place === chosen) };
    const on = { click: () => choose(place) };
    return el(
      "div",
      { className, id: `row-${place}`, attrs, on, style: { transform: `translateY(${start}px)` } },
      ...cells,
    );
  }

  function cell(name, css, row) {
    const value = view.rows.get(name, row);
    const attrs = { role: "gridcell", class: `cell ${css}`, dir: css === "text" ? "auto" : null };
    if (name === "run")
      return el(
        "span",
        { attrs },
        el("i", { className: "dot", style: { background: view.runs[value].color } }),
        view.runs[value].title,
      );
    if (name !== "score")
      return el("span", { attrs, textContent: isNumber(value) ? short(value) : written(name, value) });
    const [low, high] = view.range;
    const share = isNumber(value) && high > low ? (value - low) / (high - low) : 0;
    return el("span", { attrs, style: { "--share": share }, textContent: isNumber(value) ? short(value) : "failed" });
  }

  function headed() {
    head.replaceChildren(
      ...view.columns.map(([name, label, css]) => {
        const way = view.sort[0] === name ? view.sort[1] : 0;
        const sorted = way ? (way > 0 ? "ascending" : "descending") : "none";
        const mark = way ? (way > 0 ? " ↑" : " ↓") : "";
        const button = el("button", {
          type: "button",
          textContent: label + mark,
          title: `Sort by ${label}`,
          on: { click: () => sortBy(name) },
        });
        return el("span", { className: `cell ${css}`, attrs: { role: "columnheader", "aria-sort": sorted } }, button);
      }),
    );
    element.style.setProperty(
      "--columns",
      view.columns.map(([name, , css]) => WIDTHS[name] ?? WIDTHS[css.split(" ")[0]]).join(" "),
    );
  }

  function choose(place) {
    if (!view.order.length) return;
    chosen = Math.max(0, Math.min(view.order.length - 1, place));
    virtual.scrollToIndex(chosen, { align: "auto" });
    draw();
    pick(view.order[chosen]);
  }

  function update(next, row) {
    view = { ...view, ...next, columns: headings(next.rows, next.runs), range: rangeOf(next.rows) };
    chosen = row === null ? -1 : view.order.indexOf(row);
    virtual.setOptions({ ...virtual.options, count: view.order.length });
    virtual.measure();
    virtual.scrollOffset = element.scrollTop; // 0 where the table left the page and came back
    headed();
    draw();
    element.setAttribute("aria-rowcount", view.order.length + 1);
  }

  const page = () => Math.max(1, Math.floor(element.clientHeight / HEIGHT) - 2);
  const reveal = () => chosen >= 0 && virtual.scrollToIndex(chosen, { align: "center" });
  return { element, update, choose, page, reveal, place: () => chosen, last: () => view.order.length - 1 };
}

const WIDTHS = {
  step: "3.2em",
  score: "4.4em",
  num: "4.8em",
  length: "4.2em",
  finish: "4em",
  prompt: "minmax(5em, 1fr)",
  response: "minmax(5em, 1.3fr)",
  run: "7em",
};

function written(name, value) {
  if (value === null) return "–";
  const text = String(value);
  return name === "prompt" ? tail(text.trimEnd(), MOST) : text.slice(0, MOST);
}

// The least and the largest score, for the bars behind the scores.
function rangeOf(rows) {
  let [low, high] = [Infinity, -Infinity];
  for (const score of rows.columns.get("score") ?? []) {
    if (isNumber(score)) [low, high] = [Math.min(low, score), Math.max(high, score)];
  }
  return low < high ? [Math.min(low, 0), high] : [0, 1];
}
