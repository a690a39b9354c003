// The memory of a step: a bar for each stage, cut into kinds of what it held at its peak; and the same as a table.

import { el, wide } from "./dom.js";
import { bytes } from "./format.js";

export const KINDS = ["parameters", "moments", "gradients", "cache", "activations"];

// The parts of a stage as shares of the largest peak: [{kind, size, share}], without those of nothing.
export function partsOf(stage, largest) {
  return KINDS.filter((kind) => stage[kind] > 0).map((kind) => ({
    kind,
    size: stage[kind],
    share: stage[kind] / largest,
  }));
}

// The kinds that any of the stages held.
export function kindsOf(stages) {
  return KINDS.filter((kind) => stages.some((stage) => stage[kind] > 0));
}

// What `state` is of: a step, and on several ranks the one whose largest peak is shown.
export function memoryTitle({ step, rank, ranks }) {
  return `Memory of step ${step}${ranks > 1 ? `, on rank ${rank}, which has most of ${ranks}` : ""}`;
}

const rowHead = (name) => el("th", { textContent: name, attrs: { scope: "row" } });
const number = (size) => el("td", { className: "num", textContent: bytes(size) });

// `stages` are {stage, peak, and bytes by kind}.
export function memory(stages, palette) {
  const largest = Math.max(...stages.map((stage) => stage.peak), 1);
  const lines = stages.map((stage) => {
    const parts = partsOf(stage, largest);
    const said = parts.map(({ kind, size }) => `${kind} ${bytes(size)}`).join(", ");
    const cut = parts.map(({ kind, size, share }) =>
      el("i", {
        title: `${kind} ${bytes(size)}`,
        style: { width: `${(100 * share).toFixed(3)}%`, background: palette[KINDS.indexOf(kind)] },
      }),
    );
    const bar = el(
      "div",
      { className: "stack", attrs: { role: "img", "aria-label": `${stage.stage}: ${said}` } },
      ...cut,
    );
    return el("tr", {}, rowHead(stage.stage), number(stage.peak), el("td", { className: "grow" }, bar));
  });
  const keys = kindsOf(stages).map((kind) =>
    el(
      "span",
      { className: "key" },
      el("i", { className: "dot", style: { background: palette[KINDS.indexOf(kind)] } }),
      kind,
    ),
  );
  return el(
    "div",
    { className: "memory" },
    el("table", {}, el("tbody", {}, ...lines)),
    el("div", { className: "keys" }, ...keys),
  );
}

// The numbers behind the bars.
export function memoryTable(stages) {
  const names = [...kindsOf(stages), "peak"];
  const heads = ["stage", ...names].map((name, i) =>
    el("th", { className: i ? "num" : "", textContent: name, attrs: { scope: "col" } }),
  );
  const lines = stages.map((stage) => el("tr", {}, rowHead(stage.stage), ...names.map((name) => number(stage[name]))));
  const table = el("table", {}, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...lines));
  return wide("Memory by stage and kind", table);
}
