// The viewer of runs: pages of an overview, curves and rows, live while a run trains.

import "uplot/dist/uPlot.min.css";
import "./page.css";
import "./rows.css";
import { el, segments } from "./dom.js";
import { Rows } from "./rows.js";
import { merged } from "./series.js";
import { chunked, source } from "./source.js";
import { curvesView } from "./view_curves.js";
import { overviewView } from "./view_overview.js";
import { rowsView } from "./view_rows.js";

const POLL = 2000; // milliseconds between looks at a run that may be going on
// of Okabe and Ito, which those who see few colours tell apart
const PALETTE = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c6bb1", "#7f7f7f"];
const PAGES = [
  ["overview", "Overview"],
  ["curves", "Curves"],
  ["rows", "Rows"],
];

const app = {
  runs: [],
  rows: new Rows(),
  source: source(),
  palette: PALETTE,
  loading: true,
  unread: [],
  opened: null,
  page: "overview",
};
app.tagOf = (run, step) => new Map(app.runs[run].samples).get(step) ?? "";
const known = new Map(); // by run: step -> tag of the rows in the table

const views = {
  overview: overviewView(app, {
    worst: () => (go("rows"), views.rows.look("", ["score", 1])),
    best: () => (go("rows"), views.rows.look("", ["score", -1])),
    rows: () => go("rows"),
    curve: (name) => (go("curves"), views.curves.find(name)),
  }),
  curves: curvesView(app),
  rows: rowsView(app, { went: ({ run, step, number }) => replaced(`rows/${run}/${step}/${number}`) }),
};

const tabs = el("nav", { attrs: { "aria-label": "Pages" } });
const status = el("span", { className: "status", attrs: { role: "status" } });
const names = el("span", { className: "names" });
const top = el("header", { className: "top" }, el("h1", {}, "fppo"), names, tabs, status);
const main = el("main", { className: "main" });

function go(page) {
  if (app.page !== page) location.hash = page;
  app.page = page;
  render();
}

function replaced(hash) {
  if (location.hash.slice(1) !== hash) history.replaceState(null, "", `#${hash}`);
}

function render() {
  tabs.replaceChildren(segments("Pages", PAGES, app.page, go));
  names.replaceChildren(
    ...app.runs
      .slice(0, 4)
      .map((run) =>
        el(
          "span",
          { className: "name" },
          app.runs.length > 1 ? el("i", { className: "dot", style: { background: run.color } }) : null,
          el("bdi", { textContent: run.title }),
        ),
      ),
    app.runs.length > 4 ? `and ${app.runs.length - 4} more` : "",
  );
  const view = views[app.page];
  document.body.dataset.page = app.page;
  const fresh = main.firstChild !== view.element;
  if (fresh) main.replaceChildren(view.element);
  view.refresh();
  if (fresh) view.arrived?.();
}

function routed() {
  const [page, ...place] = location.hash.slice(1).split("/");
  app.page = views[page] ? page : "overview";
  render();
  if (app.page === "rows" && place.length === 3) {
    const [run, step, number] = place.map(Number);
    views.rows.show({ run, step, number });
  }
}

// What a run is now: new lines of its metrics after those that are here, and all else anew.
function joined(before, state, number) {
  const kept = before && state.lines.from > 0 ? before.lines.slice(0, state.lines.from) : [];
  const lines = [...kept, ...state.lines.records];
  const records = merged([...state.others, ...lines]);
  let seconds = 0;
  const hours = new Map(
    records.map((record) => [record.step, (seconds += Number(record["timing_s/step"]) || 0) / 3600]),
  );
  const metrics = [...new Set(records.flatMap((record) => Object.keys(record)))]
    .filter((name) => name !== "step")
    .sort();
  return {
    ...state,
    lines,
    stamp: state.lines.stamp,
    records,
    hours,
    metrics,
    color: PALETTE[number % PALETTE.length],
  };
}

async function look() {
  const states = await app.source.states(app.runs.map((run) => [run.stamp, run.lines.length]));
  const changed = states.some(Boolean) || !app.runs.length;
  states.forEach((state, i) => state && (app.runs[i] = joined(app.runs[i], state, i)));
  return changed;
}

// Read rows of steps that are new or written again, and drop those of steps that are gone.
async function readRows() {
  let changed = false;
  for (const [run, { samples }] of app.runs.entries()) {
    const have = known.get(run) ?? known.set(run, new Map()).get(run);
    const tags = new Map(samples);
    const gone = new Set([...have].filter(([step, tag]) => tags.get(step) !== tag).map(([step]) => step));
    app.rows.drop(run, gone);
    for (const step of gone) have.delete(step);
    app.unread = app.unread.filter(([title, step]) => title !== app.runs[run].title || !gone.has(step));
    changed ||= gone.size > 0;
    for (const steps of chunked(samples.map(([step]) => step).filter((step) => !have.has(step)))) {
      const table = await app.source.index(run, steps);
      app.rows.append(run, table);
      const there = new Set(table.get("step"));
      const lost = steps.filter((step) => !there.has(step));
      app.unread.push(...lost.map((step) => [app.runs[run].title, step]));
      for (const step of steps) have.set(step, tags.get(step));
      changed = true;
      if (app.loading && app.source.live && app.page === "rows") views.rows.refresh();
    }
  }
  return changed;
}

async function turn() {
  try {
    const changed = await look();
    const rows = await readRows();
    app.failed = null;
    if (changed || rows) render();
  } catch (error) {
    app.failed = error;
  }
  said();
}

function said() {
  const step = Math.max(0, ...app.runs.map((run) => run.records.at(-1)?.step ?? 0));
  const words = app.source.live
    ? app.failed
      ? `No answer: ${app.failed.message}`
      : `Live · step ${step}`
    : `Saved page · step ${step}`;
  status.className = app.failed ? "status failed" : app.source.live ? "status live" : "status";
  if (status.textContent !== words) status.textContent = words;
}

async function start() {
  const began = performance.now();
  document.body.append(top, main);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (app.page === "rows") views.rows.key(event);
  });
  addEventListener("hashchange", routed);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (views.curves.rebuild(), render()));
  await look();
  document.title = `${app.runs.map((run) => run.title).join(", ")} · fppo`;
  routed();
  said();
  try {
    await readRows();
  } catch (error) {
    app.failed = error;
  }
  app.loading = false;
  routed();
  said();
  app.opened = performance.now() - began;
  document.body.dataset.opened = Math.round(app.opened);
  document.body.dataset.rows = app.rows.count;
  if (!app.source.live) return;
  const poll = async () => {
    if (!document.hidden) await turn();
    document.body.dataset.rows = app.rows.count;
    setTimeout(poll, POLL);
  };
  setTimeout(poll, POLL);
}

start().catch((error) => {
  main.replaceChildren(el("p", { className: "problem", textContent: `The page cannot be shown: ${error.message}` }));
});
