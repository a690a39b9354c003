import assert from "node:assert/strict";
import { test } from "node:test";
import { KINDS, kindsOf, memoryTitle, partsOf } from "../src/memory.js";

const stage = {
  stage: "update_actor",
  parameters: 100,
  moments: 200,
  gradients: 100,
  cache: 0,
  activations: 400,
  peak: 800,
};

test("a bar has the kinds that a stage held, in one order", () => {
  const parts = partsOf(stage, 1600);
  assert.deepEqual(
    parts.map((part) => part.kind),
    KINDS.filter((kind) => kind !== "cache"),
  );
  assert.deepEqual(
    parts.map((part) => part.share),
    [100 / 1600, 200 / 1600, 100 / 1600, 400 / 1600],
  );
});

test("the stage with the largest peak fills its line", () => {
  const shares = partsOf(stage, stage.peak).map((part) => part.share);
  assert.equal(
    shares.reduce((a, b) => a + b),
    1,
  );
});

test("a table has the kinds that any stage held", () => {
  const gen = { ...stage, gradients: 0, activations: 0, cache: 5 };
  assert.deepEqual(kindsOf([gen]), ["parameters", "moments", "cache"]);
  assert.deepEqual(kindsOf([gen, stage]), KINDS);
});

test("the title says which of several ranks is shown", () => {
  assert.equal(memoryTitle({ step: 6, rank: 0, ranks: 1 }), "Memory of step 6");
  assert.equal(memoryTitle({ step: 6, rank: 1, ranks: 2 }), "Memory of step 6, on rank 1, which has most of 2");
});
