import assert from "node:assert/strict";
import { test } from "node:test";

import type { Step, StepSeries } from "../src/api/types.ts";
import { align } from "../src/charts/align.ts";
import { fullRange, panelData, PANELS } from "../src/charts/panels.ts";
import {
  appendSteps,
  countBefore,
  emptyTrace,
  indexAt,
  neighbourInSpans,
  overAppliedSteps,
  readTrace,
  smooth,
  spanWords,
  valueAt,
  type Trace,
} from "../src/charts/trace.ts";

const IDENTITY = { id: "run", label: "master", ordering: "master", end: null };

function step(number: number, values: Partial<Step> = {}): Step {
  return {
    step: number,
    attempt: 1,
    overflow: false,
    discarded: false,
    loss_scale_before: 4,
    loss_scale_after: 4,
    loss: 2,
    lr: 0.1,
    grad_norm: 1,
    update_norm: 1,
    momentum_norm: 3,
    step_time_s: 0.1,
    largest_parameter: 0,
    nonfinite_parameters: 0,
    ns_calls: 1,
    tokens: null,
    ...values,
  };
}

/** The published death: infinity enters at step 0, nan stays, every step is discarded. */
function dying(): Trace {
  const overflowed = { overflow: true, discarded: true, update_norm: null };
  return appendSteps(emptyTrace(IDENTITY), [
    step(0, { ...overflowed, momentum_norm: "Infinity", grad_norm: "Infinity", loss_scale_after: 4 }),
    step(1, { ...overflowed, momentum_norm: "NaN", loss_scale_after: 2 }),
    step(2, { ...overflowed, momentum_norm: "NaN", loss_scale_before: 2, loss_scale_after: 1 }),
  ]);
}

test("an infinity and the nan after it stay two spans with their own values", () => {
  const { nonfinite } = dying();
  assert.deepEqual(nonfinite.momentum_norm, [
    { first: 0, last: 0, value: Infinity },
    { first: 1, last: 2, value: NaN },
  ]);
  assert.deepEqual(nonfinite.grad_norm, [{ first: 0, last: 0, value: Infinity }]);
});

test("non-finite values never reach a plotted column", () => {
  const trace = dying();
  assert.deepEqual(trace.columns.momentum_norm, [null, null, null]);
  assert.deepEqual(trace.columns.update_norm, [null, null, null]);
});

test("a value is read back as it was recorded: infinite, nan, finite or not measured", () => {
  const trace = appendSteps(dying(), [step(3, { loss: null })]);
  const read = [0, 1, 3, 4].map((at) => valueAt(trace, "momentum_norm", at));
  assert.deepEqual(read, [Infinity, NaN, 3, null]);
  assert.equal(valueAt(trace, "loss", 3), null);
});

test("appending the same steps twice changes nothing", () => {
  const trace = dying();
  assert.equal(appendSteps(trace, [step(1), step(2)]), trace);
});

test("appended steps equal the same steps read as columns", () => {
  const wire: StepSeries & { series: { step: number[] } } = {
    series: {
      step: [0, 1, 2],
      loss: [2, 2, 2],
      loss_scale_before: [4, 4, 2],
      loss_scale_after: [4, 2, 1],
      grad_norm: ["Infinity", 1, 1],
      update_norm: [null, null, null],
      momentum_norm: ["Infinity", "NaN", "NaN"],
    },
    overflow_runs: [[0, 2]],
    discarded_runs: [[0, 2]],
    nonfinite_runs: {
      momentum_norm: [{ first: 0, last: 0, value: "Infinity" }, { first: 1, last: 2, value: "NaN" }],
      grad_norm: [{ first: 0, last: 0, value: "Infinity" }],
    },
    exact: true,
  };
  assert.deepEqual(readTrace(IDENTITY, wire), dying());
});

