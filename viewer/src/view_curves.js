// The page of curves: all runs over each other, smoothed, on a log scale, and seeds as bands.

import { chart } from "./charts.js";
import { el, toggle, unseen, wide } from "./dom.js";
import { counted, shown } from "./format.js";
import { band, differing, points, seedGroups } from "./series.js";

const AXES = [
  ["step", "over steps"],
  ["hours", "over hours in steps"],
];

export function curvesView(app) {
  const state = { share: 1 / 15, log: false, seeds: true, over: "step", words: "", hidden: new Set() };
  const bar = el("div", { className: "controls" });
  const keys = el("div", { className: "run-keys" });
  const settings = el("div");
  const grid = el("div", { className: "charts" });
  const none = el("p", { className: "empty", hidden: true });
  const element = el("div", { className: "page" }, bar, keys, settings, none, unseen("Curves"), grid);
  let [charts, seeds] = [new Map(), null];

  function controls() {
    seeds = grouped().some((group) => group.length > 1);
    const words = el("input", {
      type: "search",
      value: state.words,
      placeholder: "Metrics, as entropy or critic/",
      attrs: { "aria-label": "Find metrics" },
      on: { input: () => change({ words: words.value }) },
    });
    const smoothing = el("input", {
      type: "range",
      min: 0,
      max: 50,
      value: Math.round(state.share * 100),
      attrs: { "aria-label": "Smoothing" },
      on: { input: () => change({ share: Number(smoothing.value) / 100 }) },
    });
    const over = el("select", {
      attrs: { "aria-label": "Horizontal axis" },
      on: { change: () => change({ over: over.value }, true) },
    });
    over.append(...AXES.map(([value, label]) => el("option", { value, textContent: label })));
    over.value = state.over;
    bar.replaceChildren(
      words,
      el("label", { className: "toggle" }, "Smoothing ", smoothing),
      toggle("Log scale", state.log, (log) => change({ log }, true)),
      ...(seeds ? [toggle("Seeds as bands", state.seeds, (on) => change({ seeds: on }, true))] : []),
      over,
    );
  }

  function change(some, anew = false) {
    Object.assign(state, some);
    if (anew) rebuild();
    else refresh();
  }

  function grouped() {
    return seedGroups(app.runs);
  }

  // Lines of the chart: a run, or the mean of runs that differ in their seeds alone.
  function members() {
    const groups = state.seeds ? grouped() : app.runs.map((_, i) => [i]);
    const unlike = differing(app.runs).filter(([name]) => name !== "seed");
    const left = groups.map((group) => group.filter((i) => !state.hidden.has(i))).filter((group) => group.length);
    return left.map((group) => ({
      color: app.runs[group[0]].color,
      runs: group.map((i) => app.runs[i]),
      label: labelled(group, unlike),
    }));
  }

  // A run by its title; several by the settings in which they differ from the others.
  function labelled(group, unlike) {
    if (app.runs.length === 1) return "";
    if (group.length === 1) return app.runs[group[0]].title;
    const said = unlike.slice(0, 3).map(([name, values]) => `${name.split(".").at(-1)} ${shown(values[group[0]])}`);
    return `${said.join(", ") || "all"}, ${counted(group.length, "seed")}`;
  }

  function keyed() {
    const several = app.runs.length > 1;
    keys.hidden = !several;
    keys.replaceChildren(
      ...app.runs.map((run, i) => {
        const box = el("input", {
          type: "checkbox",
          checked: !state.hidden.has(i),
          on: { change: () => (state.hidden[box.checked ? "delete" : "add"](i), rebuild()) },
        });
        return el(
          "label",
          { className: "toggle" },
          box,
          el("i", { className: "dot", style: { background: run.color } }),
          el("bdi", { textContent: run.title }),
        );
      }),
    );
    const unlike = several ? differing(app.runs) : [];
    settings.replaceChildren(...(several ? [differences(unlike)] : []));
  }

  function differences(unlike) {
    if (!unlike.length) return el("p", { className: "note", textContent: "The runs have the same settings." });
    const head = el(
      "tr",
      {},
      el("th", { textContent: "setting" }),
      ...app.runs.map((run) =>
        el(
          "th",
          {},
          el("i", { className: "dot", style: { background: run.color } }),
          el("bdi", { textContent: run.title }),
        ),
      ),
    );
    const lines = unlike.map(([name, values]) =>
      el(
        "tr",
        {},
        el("td", {}, el("code", { textContent: name })),
        ...values.map((value) => el("td", { textContent: shown(value) })),
      ),
    );
    const table = el("table", {}, el("thead", {}, head), el("tbody", {}, ...lines));
    return el(
      "details",
      { open: true, className: "differences" },
      el("summary", { textContent: `${counted(unlike.length, "setting differs", "settings differ")}` }),
      wide("Settings that differ", table),
    );
  }

  // Charts: those of the report's panels first, then one for each other metric.
  function specs() {
    const words = state.words.toLowerCase().split(/\s+/).filter(Boolean);
    const found = panelsOf(app.runs).filter(({ title, metrics }) => {
      const said = `${title} ${metrics.map(([, name]) => name).join(" ")}`.toLowerCase();
      return words.every((word) => said.includes(word));
    });
    return found
      .map((panel) => ({ key: panel.metrics.map(([, name]) => name).join(" "), ...spec(panel) }))
      .filter(({ lines }) => lines.length);
  }

  function spec({ title, note, least, metrics }) {
    const lines = members().flatMap((member) =>
      metrics.map(([label, name], n) => {
        const both = metrics.length > 1 && label ? `${member.label} · ${label}` : member.label;
        return lineOf(member, name, app.runs.length > 1 ? both : label, n);
      }),
    );
    const shared = { log: state.log, share: state.share, unit: state.over === "step" ? "step" : "hours" };
    return { title, note, least, ...shared, lines: lines.filter((line) => line.points.length) };
  }

  function lineOf({ runs, color }, name, label, n) {
    const several = app.runs.length > 1;
    const own = several && n === 0 ? color : several ? shade(color, n) : app.palette[n % app.palette.length];
    const curves = runs.map((run) =>
      points(run.records, name, state.over === "step" ? undefined : (record) => run.hours.get(record.step)),
    );
    if (curves.length === 1) return { label, color: own, points: curves[0] };
    const { mean, low, high } = band(curves.filter((curve) => curve.length));
    return { label, color: own, points: mean, low, high };
  }

  function refresh() {
    if (seeds !== grouped().some((group) => group.length > 1)) controls();
    keyed();
    const wanted = specs();
    none.hidden = wanted.length > 0;
    none.textContent = app.runs.some((run) => run.records.length)
      ? "No metric has that name."
      : "No metrics yet: they come with the first step.";
    const kept = new Map();
    for (const each of wanted) {
      const known = charts.get(each.key);
      if (known) known.update(each);
      kept.set(each.key, known ?? chart(each));
    }
    for (const [key, each] of charts) if (!kept.has(key)) each.destroy();
    charts = kept;
    const nodes = [...kept.values()].map((each) => each.element);
    if (nodes.length !== grid.children.length || nodes.some((node, i) => grid.children[i] !== node))
      grid.replaceChildren(...nodes);
  }

  function rebuild() {
    for (const each of charts.values()) each.destroy();
    charts = new Map();
    controls();
    refresh();
  }

  function find(words) {
    state.words = words;
    rebuild();
  }

  return { element, refresh, rebuild, find };
}

// The panels of all runs with their metrics as [label, name]; metrics in no panel get one of their own.
export function panelsOf(runs) {
  const panels = new Map();
  for (const run of runs) {
    for (const panel of run.panels) {
      const known = panels.get(panel.title);
      const names = new Set(known?.metrics.map(([, name]) => name));
      panels.set(panel.title, {
        ...panel,
        metrics: [...(known?.metrics ?? []), ...panel.metrics.filter(([, name]) => !names.has(name))],
      });
    }
  }
  const named = new Set([...panels.values()].flatMap(({ metrics }) => metrics.map(([, name]) => name)));
  const rest = new Set(runs.flatMap((run) => run.metrics).filter((name) => !named.has(name)));
  return [
    ...panels.values(),
    ...[...rest].sort().map((name) => ({ title: name, note: "", least: 0, metrics: [["", name]] })),
  ];
}

// A lighter tone of a colour for a run's further lines in one chart.
function shade(color, n) {
  const value = parseInt(color.slice(1), 16);
  const mixed = [16, 8, 0].map((bits) => Math.round(((value >> bits) & 255) * 0.6 ** n + 160 * (1 - 0.6 ** n)));
  return `#${mixed.map((x) => x.toString(16).padStart(2, "0")).join("")}`;
}
