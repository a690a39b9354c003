import assert from "node:assert/strict";
import { test } from "node:test";
import { bytes, counted, duration, nearest, short, shown, signed, tail } from "../src/format.js";

test("numbers are short and say what they are", () => {
  const cases = [
    [0, "0"],
    [0.5, "0.5"],
    [1, "1"],
    [0.12345, "0.123"],
    [123456, "123k"],
    [1234, "1234"],
    [1e-6, "1e-6"],
    [-2.5e9, "-2.5e9"],
    [999, "999"],
    [null, "–"],
    [NaN, "NaN"],
    [100, "100"],
    [10000, "10k"],
  ];
  for (const [x, text] of cases) assert.equal(short(x), text);
  assert.equal(signed(0.25), "+0.25");
  assert.equal(signed(-1), "-1");
  for (const x of [0.001, 0.0123, 7, 42.42, 999, 5e5, 3.3e-9]) {
    const text = short(x, 4).replace("k", "e3");
    assert.ok(Math.abs(Number(text) - x) <= 0.005 * Math.abs(x), `${x} as ${text}`);
  }
});

test("bytes have the unit that fits", () => {
  const cases = [
    [0, "0 B"],
    [512, "512 B"],
    [1023, "1023 B"],
    [1024, "1 KiB"],
    [1.5 * 2 ** 20, "1.5 MiB"],
    [24 * 2 ** 30, "24 GiB"],
    [2 ** 45, "32 TiB"],
    [2 ** 55, "32.8k TiB"],
    [null, "–"],
  ];
  for (const [x, text] of cases) assert.equal(bytes(x), text);
});

test("spans of time", () => {
  assert.deepEqual([0.0000005, 0.25, 1.5, 90, 7200].map(duration), ["0.5 µs", "250 ms", "1.5 s", "1.5 min", "2.0 h"]);
});

test("words around numbers", () => {
  assert.equal(counted(1, "row"), "1 row");
  assert.equal(counted(100352, "row"), "100,352 rows");
  assert.equal(shown([]), "none");
  assert.equal(shown([1, true]), "1, yes");
  assert.equal(tail("abcdef", 3), "…def");
  assert.equal(tail("abc", 3), "abc");
});

test("the nearest name", () => {
  assert.equal(nearest("scor", ["step", "score", "source"]), "score");
  assert.equal(nearest("zzz", ["step", "score"]), null);
});
