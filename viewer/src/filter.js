// The language of the filter: words, "phrases", and conditions on columns as score<1 or finish=length; "-" before any.

import { nearest } from "./format.js";

const TEXTS = ["prompt", "response", "id", "source", "ground_truth"];
const TERM = /(-?)(?:"([^"]*)"?|([\w.@-]+?)(<=|>=|!=|<|>|=|~)("[^"]*"?|\S*)|(\S+))/g;

// The conditions of a text: `keep(row)` over columns as arrays, and what is wrong with it, if anything.
export function parse(text, columns) {
  const names = [...columns.keys()];
  const tests = [];
  for (const [, minus, phrase, name, sign, value, word] of text.matchAll(TERM)) {
    if (name !== undefined && !columns.has(name)) {
      const near = nearest(name, names);
      const hint = near ? `did you mean ${near}?` : `there are ${names.join(", ")}.`;
      return {
        keep: () => true,
        problem: `There is no column “${name}”; ${hint} Quotes search for text: "${name}${sign}"`,
      };
    }
    const test = name === undefined ? search(phrase ?? word, columns) : condition(columns.get(name), sign, value);
    if (test) tests.push(minus ? (row) => !test(row) : test);
  }
  return { keep: (row) => tests.every((test) => test(row)), problem: null };
}

function search(words, columns) {
  const wanted = words.toLowerCase();
  const texts = TEXTS.map((name) => columns.get(name)).filter(Boolean);
  if (!wanted) return null;
  return (row) => texts.some((column) => column[row] !== null && String(column[row]).toLowerCase().includes(wanted));
}

function condition(column, sign, quoted) {
  const text = quoted.replace(/^"|"$/g, "").toLowerCase();
  if (text === "") return null; // still being written
  const number = Number(text);
  const isNone = text === "none" || text === "null";
  const lower = (row) => String(column[row]).toLowerCase();
  if (isNone && sign === "=") return (row) => column[row] === null;
  if (isNone && sign === "!=") return (row) => column[row] !== null;
  if (sign === "~") return (row) => column[row] !== null && lower(row).includes(text);
  if (sign === "=") return (row) => column[row] === number || lower(row) === text;
  if (sign === "!=") return (row) => column[row] !== number && lower(row) !== text;
  const compares = {
    "<": (x) => x < number,
    ">": (x) => x > number,
    "<=": (x) => x <= number,
    ">=": (x) => x >= number,
  };
  const holds = compares[sign];
  return (row) => typeof column[row] === "number" && holds(column[row]);
}
