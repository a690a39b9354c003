// A chart of several lines, drawn by uPlot: a heading, its keys, and the numbers under the pointer or the arrow keys.

import uPlot from "uplot";
import { el } from "./dom.js";
import { isNumber, short } from "./format.js";
import { aligned, axisRange, smooth } from "./series.js";

const HEIGHT = 190;
// spec: {title, note, unit, least, log, share, lines: [{label, color, points, low, high}]}; low and high make a band.
// Returns {element, update(spec), destroy()}.
export function chart(spec, { height = HEIGHT, onPick } = {}) {
  const box = el("div", { className: "plot", style: { height: `${height}px` } });
  const head = el("div", { className: "chart-head" });
  const tip = el("div", { className: "tip", hidden: true });
  const element = el("figure", { className: "chart", attrs: { tabindex: 0 } }, head, box, tip);
  let [plot, drawn, current] = [null, "", spec];
  const width = () => Math.max(box.clientWidth, 160);

  const draw = () => {
    const shown = prepared(current);
    const signature = JSON.stringify([
      shown.series.map((s) => [s.label, s.stroke]),
      current.log,
      current.least,
      theme(),
    ]);
    titled(head, element, current);
    if (plot && signature === drawn) {
      plot.setData(shown.data);
      return;
    }
    plot?.destroy();
    drawn = signature;
    plot = new uPlot(options(shown, current, { width: width(), height, tip, box, onPick }), shown.data, box);
  };
  titled(head, element, spec);
  const seen = new IntersectionObserver((entries) => {
    if (!plot && entries.some((entry) => entry.isIntersecting)) draw();
  });
  const resized = new ResizeObserver(() => {
    if (plot && box.clientWidth && plot.width !== width()) plot.setSize({ width: width(), height });
  });
  seen.observe(box);
  resized.observe(box);
  element.addEventListener("keydown", (event) => walk(event, plot));
  element.addEventListener("blur", () => plot?.setCursor({ left: -10, top: -10 }));
  return {
    element,
    update: (next) => {
      current = next;
      if (plot) draw();
      else titled(head, element, current);
    },
    destroy: () => {
      seen.disconnect();
      resized.disconnect();
      plot?.destroy();
    },
  };
}

// A colour of the page's style, as one that a canvas knows.
function resolved(name, box) {
  const probe = box.appendChild(el("i", { style: { color: `var(${name})` } }));
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}

