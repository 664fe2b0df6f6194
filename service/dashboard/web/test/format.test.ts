import assert from "node:assert/strict";
import { test } from "node:test";

import type { RunSpec } from "../src/api/types.ts";
import { apart, formatInteger, formatLoss, formatScalar, formatDelta, formatShape, toNumber } from "../src/format/number.ts";
import { exponentOfTwo, splitPowers } from "../src/format/power.ts";
import { describeShared, differences, flatten, isLabel, orderingWords } from "../src/format/spec.ts";
import { elapsed, formatAgo, formatDuration, formatSeconds } from "../src/format/time.ts";

test("nan, the infinities, zero and not-measured stay four different texts", () => {
  const wire = ["NaN", "Infinity", "-Infinity", null, 0, undefined] as const;
  assert.deepEqual(wire.map((value) => formatScalar(toNumber(value))), ["nan", "+inf", "−inf", "—", "0", "—"]);
});

test("scalars keep four digits and switch to an exponent at the edges", () => {
  assert.deepEqual([55.15961, 104.801079, 0.0012345, 12345.678, 1e-7, 3.4e38].map((value) => formatScalar(value)), [
    "55.16",
    "104.8",
    "0.00123",
    "12,346",
    "1.00e−7",
    "3.40e38",
  ]);
});

test("negative numbers carry a true minus sign", () => {
  assert.equal(formatScalar(-2.5), "−2.500");
  assert.equal(formatDelta(-0.018), "−0.018");
  assert.equal(formatInteger(-57344), "−57,344");
});

test("a delta says its sign, and no difference is a plain zero", () => {
  assert.equal(formatDelta(0.018), "+0.018");
  assert.equal(formatDelta(0), "0");
  assert.equal(formatDelta(null), "—");
});

test("losses have three decimals, small ones four", () => {
  assert.deepEqual([2.3184, 0.0123, 1234.5].map((value) => formatLoss(value)), ["2.318", "0.0123", "1235"]);
});

test("only exact powers of two have an exponent", () => {
  assert.deepEqual([65536, 1, 0.125, 3, 0, -2, Infinity, null].map(exponentOfTwo), [16, 0, -3, null, null, null, null, null]);
});

test("powers are found in a sentence and nothing is lost around them", () => {
  const parts = splitPowers("fell from 2^16 to 2^-3, not 22^3");
  assert.deepEqual(parts.map(({ exponent }) => exponent), [null, 16, null, -3, null]);
  assert.equal(parts.map(({ text }) => text).join(""), "fell from 2^16 to 2^-3, not 22^3");
});

test("relative times grow coarser with age", () => {
  const now = Date.parse("2026-01-02T00:00:00Z");
  const ago = (milliseconds: number) => formatAgo(now - milliseconds, now);
  assert.deepEqual([0, 59e3, 60e3, 3.6e6, 9e7].map(ago), ["just now", "59 s ago", "1 m ago", "1 h ago", "1 d ago"]);
  assert.equal(formatAgo(null, now), "—");
});

test("durations read like a stopwatch, and short ones in milliseconds", () => {
  assert.equal(formatDuration(3_723_000), "1:02:03");
  assert.deepEqual([0.0042, 0.04, 1.18, 12.34, 61].map(formatSeconds), ["4.20 ms", "40.0 ms", "1.18 s", "12.3 s", "0:01:01"]);
});

test("a run that has not started has no duration, one that runs counts to now", () => {
  const start = "2026-01-01T00:00:00Z";
  assert.equal(elapsed(null, null, 0), null);
  assert.equal(elapsed(start, null, Date.parse(start) + 5000), 5000);
  assert.equal(elapsed(start, "2026-01-01T00:00:02Z", 0), 2000);
});

test("specs flatten to dotted paths with empty groups as leaves", () => {
  assert.deepEqual(
    [...flatten({ a: { b: 1 }, faults: [{ kind: "inf" }], ds_config: {} })],
    [["a.b", 1], ["faults[0].kind", "inf"], ["ds_config", {}]],
  );
});

test("two specs differ in exactly the fields that differ, missing ones included", () => {
  const found = differences([{ seed: 7, step_ordering: "master" }, { seed: 7, step_ordering: "ordered", notes: "x" }]);
  assert.deepEqual(found.map(({ path }) => path), ["step_ordering", "notes"]);
  assert.deepEqual(found.filter(({ path }) => !isLabel(path)).map(({ path }) => path), ["step_ordering"]);
});

test("shapes of no dimension are scalars", () => {
  assert.deepEqual([[128, 128], [10], []].map(formatShape), ["128 × 128", "10", "scalar"]);
});

test("of runs that differ, what describes them all leaves the difference out", () => {
  const spec = { zero_stage: 1, world_size: 2, precision: "fp16", loss_scale: { initial_power: 16 }, seed: 7, implementation: "muon_core" };
  const [one, other] = ["calm_boom", "matrix_pair"].map((name) => ({ ...spec, task: { name } }) as unknown as RunSpec);
  assert.ok(one && other);
  assert.equal(describeShared([one, one]), "calm boom · ZeRO 1 · 2 × fp16 · initial scale 2^16 · seed 7");
  assert.equal(describeShared([one, other]), "ZeRO 1 · 2 × fp16 · initial scale 2^16 · seed 7");
});

test("numbers beside each other have the digits that tell them apart, and no more", () => {
  assert.deepEqual(apart([0.060851, 0.060852, null]), ["0.060851", "0.060852", "—"]);
  assert.deepEqual(apart([0.25, 0.25, NaN]), ["0.250", "0.250", "nan"]);
  assert.deepEqual(apart([1, 1 + Number.EPSILON]), ["1", "1.0000000000000002"]);
});

test("an ordering is a Muon's: a recorded script's other optimizer is named itself", () => {
  const words = (task: unknown) => orderingWords({ task, step_ordering: "ordered" } as unknown as RunSpec);
  assert.equal(words({ name: "external", optimizer: "AdamW" }), "AdamW");
  assert.equal(words({ name: "external", optimizer: "MuonWithAuxAdam" }), "ordered");
  assert.equal(words({ name: "byte_gpt" }), "ordered");
});
