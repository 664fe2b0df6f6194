import assert from "node:assert/strict";
import { test } from "node:test";

import { defaultOf, findSpecSchema, variantFor } from "../src/api/schema.ts";
import type { Experiment, Run } from "../src/api/types.ts";
import { emptyTrace, type Trace } from "../src/charts/trace.ts";
import { effectAt, overflowSteps } from "../src/pages/compare/overflowRows.ts";
import { buildMatrix, tally } from "../src/pages/experiments/matrix.ts";
import { filterLines, ranksOf, readLines } from "../src/pages/run/logText.ts";
import { phaseBars } from "../src/pages/run/phases.ts";
import { mergeHead, replaceRuns } from "../src/pages/runs/runList.ts";
import { completions, isComplete, splitQuery, withToken } from "../src/pages/runs/query.ts";
import { checkSpec, readNumber, readPath, writePath } from "../src/pages/submit/fields.ts";

function run(id: string, spec: Record<string, unknown> = {}, more: Partial<Run> = {}): Run {
  return { id, name: id, spec: { step_ordering: "ordered", ...spec }, verdict: null, finished_at: null, ...more } as Run;
}

test("a filter splits at spaces but not inside quotes", () => {
  assert.deepEqual(splitQuery('stage:2 tag:"night run" gpt'), ["stage:2", 'tag:"night run"', "gpt"]);
});

test("a condition that is still being typed is not asked for", () => {
  assert.deepEqual(["stage:", "scale:>=", 'tag:"night', "stage:2", "gpt"].map(isComplete), [false, false, false, true, true]);
});

test("a segment replaces the condition on its field and leaves the others", () => {
  assert.equal(withToken("stage:2 status:failed gpt", "status", "status:running"), "stage:2 gpt status:running");
  assert.equal(withToken("status:failed", "status", null), "");
});

test("completion offers fields, then the field's words, each once", () => {
  assert.deepEqual(completions("st").map(({ text }) => text), ["status:", "stage:", "steps:"]);
  assert.deepEqual(completions("status:s").map(({ text }) => text), ["status:succeeded", "status:stopped"]);
  assert.deepEqual(completions("status:failed,st").map(({ text }) => text), ["status:failed,stopped"]);
});

test("a fresh first page adds new runs, drops those that no longer match, and keeps what is loaded after it", () => {
  const head = [run("new"), run("a")];
  const merged = mergeHead(head, [run("gone"), run("a"), run("b"), run("c")]);
  assert.deepEqual(merged.map(({ id }) => id), ["new", "a", "b", "c"]);
});

test("rows that did not change keep their identity, so that they are not drawn again", () => {
  const rows = [run("a"), run("b")];
  const changed = replaceRuns(rows, new Map([["b", run("b", { seed: 1 })]]));
  assert.equal(changed[0], rows[0]);
  assert.notEqual(changed[1], rows[1]);
  assert.equal(replaceRuns(rows, new Map([["z", run("z")]])), rows);
});

test("phases become bars: each took the time since the one before", () => {
  const bars = phaseBars({ submitted: 100, enrolled: 101.5, first_step: 104 });
  assert.deepEqual(bars, [
    { name: "enrolled", took: 1.5, from: 0 },
    { name: "first_step", took: 2.5, from: 1.5 },
  ]);
});

test("log lines know their rank, keep their number when filtered, and lose terminal colours", () => {
  const lines = readLines("start\n[rank 1] \u001b[31mloss nan\u001b[0m\n(rank 0) ok\n");
  assert.deepEqual(lines.map(({ rank, text }) => [rank, text]), [[null, "start"], [1, "[rank 1] loss nan"], [0, "(rank 0) ok"]]);
  assert.deepEqual(ranksOf(lines), [0, 1]);
  assert.deepEqual(filterLines(lines, "LOSS", 1).map(({ number }) => number), [2]);
});

function discarding(norms: (number | null)[]): Trace {
  const trace = emptyTrace({ id: "r", label: "r", ordering: "master", end: null });
  trace.step = norms.map((_, index) => index);
  trace.columns.momentum_norm = norms.map((norm) => (norm !== null && Number.isFinite(norm) ? norm : null));
  trace.nonfinite.momentum_norm = norms.flatMap((value, at) =>
    value !== null && !Number.isFinite(value) ? [{ first: at, last: at, value }] : [],
  );
  trace.discarded = [[1, norms.length - 1]];
  trace.overflow = [[1, norms.length - 1]];
  trace.last = norms.length - 1;
  return trace;
}

test("an overflow enters once, is nan from then on, and is kept out where the norm stands still", () => {
  const master = discarding([3, Infinity, NaN]);
  assert.deepEqual([0, 1, 2, 3].map((at) => effectAt(master, at).text), ["applied", "+inf enters", "nan", "—"]);
  const ordered = discarding([3, 3, 3.1]);
  assert.deepEqual([1, 2].map((at) => effectAt(ordered, at).text), ["kept out", "moved"]);
});