export function theme() {
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

// The data of uPlot and its series: each line once faintly and once smoothed, and the bounds of its band.
function prepared({ lines, share, log }) {
  const [columns, series, bands] = [[], [{}], []];
  const add = (points, options) => {
    columns.push(points);
    series.push({ spanGaps: true, points: { show: points.length < 12 && !options.hidden, size: 5 }, ...options });
  };
  for (const line of lines) {
    if (line.low) {
      add(line.high, { label: line.label, stroke: "transparent", hidden: true });
      add(line.low, { label: line.label, stroke: "transparent", hidden: true });
      bands.push({ series: [series.length - 2, series.length - 1], fill: faded(line.color, 0.18) });
    }
    const soft = share > 0 && line.points.length > 4;
    if (soft && !line.low)
      add(line.points, { label: line.label, stroke: faded(line.color, 0.25), width: 1, hidden: true });
    add(soft ? smooth(line.points, share) : line.points, {
      label: line.label,
      stroke: line.color,
      width: 2,
      tint: line.color,
    });
  }
  const data = aligned(columns);
  if (data[0].length === 1) data.forEach((column, i) => column.push(i ? null : column[0] + 1)); // one x has no width
  return {
    data: log ? data.map((column, i) => (i ? column.map((x) => (x > 0 ? x : null)) : column)) : data,
    series,
    bands,
  };
}

function faded(color, share) {
  const value = parseInt(color.slice(1), 16);
  return `rgba(${value >> 16}, ${(value >> 8) & 255}, ${value & 255}, ${share})`;
}

function options({ series, bands }, { least = 0, log = false, unit = "step" }, { width, height, tip, box, onPick }) {
  const [ink, rule] = ["--dim", "--rule"].map((name) => resolved(name, box));
  const axis = {
    stroke: ink,
    grid: { stroke: rule, width: 1 },
    ticks: { show: false },
    font: "11px system-ui, sans-serif",
  };
  const values = (_, marks) => marks.map((mark) => (mark === null ? "" : short(mark, 4)));
  return {
    width,
    height,
    series,
    bands,
    legend: { show: false },
    padding: [8, 8, 0, 0],
    cursor: { sync: { key: unit }, y: false, drag: { x: true, y: false }, points: { size: 7 } },
    scales: {
      x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
      y: log ? { distr: 3 } : { range: (_, low, high) => (isNumber(low) ? axisRange([low, high], least) : [0, 1]) },
    },
    axes: [
      {
        ...axis,
        size: 24,
        gap: 2,
        values,
        incrs: unit === "step" ? [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5] : undefined,
      },
      {
        ...axis,
        size: (_, marks) => 14 + 6.5 * Math.max(3, ...(marks ?? []).map((mark) => mark.length)),
        gap: 4,
        values,
      },
    ],
    hooks: {
      setCursor: [(plot) => tipped(plot, tip, unit, box)],
      ready: [
        (plot) =>
          onPick &&
          plot.over.addEventListener("click", () => plot.cursor.idx !== null && onPick(plot.data[0][plot.cursor.idx])),
      ],
    },
  };
}

// The numbers of the step under the cursor, beside it.
function tipped(plot, tip, unit, box) {
  const { idx, left } = plot.cursor;
  const keys = plot.series.map((series, i) => [series, i]).filter(([series]) => series.tint);
  const looked = box.parentElement.matches(":hover, :focus"); // not a chart whose cursor follows
  if (idx === null || idx === undefined || left < 0 || !keys.length || !looked) {
    tip.hidden = true;
    return;
  }
  const lines = keys
    .filter(([, i]) => isNumber(plot.data[i][idx]))
    .slice(0, 12)
    .map(([series, i]) =>
      el(
        "div",
        {},
        el("i", { className: "dot", style: { background: series.tint } }),
        `${series.label ? `${series.label} ` : ""}`,
        el("b", { textContent: short(plot.data[i][idx], 4) }),
      ),
    );
  tip.hidden = lines.length === 0;
  tip.replaceChildren(el("div", { className: "dim", textContent: `${unit} ${short(plot.data[0][idx], 5)}` }), ...lines);
  const room = box.clientWidth - tip.offsetWidth;
  const at = plot.bbox.left / devicePixelRatio + left + 12;
  tip.style.left = `${Math.max(0, at > room ? at - tip.offsetWidth - 24 : at)}px`;
}

function walk(event, plot) {
  const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!way || !plot) return;
  event.preventDefault();
  const xs = plot.data[0];
  const now = plot.cursor.left >= 0 ? plot.cursor.idx : null;
  const next = Math.max(0, Math.min(xs.length - 1, now === null ? xs.length - 1 : now + way));
  plot.setCursor({ left: plot.valToPos(xs[next], "x"), top: 10 });
}

// The heading with the last numbers, and the chart in words for those who do not see it.
function titled(head, element, { title, note, lines }) {
  const last = (line) => line.points[line.points.length - 1]?.[1];
  const [only] = lines.length === 1 ? lines : [];
  const keys = lines.map((line) =>
    el(
      "span",
      { className: "key" },
      el("i", { className: "dot", style: { background: line.color } }),
      `${line.label} `,
      el("b", { textContent: short(last(line)) }),
    ),
  );
  head.replaceChildren(
    el("h3", {}, el("span", { textContent: title }), only ? el("b", { textContent: short(last(only)) }) : null),
    note ? el("p", { className: "note", textContent: note }) : "",
    only ? "" : el("div", { className: "keys" }, ...keys),
  );
  const said = lines
    .filter((line) => line.points.length)
    .map((line) => {
      const [first, end] = [line.points[0], line.points[line.points.length - 1]];
      return `${line.label || title} from ${short(first[1])} to ${short(end[1])}`;
    });
  element.setAttribute("aria-label", `${title}: ${said.join("; ")}. Arrow keys read the numbers.`);
}
