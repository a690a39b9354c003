// The memory of a step: a bar for each stage, cut into kinds of what it held at its peak.

import { el } from "./dom.js";
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
    return el(
      "tr",
      {},
      el("td", { textContent: stage.stage }),
      el("td", { className: "num", textContent: bytes(stage.peak) }),
      el("td", { className: "grow" }, bar),
    );
  });
  const shown = KINDS.filter((kind) => stages.some((stage) => stage[kind] > 0));
  const keys = shown.map((kind) =>
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
