import assert from "node:assert/strict";
import { test } from "node:test";

import { binNorms, heatColumns, onsetOf, shader } from "../src/charts/heat.ts";
import { chooseScale, countWithin, linearTicks, logTicks, powerTicks, tickLabels, yRange } from "../src/charts/scales.ts";
import { sparkPath } from "../src/charts/spark.ts";

test("wide positive values get a log axis, narrow or non-positive ones a linear one", () => {
  assert.equal(chooseScale([[1, 10, null]]), "log10");
  assert.equal(chooseScale([[2.3, 3.4]]), "linear");
  assert.equal(chooseScale([[0, 10]]), "linear");
  assert.equal(chooseScale([[null]]), "linear");
});

test("ticks are round and inside the range", () => {
  assert.deepEqual(linearTicks(2.45, 3.55, 4), [2.5, 3, 3.5]);
  assert.deepEqual(linearTicks(-0.1, 0.25, 4), [-0.1, 0, 0.1, 0.2]);
  assert.deepEqual(logTicks(0.9, 120, 5), [1, 3, 10, 30, 100]);
});

test("powers of two are spaced evenly and never too many", () => {
  assert.deepEqual(powerTicks(0.6, 2 ** 17, 5).map(Math.log2), [0, 4, 8, 12, 16]);
  assert.deepEqual(powerTicks(2 ** 13.2, 2 ** 17, 5).map(Math.log2), [14, 15, 16, 17]);
});

test("one value alone still has a range around it", () => {
  for (const kind of ["linear", "log10", "log2"] as const) {
    const [low, high] = yRange(kind, 3, 3);
    assert.ok(low < 3 && high > 3, kind);
  }
});

test("an axis without a finite value has a harmless range", () => {
  assert.deepEqual(yRange("linear", null, null), [0, 1]);
  assert.deepEqual(yRange("log10", null, null), [1, 10]);
});

test("labels of one axis share their decimals", () => {
  assert.deepEqual(tickLabels([2.5, 3, 3.5]), ["2.5", "3.0", "3.5"]);
  assert.deepEqual(tickLabels([1e-5, 1e-4]), ["1e−5", "1e−4"]);
});

test("a cell of many steps shows the non-finite one among them, not the largest", () => {
  const columns = heatColumns(5, 3);
  assert.deepEqual(columns, { first: [0, 2, 4], last: [1, 3, 5] });
  assert.deepEqual(binNorms([0, 1, 2, 3, 4, 5], [1, 2, NaN, 9, null, null], columns), [2, NaN, null]);
});

test("the onset is the first non-finite step, and none where all are finite", () => {
  assert.equal(onsetOf([0, 1, 2], [1, Infinity, NaN]), 1);
  assert.equal(onsetOf([0, 1], [1, null]), null);
});

test("shades span the finite norms on a log scale", () => {
  const shade = shader([{ index: 0, name: "w", route: "muon", norms: [1, 10, 100, NaN, null] }]);
  assert.deepEqual([1, 10, 100].map((value) => Math.round(shade(value) * 100)), [0, 50, 100]);
});

test("a sparkline breaks at what is not finite and ends at the last finite value", () => {
  const path = sparkPath({ step: [0, 1, 2, 3], value: [3, NaN, 1, null] }, { width: 60, height: 18, steps: 4 });
  assert.deepEqual(path, { line: "M0 3M40 15", endX: 40, endY: 15 });
  assert.equal(sparkPath({ step: [0], value: [null] }, { width: 60, height: 18, steps: 4 }), null);
});

test("values within a window are counted, its ends included", () => {
  const values = [0, 1, 2, 5, 9];
  assert.equal(countWithin(values, 1, 5), 3);
  assert.equal(countWithin(values, -10, 10), 5);
  assert.equal(countWithin(values, 3, 4), 0);
  assert.equal(countWithin([], 0, 1), 0);
});