test("the words for a non-finite strip name each interval, and the end where a run died", () => {
  const trace = dying();
  const spans = trace.nonfinite.momentum_norm ?? [];
  assert.equal(spanWords(spans, trace), "+inf at 0, nan 1 to 2");
  assert.equal(spanWords(spans, { last: 2, end: { step: 3, text: "dies" } }), "+inf at 0, nan 1 to the end");
});

test("many non-finite intervals are counted, not listed", () => {
  const spans = [0, 10, 20, 30].map((first) => ({ first, last: first + 1, value: Infinity }));
  assert.equal(spanWords(spans, { last: 40, end: null }), "non-finite at 8 steps, first at 0");
});

test("overflows are found in both directions and across runs", () => {
  const lists = [[[5, 7]], [[6, 6], [20, 20]]] as [number, number][][];
  const next = [null, 4, 5, 7, 20].map((from) => neighbourInSpans(lists, from, 1));
  assert.deepEqual(next, [5, 5, 6, 20, null]);
  const previous = [null, 20, 7, 5].map((from) => neighbourInSpans(lists, from, -1));
  assert.deepEqual(previous, [20, 7, 6, null]);
});

test("counting before a step takes partial spans and no step twice", () => {
  const spans: [number, number][] = [[0, 2], [5, 5]];
  assert.deepEqual([0, 1, 3, 5, 6].map((at) => countBefore(spans, at)), [0, 1, 3, 3, 4]);
});

test("a step between two points belongs to the one before it", () => {
  assert.deepEqual([-1, 0, 3, 4, 9].map((at) => indexAt([0, 4, 8], at)), [-1, 0, 0, 1, 2]);
});

test("over applied steps, discarded ones take no room and the rest line up by progress", () => {
  const trace = appendSteps(emptyTrace(IDENTITY), [
    step(0),
    step(1, { overflow: true, discarded: true }),
    step(2),
    step(3),
  ]);
  const applied = overAppliedSteps(trace);
  assert.deepEqual(applied.step, [0, 1, 2]);
  assert.deepEqual(applied.overflow, [[0.5, 0.5]]);
  assert.deepEqual(applied.discarded, []);
});

test("smoothing starts anew after a gap and passes over steps a run does not have", () => {
  assert.deepEqual(smooth([4, 0, null, 8, undefined, 0], 0.5), [4, 2, null, 8, undefined, 4]);
});

test("aligned lines keep gaps as null and missing steps as undefined", () => {
  const { x, ys } = align([{ x: [0, 2], y: [1, null] }, { x: [0, 1, 2], y: [5, 6, 7] }]);
  assert.deepEqual(x, [0, 1, 2]);
  assert.deepEqual(ys, [[1, undefined, null], [5, 6, 7]]);
});

test("the staircase ends one step after the last, where the last step left the scale", () => {
  const spec = PANELS.find(({ key }) => key === "loss_scale");
  assert.ok(spec);
  const { data, scale } = panelData(spec, [dying()], 0);
  assert.deepEqual(data, [[0, 1, 2, 3], [4, 4, 2, 1]]);
  assert.equal(scale, "log2");
});

test("smoothing draws over the raw line and never instead of it", () => {
  const spec = PANELS.find(({ key }) => key === "loss");
  assert.ok(spec);
  const trace = appendSteps(emptyTrace(IDENTITY), [step(0, { loss: 1 }), step(1, { loss: 100 }), step(2, { loss: 1 })]);
  const { data, lines } = panelData(spec, [trace], 0.9);
  assert.deepEqual(lines.map(({ isRaw }) => isRaw), [true, false]);
  assert.deepEqual(data[1], [1, 100, 1]);
});

test("a run that died leaves room on the right for the words that say so", () => {
  const alive = dying();
  const dead = { ...alive, end: { step: 3, text: "dies" } };
  assert.deepEqual(fullRange([alive], 30), [-0.5, 3.5]);
  assert.deepEqual(fullRange([dead], 30), [-0.5, 5.5]);
});
