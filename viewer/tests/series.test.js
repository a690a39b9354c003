import assert from "node:assert/strict";
import { test } from "node:test";
import { aligned, axisRange, band, differing, merged, points, seedGroups, smooth, spread } from "../src/series.js";

test("lines of one step are joined, and steps are in order", () => {
  const records = merged([{ step: 2, a: 1 }, { step: 1, a: 3 }, { step: 2, b: 5 }, { a: 7 }]);
  assert.deepEqual(records, [
    { step: 1, a: 3 },
    { step: 2, a: 1, b: 5 },
  ]);
  assert.deepEqual(points(records, "a"), [
    [1, 3],
    [2, 1],
  ]);
  assert.deepEqual(
    points(
      [
        { step: 1, a: null },
        { step: 2, a: "x" },
      ],
      "a",
    ),
    [],
  );
});

test("smoothing keeps straight lines, ends and the number of points, and equals its definition", () => {
  const straight = Array.from({ length: 40 }, (_, i) => [i, 3 * i]);
  smooth(straight, 0.3).forEach(([x, y]) => assert.ok(Math.abs(y - 3 * x) < 1e-9));
  const line = Array.from({ length: 31 }, (_, i) => [i, Math.sin(i * i)]);
  const half = Math.round((0.2 * line.length) / 2);
  smooth(line, 0.2).forEach(([, y], i) => {
    const reach = Math.min(half, i, line.length - 1 - i);
    const window = line.slice(i - reach, i + reach + 1).map(([, value]) => value);
    assert.ok(Math.abs(y - window.reduce((a, b) => a + b, 0) / window.length) < 1e-12);
  });
  assert.equal(smooth(line, 0), line);
});

test("lines of different steps are aligned over all of them", () => {
  assert.deepEqual(
    aligned([
      [
        [1, 10],
        [3, 30],
      ],
      [
        [2, 20],
        [3, 31],
      ],
    ]),
    [
      [1, 2, 3],
      [10, null, 30],
      [null, 20, 31],
    ],
  );
});

test("a band is the mean with the interval of Student's t, where all lines have a number", () => {
  const { mean, low, high } = band([
    [
      [1, 1],
      [2, 5],
    ],
    [[1, 3]],
  ]);
  assert.deepEqual(mean, [[1, 2]]);
  assert.ok(Math.abs(high[0][1] - (2 + 12.706 * Math.sqrt(2 / 2))) < 1e-9);
  assert.ok(Math.abs(low[0][1] - (2 - 12.706)) < 1e-9);
  assert.equal(spread([4]).half, 0);
});

test("an axis does not magnify noise, and never goes below 0 for numbers that do not", () => {
  const [low, high] = axisRange([0.5, 0.500001], 0.01);
  assert.ok(high - low >= 0.01 - 1e-12);
  assert.deepEqual(axisRange([0, 0], 0.01), [0, 0.01]);
  assert.equal(axisRange([0.001, 10])[0], 0);
  assert.ok(axisRange([-1, 1])[0] < -1);
});

test("runs that differ in their seeds alone are one group", () => {
  const runs = [
    { settings: { seed: 0, lr: 1, output_dir: "a" } },
    { settings: { seed: 1, lr: 1, output_dir: "b" } },
    { settings: { lr: 2, seed: 0, output_dir: "c", list: [1] } },
    { settings: {} },
    { settings: {} },
  ];
  assert.deepEqual(seedGroups(runs), [[0, 1], [2], [3], [4]]);
  assert.deepEqual(differing(runs.slice(0, 3)), [
    ["seed", [0, 1, 0]],
    ["lr", [1, 1, 2]],
    ["list", [null, null, [1]]],
  ]);
});
