// Who worked when in the last steps: a line for each role, and for each rank of a pool.

import { el, svg } from "./dom.js";
import { duration } from "./format.js";
import { inkOn } from "./scales.js";

const [LEFT, RIGHT, ROW, TOP, BOTTOM] = [150, 14, 26, 24, 24];
const MOST = 24; // lines drawn at most
const LETTER = 6.6; // width of a letter in a bar

const ROLES = ["rollout", "reward", "actor", "reference", "critic"];

// `bars` are {process, line, name, kind, step, start, seconds, more}; those of the line "step" mark the steps.
export function timeline(bars, palette, width = 1180) {
  const drawn = bars.filter((bar) => bar.line !== "step");
  if (!drawn.length) return el("p", { className: "note", textContent: "This run has written no trace." });
  const names = [...new Set(drawn.map((bar) => `${bar.process}\n${bar.line}`))];
  const lines = names.slice(0, MOST);
  const zero = Math.min(...drawn.map((bar) => bar.start));
  const end = Math.max(...drawn.map((bar) => bar.start + bar.seconds));
  const scale = (width - LEFT - RIGHT) / Math.max(end - zero, 1e-9);
  const x = (time) => LEFT + scale * (time - zero);
  const bottom = TOP + ROW * lines.length;
  const readout = el("p", {
    className: "note readout-line",
    attrs: { "aria-live": "polite" },
    textContent: "Point at a bar, or go to it by Tab and the arrow keys.",
  });
  const picture = svg(
    "svg",
    {
      attrs: { viewBox: `0 0 ${width} ${bottom + BOTTOM}`, role: "group", "aria-label": "Timeline of the last steps" },
    },
    ...marks(end - zero, x, zero, bottom),
    ...steps(bars, x, zero, bottom),
  );
  const rects = [];
  lines.forEach((key, number) => {
    const [process, name] = key.split("\n");
    const y = TOP + ROW * number;
    const label = process === "controller" ? name : `${process.replace(/^pool /, "")}, ${name}`;
    picture.append(svg("text", { className: "tick", attrs: { x: LEFT - 8, y: y + 17, "text-anchor": "end" } }, label));
    for (const bar of drawn) {
      if (`${bar.process}\n${bar.line}` === key) picture.append(...barred(bar, x(bar.start), y, scale, palette, rects));
    }
  });
  const read = (event) => event.target.dataset?.said && (readout.textContent = event.target.dataset.said);
  picture.addEventListener("pointerover", read);
  picture.addEventListener("focusin", read);
  picture.addEventListener("keydown", (event) => walk(event, rects));
  if (rects.length) rects[0].setAttribute("tabindex", 0);
  const more =
    names.length > MOST
      ? el("p", { className: "note", textContent: `${names.length - MOST} more lines are not drawn.` })
      : null;
  return el("div", {}, el("div", { className: "wide timeline" }, picture), readout, more, legend(drawn, palette));
}

function barred(bar, x, y, scale, palette, rects) {
  const width = Math.max(scale * bar.seconds, 1);
  const role = ROLES.indexOf(bar.kind);
  const more = Object.entries(bar.more).map(([name, value]) =>
    name === "waited" ? `waited ${duration(value)}` : `${Math.round(value).toLocaleString("en")} ${name}`,
  );
  const said = [`${bar.name}, step ${bar.step}: ${duration(bar.seconds)}`, ...more].join("; ");
  const [fill, ink] = role < 0 ? ["var(--dim)", "var(--paper)"] : [palette[role], inkOn(palette[role])];
  const rect = svg("rect", {
    className: "work",
    attrs: {
      x: x.toFixed(1),
      y: y + 4,
      width: width.toFixed(1),
      height: ROW - 8,
      rx: 3,
      "data-said": said,
      tabindex: -1,
      role: "img",
      "aria-label": said,
    },
    style: { fill },
  });
  rects.push(rect);
  const fits = width > LETTER * bar.name.length + 8;
  return fits
    ? [
        rect,
        svg(
          "text",
          { className: "inbar", attrs: { x: (x + 5).toFixed(1), y: y + 17 }, style: { fill: ink } },
          bar.name,
        ),
      ]
    : [rect];
}

function marks(seconds, x, zero, bottom) {
  const rough = seconds / 8;
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999) ?? 1;
  const times = Array.from({ length: Math.floor(seconds / step + 1e-9) + 1 }, (_, i) => i * step);
  return times.flatMap((t) => [
    svg("line", { className: "grid", attrs: { x1: x(zero + t), x2: x(zero + t), y1: TOP, y2: bottom } }),
    svg("text", { className: "tick", attrs: { x: x(zero + t), y: bottom + 16, "text-anchor": "middle" } }, duration(t)),
  ]);
}

function steps(bars, x, zero, bottom) {
  return bars
    .filter((bar) => bar.line === "step" && bar.start >= zero - 1)
    .flatMap((bar) => {
      const at = Math.max(x(bar.start), LEFT);
      return [
        svg("line", { className: "stepline", attrs: { x1: at, x2: at, y1: 6, y2: bottom } }),
        svg("text", { className: "tick", attrs: { x: at + 4, y: 15 } }, `step ${bar.step}`),
      ];
    });
}

function legend(drawn, palette) {
  const kinds = ROLES.filter((role) => drawn.some((bar) => bar.kind === role));
  return el(
    "div",
    { className: "keys" },
    ...kinds.map((kind) =>
      el(
        "span",
        { className: "key" },
        el("i", { className: "dot", style: { background: palette[ROLES.indexOf(kind)] } }),
        kind,
      ),
    ),
  );
}

function walk(event, rects) {
  const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const now = rects.indexOf(event.target);
  if (!way || now < 0) return;
  event.preventDefault();
  const next = rects[Math.max(0, Math.min(rects.length - 1, now + way))];
  rects[now].setAttribute("tabindex", -1);
  next.setAttribute("tabindex", 0);
  next.focus();
}
