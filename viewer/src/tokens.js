// A response as a strip of tokens, coloured by one of their numbers; all numbers of the token under the pointer, or
// under the keyboard's focus, stand beside it.

import { el } from "./dom.js";
import { counted, short, signed } from "./format.js";
import { NUMBERS, colour, numbersOf, scaled, turns } from "./scales.js";

const SHOWN = 4000; // tokens in the page at first, and by each further step

// `row` is a row of a file; `chosen` the name of the number to colour by. Returns {element, colour(name), names}.
export function strip(row, chosen) {
  const numbers = numbersOf(row);
  const names = Object.keys(numbers);
  const readout = el("div", { className: "readout", attrs: { "aria-live": "polite" } });
  const tokens = el("div", {
    className: "tokens",
    dir: "auto",
    attrs: { role: "listbox", "aria-label": "Tokens of the response", "aria-orientation": "horizontal" },
  });
  const legend = el("div", { className: "legend" });
  const spans = [];
  let [name, strengths] = [names.includes(chosen) ? chosen : "", []];

  const paint = (from = 0) => {
    for (let i = from; i < spans.length; i++) spans[i].style.background = name ? colour(strengths[i]) : "transparent";
  };
  const recolour = (next) => {
    name = names.includes(next) ? next : "";
    const scale = name ? scaled(name, numbers[name], row.mask) : null;
    strengths = scale?.strengths ?? [];
    legend.replaceChildren(...(scale ? legended(name, scale) : []));
    paint();
  };
  const read = (i) => readout.replaceChildren(el("dl", {}, ...described(row, numbers, i, name)));

  const grow = () => {
    const from = spans.length;
    const end = Math.min(from + SHOWN, row.pieces.length);
    tokens.querySelector(".more")?.remove();
    tokens.append(...pieces(row, from, end, spans));
    if (end < row.pieces.length) tokens.append(more(row.pieces.length - end, grow));
    paint(from);
  };
  grow();
  if (!spans.length) tokens.append(el("span", { className: "note", textContent: "(empty)" }));
  else spans[0].tabIndex = 0;
  tokens.addEventListener("pointerover", (event) => event.target.dataset?.i && read(Number(event.target.dataset.i)));
  tokens.addEventListener(
    "focusin",
    (event) => event.target.dataset?.i && focused(spans, Number(event.target.dataset.i), read),
  );
  tokens.addEventListener("keydown", (event) => walk(event, spans));
  recolour(chosen);
  readout.replaceChildren(
    el("p", {
      className: "note",
      textContent: "Point at a token, touch it, or go to it by Tab and the arrow keys: its numbers stand here.",
    }),
  );
  return { element: el("div", { className: "strip" }, legend, tokens, readout), colour: recolour, names };
}

// The choices of a strip: [name, label], the plain text last.
export function choices(names) {
  return [...names.map((name) => [name, NUMBERS[name].label]), ["", "Plain text"]];
}

// The spans of tokens from..end, with a line before each turn; new spans are appended to `spans`.
function pieces(row, from, end, spans) {
  const several = turns(row);
  const nodes = [];
  for (const { turn, first, end: last } of several) {
    if (last <= from || first >= end) continue;
    if (turn !== null && first >= from) nodes.push(turned(row, turn, first, last));
    for (let i = Math.max(first, from); i < Math.min(last, end); i++) {
      const span = token(row.pieces[i], row.mask[i], i);
      spans.push(span);
      nodes.push(span);
    }
  }
  return nodes;
}

function turned(row, turn, first, end) {
  const rewards = (row.turn_rewards ?? []).slice(first, end).filter((x) => x);
  const said = turn < 0 ? "Environment" : `Turn ${turn + 1}`;
  const reward = rewards.length ? ` · reward ${signed(rewards.reduce((a, b) => a + b, 0))}` : "";
  return el("div", {
    className: turn < 0 ? "turn outside" : "turn",
    dir: "ltr",
    textContent: `${said} · ${counted(end - first, "token")}${reward}`,
  });
}

// Line breaks are shown and made; what is not trained on is dashed.
function token(piece, trained, i) {
  const attrs = { role: "option", "data-i": i, tabindex: -1 };
  const span = el("span", { className: trained ? "token" : "token off", attrs });
  span.textContent = piece === "" ? "·" : piece.replaceAll("\n", "↵\n");
  if (piece === "") span.classList.add("empty");
  return span;
}

function more(left, grow) {
  return el("button", {
    type: "button",
    className: "more",
    textContent: `Show more: ${counted(left, "token is left", "tokens are left")}`,
    on: { click: grow },
  });
}

function focused(spans, i, read) {
  for (const span of spans) if (span.tabIndex === 0) span.tabIndex = -1;
  spans[i].tabIndex = 0;
  read(i);
}

function walk(event, spans) {
  const now = Number(event.target.dataset?.i);
  const step = { ArrowRight: 1, ArrowLeft: -1, PageDown: 20, PageUp: -20, Home: -Infinity, End: Infinity }[event.key];
  if (Number.isNaN(now) || step === undefined) return;
  event.preventDefault();
  event.stopPropagation();
  spans[Math.max(0, Math.min(spans.length - 1, now + step))].focus();
}

function legended(name, { low, high, kind }) {
  const ends =
    kind === "ratio" || kind === "plain" || kind === "unlikely"
      ? [short(low), short(high)]
      : [signed(low), signed(high)];
  const bar = el("i", { className: kind === "plain" || kind === "unlikely" ? "bar one-way" : "bar" });
  return [
    el("span", { textContent: ends[0] }),
    bar,
    el("span", { textContent: ends[1] }),
    el("span", { className: "dim", textContent: "dashed: not trained on" }),
  ];
}

// The list of a token's numbers.
function described(row, numbers, i, name) {
  const pair = (label, value, strong = false) =>
    el(
      "div",
      { className: strong ? "strong" : "" },
      el("dt", { textContent: label }),
      el("dd", { textContent: value }),
    );
  const signs = (each, x) => (NUMBERS[each].kind === "signed" ? signed(x, 4) : short(x, 4));
  const probability = numbers.old_log_probs
    ? [pair("Probability (trainer)", short(Math.exp(numbers.old_log_probs[i]), 3))]
    : [];
  return [
    pair(`Token ${i + 1} of ${row.pieces.length}`, JSON.stringify(row.pieces[i])),
    ...(row.tokens ? [pair("Id", String(row.tokens[i]))] : []),
    pair("Trained on", row.mask[i] ? "yes" : "no"),
    ...Object.keys(numbers).map((each) => pair(NUMBERS[each].label, signs(each, numbers[each][i]), each === name)),
    ...probability,
  ];
}