test("overflow steps of several runs are one list without repeats", () => {
  const a = { ...discarding([1, 1, 1]), overflow: [[1, 3]] as [number, number][] };
  const b = { ...discarding([1, 1, 1]), overflow: [[2, 2], [9, 9]] as [number, number][] };
  assert.deepEqual(overflowSteps([a, b], 0, 3), { steps: [1, 2, 3], total: 4 });
});

const SCHEMA = findSpecSchema({
  components: {
    schemas: {
      RunSpec: {
        type: "object",
        properties: {
          name: { type: "string", default: "run", maxLength: 5 },
          steps: { type: "integer", minimum: 1, default: 30 },
          task: { default: { name: "simple" }, oneOf: [{ $ref: "#/components/schemas/Simple" }, { $ref: "#/components/schemas/User" }] },
          loss_scale: { $ref: "#/components/schemas/Scale", default: { window: 10 } },
        },
      },
      Simple: { type: "object", properties: { name: { const: "simple", default: "simple" }, width: { type: "integer", minimum: 2, default: 8 } } },
      User: { type: "object", properties: { name: { type: "string", pattern: "^[a-z]+:[a-z]+$" } } },
      Scale: { type: "object", properties: { window: { type: "integer", default: 1000 }, static: { anyOf: [{ type: "number" }, { type: "null" }] } } },
    },
  },
});

test("a spec is checked field by field against the schema's limits", () => {
  assert.ok(SCHEMA);
  const issues = checkSpec({ name: "too long", steps: 0, colour: 1, task: { name: "simple", width: 1 }, loss_scale: { static: null } }, SCHEMA);
  assert.deepEqual(issues.map(({ path, message }) => `${path} ${message}`), [
    "name must be 5 characters or fewer",
    "steps must be 1 or more",
    "colour is not a field here",
    "task.width must be 2 or more",
  ]);
});

test("a spec within the limits has no issue", () => {
  assert.ok(SCHEMA);
  assert.deepEqual(checkSpec({ name: "ok", steps: 3, task: { name: "mod:fun" } }, SCHEMA), []);
});

test("defaults of a group are the spec's own where it sets them, else the group's", () => {
  assert.ok(SCHEMA);
  const scale = SCHEMA.root.properties?.loss_scale;
  assert.ok(scale);
  assert.deepEqual(defaultOf(scale, SCHEMA.resolve), { window: 10 });
});

test("a union is read as the variant its name says", () => {
  assert.ok(SCHEMA);
  const variants = SCHEMA.root.properties?.task?.oneOf ?? [];
  assert.ok(variantFor(variants, { name: "simple" }, SCHEMA.resolve)?.properties?.width);
  assert.ok(variantFor(variants, { name: "my:task" }, SCHEMA.resolve)?.properties?.name?.pattern);
});

test("writing a field and taking it out again leaves the spec as it was", () => {
  const spec = { steps: 3 };
  const written = writePath(spec, ["loss_scale", "window"], 5);
  assert.equal(readPath(written, ["loss_scale", "window"]), 5);
  assert.deepEqual(writePath(written, ["loss_scale", "window"], undefined), spec);
});

test("what is typed is a number, not yet a number, or nothing", () => {
  assert.deepEqual(["1e-3", "0.", "-", ""].map(readNumber), [0.001, 0, "-", undefined]);
});

function experiment(runs: Run[]): Experiment {
  const table = { check_label: "published", columns: [], rows: [], run_ids: runs.map(({ id }) => id), published: runs.map((_, at) => ({ matches: at === 0, differences: [] })) };
  const matrix = { zero_stage: [1, 2], step_ordering: ["master", "ordered"] };
  return { id: "e", name: "e", builtin: null, status: "running", created_at: "", matrix, runs, table };
}

test("a matrix has a row a combination, a column an ordering, and says which cells are missing", () => {
  const verdict = { name: "dies" as const, step: 17, parameter: null, evidence: "" };
  const made = experiment([
    run("a", { zero_stage: 1, step_ordering: "master" }, { verdict, finished_at: "now" }),
    run("b", { zero_stage: 1, step_ordering: "ordered" }),
    run("c", { zero_stage: 2, step_ordering: "ordered" }),
  ]);
  const matrix = buildMatrix(made);
  assert.deepEqual(matrix.fields, ["zero_stage"]);
  assert.deepEqual(matrix.rows.map(({ cells }) => cells.map((cell) => cell?.run.id ?? null)), [["a", "b"], [null, "c"]]);
  assert.equal(matrix.rows[0]?.cells[0]?.published?.matches, true);
  assert.deepEqual(tally(made)[0], { ordering: "master", died: 1, trained: 0, ended: 1, total: 1 });
});
