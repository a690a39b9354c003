import assert from "node:assert/strict";
import { test } from "node:test";
import { mean, Rows } from "../src/rows.js";

function step(number, scores, more = {}) {
  const places = scores.map((_, i) => i);
  return new Map(
    Object.entries({
      step: places.map(() => number),
      number: places,
      group: places.map((i) => BigInt(i >> 1)),
      score: scores,
      prompt_key: places.map((i) => `p${i >> 1}`),
      ...more,
    }),
  );
}

function filled() {
  const rows = new Rows();
  rows.append(0, step(1, [0.5, 1, null, 0]));
  rows.append(0, step(2, [1, 0.25], { "score.format": [1, 1] }));
  rows.append(1, step(1, [0.75, 0]));
  return rows;
}

test("columns that a step lacks are null there, and big integers become numbers", () => {
  const rows = filled();
  assert.equal(rows.count, 8);
  assert.deepEqual(rows.columns.get("score.format"), [null, null, null, null, 1, 1, null, null]);
  assert.deepEqual(rows.columns.get("group").slice(0, 4), [0, 0, 1, 1]);
  assert.deepEqual(rows.parts, ["score.format"]);
  for (const column of rows.columns.values()) assert.equal(column.length, rows.count);
});

test("rows are ordered by a column, those without a number last either way", () => {
  const rows = filled();
  const scores = (way) => rows.ordered(() => true, ["score", way]).map((row) => rows.get("score", row));
  assert.deepEqual(scores(1), [0, 0, 0.25, 0.5, 0.75, 1, 1, null]);
  assert.deepEqual(scores(-1), [1, 1, 0.75, 0.5, 0.25, 0, 0, null]);
  const newest = rows
    .ordered(() => true, ["score", 1])
    .slice(0, 2)
    .map((row) => rows.get("run", row));
  assert.deepEqual(newest, [0, 1]);
  assert.deepEqual(
    rows.ordered((row) => rows.get("score", row) === 1, ["step", -1]),
    [4, 1],
  );
});

test("groups are of one run and step; a prompt goes over the steps of a run", () => {
  const rows = filled();
  assert.deepEqual(rows.group(0), [0, 1]);
  assert.deepEqual(rows.group(2), [2, 3]);
  assert.deepEqual(rows.over(5), [0, 1, 4, 5]);
  assert.deepEqual(rows.over(6), [6, 7]);
});

test("a prompt is found in other runs, at the step nearest to the row's", () => {
  const rows = filled();
  assert.deepEqual(rows.across(0), [[6, 7]]);
  assert.deepEqual(rows.across(5), [[6, 7]]);
  assert.deepEqual(rows.across(2), []); // no other run has p1
  assert.deepEqual(rows.across(6), [[0, 1]]);
  rows.append(2, step(4, [0.5]));
  rows.append(1, step(7, [1, 1]));
  const far = rows.find(2, 4, 0);
  assert.deepEqual(rows.across(far), [
    [4, 5],
    [6, 7], // steps 1 and 7 are as near: the earlier
  ]);
  assert.deepEqual(rows.across(rows.find(1, 7, 0)), [[4, 5], [far]]);
});

test("rows without a prompt's key are compared with none", () => {
  const rows = new Rows();
  rows.append(
    0,
    new Map([
      ["step", [1]],
      ["number", [0]],
    ]),
  );
  rows.append(
    1,
    new Map([
      ["step", [1]],
      ["number", [0]],
    ]),
  );
  assert.deepEqual(rows.across(0), []);
});

test("steps are dropped and found again", () => {
  const rows = filled();
  rows.drop(0, new Set([1]));
  assert.equal(rows.count, 4);
  assert.deepEqual(rows.columns.get("run"), [0, 0, 1, 1]);
  assert.equal(rows.find(0, 1, 0), -1);
  rows.append(0, step(1, [9]));
  assert.equal(rows.get("score", rows.find(0, 1, 0)), 9);
});

test("a mean is of the numbers that there are", () => {
  assert.equal(mean([1, null, 3, NaN]), 2);
  assert.equal(mean([null]), null);
});
