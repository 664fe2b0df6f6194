import assert from "node:assert/strict";
import { test } from "node:test";

import type { RunSpec } from "../src/api/types.ts";
import { apart, formatInteger, formatLoss, formatScalar, formatDelta, formatShape, toNumber } from "../src/format/number.ts";
import { cutName } from "../src/format/name.ts";
import { exponentOfTwo, splitPowers } from "../src/format/power.ts";
import { describeShared, describeSpec, differences, flatten, isLabel, orderingWords, taskWords } from "../src/format/spec.ts";
import { elapsed, formatAgo, formatDuration, formatSeconds } from "../src/format/time.ts";
import { failureParts } from "../src/format/traceback.ts";

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

test("a duration below a second has tenths, one from a second on has none", () => {
  const texts = [0, 99, 100, 460, 999, 1000, 59_900].map((each) => formatDuration(each));
  assert.deepEqual(texts, ["< 0.1 s", "< 0.1 s", "0.1 s", "0.4 s", "0.9 s", "0:00:01", "0:00:59"]);
});

test("a task of somebody's own keeps its name, a built-in one is in words", () => {
  assert.deepEqual(["byte_gpt", "laptop_bad:build"].map(taskWords), ["byte gpt", "laptop_bad:build"]);
  const spec = { task: { name: "laptop_bad:build" }, precision: "fp32", implementation: "muon_core" } as unknown as RunSpec;
  assert.match(describeSpec(spec), /^laptop_bad:build · /);
});

test("of an experiment's name the fields give way, and what they are does not", () => {
  const parts = cutName("thirty-step zero_stage=1 loss_scale.initial_power=16 step_ordering=master");
  const kept = parts.filter(({ gives }) => gives === "no").map(({ text }) => text);
  assert.equal(kept.join(""), " 1 16 master");
  assert.deepEqual(parts.filter(({ gives }) => gives === "first").map(({ text }) => text), [
    "zero_stage=",
    "loss_scale.initial_power=",
    "step_ordering=",
  ]);
});

test("nothing of a name is lost by where it may be cut, and a short one is not cut", () => {
  const names = ["first-run", "a name of twenty-five let", "words that say nothing a=b c=a value of many words", "a long name with x = y in it, a=1"];
  assert.deepEqual(names.map((name) => cutName(name).map(({ text }) => text).join("")), names);
  assert.deepEqual(cutName("first-run step_o=master"), [{ text: "first-run step_o=master", gives: "no" }]);
  assert.deepEqual(cutName("one that nobody made of fields").map(({ gives }) => gives), ["last", "no"]);
});

const OWN = [
  '  File "/opt/venv/lib/python3.12/site-packages/torch/nn/linear.py", line 1, in forward',
  "    return F.linear(input)",
  '  File "/home/me/mine.py", line 7, in loss',
  "    return self.head(x)",
  '  File "/opt/lib/python3.12/site-packages/torch/nn/module.py", line 2, in _call',
  "    return forward()",
  '  File "/opt/lib/python3.12/site-packages/torch/nn/linear.py", line 3, in forward',
  "    return F.linear(input)",
  '  File "/opt/lib/python3.12/site-packages/torch/functional.py", line 4, in linear',
  "    raise",
];

test("of a failure the error comes first, then where one's own code raised it", () => {
  const error = "RuntimeError: shapes differ";
  const message = [error, "Traceback (most recent call last):", ...OWN, error, ""].join("\n");
  const parts = failureParts(message);
  assert.equal(parts.error, error);
  assert.deepEqual(parts.end.split("\n"), [...OWN.slice(2, 4), "  …", ...OWN.slice(6), error]);
  assert.equal(parts.numLines, 13);
});

test("a short failure is whole, and of a long one without a traceback the end is there", () => {
  assert.deepEqual(failureParts("it did not start"), { error: "it did not start", end: "", numLines: null });
  const lines = Array.from({ length: 40 }, (_, index) => `line ${index}`);
  const parts = failureParts(lines.join("\n"));
  assert.deepEqual([parts.error, parts.end.split("\n").at(-1), parts.numLines], ["line 0", "line 39", 40]);
});
