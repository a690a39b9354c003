import assert from "node:assert/strict";
import { test } from "node:test";
import { colour, inkOn, NUMBERS, numbersOf, scaled, turns } from "../src/scales.js";

const row = {
  pieces: ["a", "b", "c", "d"],
  mask: [true, false, true, true],
  old_log_probs: [-1, -2, NaN, -0.5],
  rollout_log_probs: [-1, -3, -1, -1],
  advantages: [1, -50, -0.5, 0],
  values: [0.25, 0.5, 0.75, 0.5],
};

test("ratio and KL are made where both log-probs are", () => {
  const numbers = numbersOf(row);
  assert.deepEqual(Object.keys(numbers), ["advantages", "ratio", "values", "old_log_probs", "rollout_log_probs"]);
  assert.equal(numbers.ratio[0], 1);
  assert.ok(Math.abs(numbers.ratio[1] - Math.E) < 1e-12);
  assert.equal(numbers.ratio[2], null);
});

test("strengths are signed, in [-1, 1], and blind to tokens that are not trained on", () => {
  const { strengths, low, high } = scaled("advantages", row.advantages, row.mask);
  assert.deepEqual(strengths, [1, -1, -0.5, 0]);
  assert.deepEqual([low, high], [-1, 1]);
  for (const name of Object.keys(NUMBERS)) {
    const drawn = scaled(name, [null, NaN, 0, 1, -1, 1e9, -1e9, 1e-9], null).strengths;
    assert.deepEqual(drawn.slice(0, 2), [null, null]);
    for (const x of drawn.slice(2)) assert.ok(x >= -1 && x <= 1, `${name}: ${x}`);
    assert.equal(scaled(name, [], []).strengths.length, 0);
  }
});

test("an outlier does not pale the others", () => {
  const numbers = [...Array.from({ length: 99 }, (_, i) => (i % 2 ? 1 : -1)), 1000];
  assert.equal(scaled("advantages", numbers, null).high, 1);
});

test("colours say the sign by hue and the strength by depth", () => {
  assert.equal(colour(null), "transparent");
  assert.equal(colour(0), "transparent");
  assert.match(colour(0.5), /--plus\) 28%/);
  assert.match(colour(-1), /--minus\) 55%/);
});

test("turns are runs of tokens with one number", () => {
  assert.deepEqual(turns(row), [{ turn: null, first: 0, end: 4 }]);
  const spans = turns({ ...row, turn_ids: [0, -1, -1, 1] });
  assert.deepEqual(spans, [
    { turn: 0, first: 0, end: 1 },
    { turn: -1, first: 1, end: 3 },
    { turn: 1, first: 3, end: 4 },
  ]);
});

test("text on a colour is black or white, whichever has more contrast", () => {
  assert.equal(inkOn("#0072b2"), "#fff");
  assert.equal(inkOn("#d55e00"), "#000");
  assert.equal(inkOn("#56b4e9"), "#000");
});
