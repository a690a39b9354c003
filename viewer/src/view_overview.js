// The first page: a run's headline numbers, its main curves, what took the time, settings, and commands to copy.

import { chart } from "./charts.js";
import { command, el, heading, segments, unseen } from "./dom.js";
import { commands } from "./detail.js";
import { counted, duration, isNumber, short, shown } from "./format.js";
import { memory, memoryTable, memoryTitle } from "./memory.js";
import { points } from "./series.js";
import { timeline } from "./timeline.js";

const MAIN = 9; // charts of this page

// `go` has worst(), best() and curve(name), which lead to other pages.
export function overviewView(app, go) {
  const element = el("div", { className: "page overview" });
  let [current, charts, open] = [0, [], new Set()];

  function refresh() {
    for (const each of charts) each.destroy();
    const run = app.runs[current];
    if (!run) return;
    charts = run.panels
      .map((panel) => specOf(run, panel))
      .filter((spec) => spec.lines.length)
      .slice(0, MAIN)
      .map((spec) => chart(spec));
    const which =
      app.runs.length > 1
        ? segments(
            "Run",
            app.runs.map((each, i) => [i, each.title]),
            current,
            (i) => ((current = i), refresh()),
          )
        : null;
    const notes = run.notes.map((note) => el("p", { className: "note warn", textContent: note }));
    element.replaceChildren(
      ...[which, ...notes, tiles(run), looks(run)].filter(Boolean),
      ...(charts.length
        ? [
            el(
              "section",
              {},
              unseen("Main curves"),
              el("div", { className: "charts" }, ...charts.map((each) => each.element)),
            ),
          ]
        : []),
      ...truth(run),
      ...stages(run),
      ...(run.work.length ? [section("Timeline of the last steps", timeline(run.work, app.palette))] : []),
      ...taken(run),
      ...settings(run),
      section(
        "Commands",
        ...commands(run, run.samples.at(-1)?.[0] ?? null).map(([label, line]) =>
          el("div", {}, el("p", { className: "note", textContent: label }), command(line)),
        ),
      ),
      ...metrics(run),
    );
  }

  function specOf(run, { title, note, least, metrics: named }) {
    const lines = named.map(([label, name], i) => ({
      label,
      color: app.palette[i % app.palette.length],
      points: points(run.records, name),
    }));
    return { title, note, least, share: 1 / 15, lines: lines.filter((line) => line.points.length) };
  }

  function tiles(run) {
    return el(
      "section",
      { className: "tiles" },
      ...run.tiles.map(([caption, value, note]) =>
        el(
          "div",
          { className: "tile" },
          el("div", { className: "caption", textContent: caption }),
          el("div", { className: "big", textContent: value }),
          el("div", { className: "note", textContent: note }),
        ),
      ),
    );
  }

  function looks(run) {
    if (!run.samples.length) return null;
    const link = (name, act) =>
      el("button", { type: "button", className: "preset", textContent: name, on: { click: act } });
    return el(
      "div",
      { className: "presets" },
      el("span", { className: "dim", textContent: "Look at" }),
      link("the worst response", go.worst),
      link("the best response", go.best),
      link("all rows", go.rows),
    );
  }

  function section(title, ...children) {
    return el("section", {}, heading(2, title), ...children);
  }

  function fold(title, make) {
    const details = el("details", { open: open.has(title) }, el("summary", { textContent: title }));
    const fill = () => details.childElementCount === 1 && details.append(make());
    if (details.open) fill();
    details.addEventListener("toggle", () => (open[details.open ? "add" : "delete"](title), details.open && fill()));
    return details;
  }

  function truth(run) {
    if (!run.truth.length) return [];
    const made = run.truth.map(({ title, note, unit, lines }) =>
      chart({
        title,
        note,
        unit,
        least: 0.1,
        share: 0,
        lines: Object.entries(lines).map(([label, line], i) => ({ label, color: app.palette[i], points: line })),
      }),
    );
    charts.push(...made);
    const note = el("p", {
      className: "note",
      textContent:
        "Held-out responses of the last evaluation: the critic's value before each token, and the exact one.",
    });
    return [
      section(
        "Critic against exact values, by token",
        note,
        el("div", { className: "charts" }, ...made.map((each) => each.element)),
      ),
    ];
  }

  function stages(run) {
    if (!run.stages.length) return [];
    const longest = Math.max(...run.stages.map(([, seconds]) => seconds)) || 1;
    const lines = run.stages.map(([name, seconds]) =>
      el(
        "tr",
        {},
        el("td", { textContent: name }),
        el("td", { className: "num", textContent: duration(seconds) }),
        el(
          "td",
          { className: "grow" },
          el("div", { className: "share", style: { width: `${(100 * seconds) / longest}%` } }),
        ),
      ),
    );
    return [section("Where a step's time goes", el("table", {}, el("tbody", {}, ...lines)))];
  }

  function taken(run) {
    if (!run.memory) return [];
    const { stages } = run.memory;
    const numbers = fold("The numbers of this memory", () => memoryTable(stages));
    return [section(memoryTitle(run.memory), memory(stages, app.palette), numbers)];
  }

  function settings(run) {
    const names = Object.keys(run.settings);
    if (!names.length) return [];
    const chosen = new Set(run.chosen);
    const pairs = (some) =>
      el(
        "table",
        {},
        el(
          "tbody",
          {},
          ...some.map((name) =>
            el(
              "tr",
              {},
              el("td", {}, el("code", { textContent: name })),
              el("td", { textContent: shown(run.settings[name]) }),
            ),
          ),
        ),
      );
    const rest = names.filter((name) => !chosen.has(name));
    const title = `${counted(rest.length, "setting")} at ${rest.length === 1 ? "its default" : "their defaults"}`;
    return [
      section(
        "Settings",
        pairs(names.filter((name) => chosen.has(name))),
        ...(rest.length ? [fold(title, () => pairs(rest))] : []),
      ),
    ];
  }

  function metrics(run) {
    if (!run.metrics.length) return [];
    const made = () => {
      const head = el(
        "tr",
        {},
        ...["metric", "first", "last", "least", "greatest"].map((name, i) =>
          el("th", { className: i ? "num" : "", textContent: name }),
        ),
      );
      const lines = run.metrics.map((name) => {
        const values = points(run.records, name).map(([, value]) => value);
        const four = values.length
          ? [values[0], values.at(-1), values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))]
          : [null, null, null, null];
        const link = el("button", {
          type: "button",
          className: "link",
          textContent: name,
          on: { click: () => go.curve(name) },
        });
        return el(
          "tr",
          {},
          el("td", {}, link),
          ...four.map((x) => el("td", { className: "num", textContent: isNumber(x) ? short(x, 4) : "–" })),
        );
      });
      return el("div", { className: "wide" }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...lines)));
    };
    return [section("Metrics", fold(`All ${counted(run.metrics.length, "metric")}`, made))];
  }

  return { element, refresh };
}
