import assert from "node:assert/strict";
import { test } from "node:test";
import { parse } from "../src/filter.js";

const columns = new Map([
  ["step", [1, 2, 3, 4]],
  ["score", [0.5, 1, null, -2]],
  ["score.format", [1, 0, 1, 0]],
  ["finish", ["stop", "length", "stop", "stop"]],
  ["prompt", ["1+2=", "say <b>hi</b>", "1+3=", "x=3"]],
  ["response", ["3", "Hi There", "4", null]],
  ["prompt_key", ["a", "b", "c", "d"]],
]);
const kept = (text) => [0, 1, 2, 3].filter(parse(text, columns).keep);

test("words and phrases are looked for in all texts, in any case", () => {
  assert.deepEqual(kept(""), [0, 1, 2, 3]);
  assert.deepEqual(kept("hi there"), [1]);
  assert.deepEqual(kept('"hi there"'), [1]);
  assert.deepEqual(kept('"there hi"'), []);
  assert.deepEqual(kept('-"1+"'), [1, 3]);
  assert.deepEqual(kept('"x=3"'), [3]);
});

test("conditions compare numbers, and rows without one never pass", () => {
  assert.deepEqual(kept("score<1"), [0, 3]);
  assert.deepEqual(kept("score>=0.5 step>1"), [1]);
  assert.deepEqual(kept("score=none"), [2]);
  assert.deepEqual(kept("score!=none"), [0, 1, 3]);
  assert.deepEqual(kept("-score<1"), [1, 2]);
  assert.deepEqual(kept("score.format=0"), [1, 3]);
});

test("conditions on texts", () => {
  assert.deepEqual(kept("finish=LENGTH"), [1]);
  assert.deepEqual(kept("finish!=length"), [0, 2, 3]);
  assert.deepEqual(kept("response~hi"), [1]);
});

test("what is half written changes nothing", () => {
  assert.deepEqual(kept("score<"), [0, 1, 2, 3]);
  assert.deepEqual(kept('"'), [0, 1, 2, 3]);
  assert.deepEqual(kept("score<-"), []);
});

test("an unknown column is a problem that names the nearest one", () => {
  const { problem, keep } = parse("scor<1", columns);
  assert.match(problem, /did you mean score\?/);
  assert.ok(keep(0));
  assert.match(parse("zzzzzz=1", columns).problem, /there are step, score/);
});
