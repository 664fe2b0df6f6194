import assert from "node:assert/strict";
import { test } from "node:test";
import { createElement } from "react";
import { renderToStaticMarkup } from "react-dom/server";

import { defaultOf, findSpecSchema, variantFor } from "../src/api/schema.ts";
import type { Attempt, Comparison, Experiment, LoadSample, Run, RunCounts } from "../src/api/types.ts";
import { finiteRange, shader } from "../src/charts/heat.ts";
import { stepRanges } from "../src/charts/exactSteps.ts";
import { sharedWords, traceDashes, traceIdentity, traceLabels } from "../src/charts/identity.ts";
import { orderingStyle } from "../src/charts/orderings.ts";
import { panelData, panelsFor } from "../src/charts/panels.ts";
import { Readout, type Unlike } from "../src/charts/Readout.tsx";
import { emptyTrace, type Trace } from "../src/charts/trace.ts";
import { effectAt, overflowSteps } from "../src/charts/overflowRows.ts";
import { canRetry } from "../src/format/spec.ts";
import { lowerLoss, notes, quantities, stillToBegin } from "../src/pages/compare/notes.ts";
import { landmarks } from "../src/pages/compare/useComparisons.ts";
import { buildMatrix, heldFigures, tally } from "../src/pages/experiments/matrix.ts";
import { filterLines, ranksOf, readLines } from "../src/pages/run/logText.ts";
import { loadPanels, rankLoads, stepClock } from "../src/pages/run/load.ts";
import { phaseBars } from "../src/pages/run/phases.ts";
import { carriedTags } from "../src/pages/runs/TagMenu.tsx";
import { countOf, SEGMENTS, totalOf, withoutSegment } from "../src/pages/runs/counts.ts";
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

const COUNTS = { total: 9, statuses: { running: 4 }, verdicts: { dies: 2 } } as unknown as RunCounts;

test("a segment counts the runs that it would show of those that the other conditions find", () => {
  assert.equal(withoutSegment("stage:2 status:running gpt verdict:dies"), "stage:2 gpt");
  assert.deepEqual(["", "status:running", "verdict:dies", "verdict:trains"].map((each) => countOf(each, COUNTS)), [9, 4, 2, 0]);
});

test("the total is said where a segment is chosen, and not where another condition on the status is", () => {
  assert.equal(countOf("status:failed", { total: 9, statuses: { failed: 3 }, verdicts: {} } as unknown as RunCounts), 3);
  assert.ok(SEGMENTS.some(({ value }) => value === "status:failed"));
  const queries = ["", "gpt", "gpt status:running", "status:running,queued", "status:running verdict:dies"];
  assert.deepEqual(queries.map((query) => totalOf(query, COUNTS)), [9, 9, 4, null, null]);
  assert.equal(totalOf("", undefined), null);
});

test("the tags of several runs come with how many carry them", () => {
  const runs = [run("a", {}, { tags: ["x", "y"] }), run("b", {}, { tags: ["y"] })];
  assert.deepEqual(carriedTags(runs), [["y", 2], ["x", 1]]);
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
  const table = { check_label: "published", checked: "what moved", columns: [], rows: [], run_ids: runs.map(({ id }) => id), published: runs.map((_, at) => ({ matches: at === 0, differences: [] })) };
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
  assert.deepEqual(tally(made)[0], { ordering: "master", died: 1, trained: 0, stopped: 0, ended: 1, total: 1 });
});

const ATTEMPT = { phases: { first_step: 100 }, first_step: 0 } as unknown as Attempt;
const TIMES = { step: [0, 1, 2], seconds: [2, 1, 3], exact: true };

function sample(rank: number, at: number, cpu_percent: number, more: Partial<LoadSample> = {}): LoadSample {
  return { rank, at, cpu_percent, memory_bytes: 2 ** 30, gpu_percent: null, gpu_memory_bytes: null, ...more } as LoadSample;
}

test("a moment has its place among the steps by how long each of them took", () => {
  const clock = stepClock(ATTEMPT, TIMES, 0);
  assert.deepEqual([97.9, 98, 100, 100.5, 101, 104, 104.1].map((at) => clock?.(at)), [null, -0.5, 0.5, 1, 1.5, 2.5, null]);
});

test("where only some steps are sent, those between the first and the end count as equally long", () => {
  const clock = stepClock(ATTEMPT, { step: [0, 60, 100], seconds: [2, 1, 3], exact: false }, 300);
  assert.deepEqual([100, 200, 300].map((at) => clock?.(at)), [0.5, 50.5, 100.5]);
});

test("before the first step there is no clock", () => {
  assert.equal(stepClock({ phases: {}, first_step: 0 } as unknown as Attempt, TIMES, 0), null);
});

test("only what was measured gets a panel, a line a rank in ink", () => {
  const clock = stepClock(ATTEMPT, TIMES, 0);
  assert.ok(clock);
  const panels = loadPanels([sample(0, 100, 40), sample(1, 100, 50), sample(0, 103, 60), sample(1, 103, 70)], clock);
  assert.deepEqual(panels.map(({ spec }) => spec.key), ["load_cpu", "load_memory"]);
  assert.deepEqual(panels[0]?.data.slice(1), [[40, 60], [50, 70]]);
  assert.ok(panels[0]?.lines.every(({ look }) => look?.colour.startsWith("--ink")));
});

test("of many ranks the highest and the lowest are drawn", () => {
  const clock = stepClock(ATTEMPT, TIMES, 0);
  assert.ok(clock);
  const samples = [100, 103].flatMap((at) => Array.from({ length: 9 }, (_, rank) => sample(rank, at, rank + at)));
  assert.deepEqual(loadPanels(samples, clock)[0]?.data.slice(1), [[108, 111], [100, 103]]);
});

test("the figures are those of the sample nearest to the step, with the peak of all", () => {
  const samples = [sample(0, 100, 40), sample(0, 103, 60), sample(0, 104, 10)];
  const clock = stepClock(ATTEMPT, TIMES, 0);
  assert.equal(rankLoads(samples, clock, 0)[0]?.shown.cpu_percent, 40);
  assert.equal(rankLoads(samples, clock, null)[0]?.shown.cpu_percent, 10);
  assert.equal(rankLoads(samples, clock, 0)[0]?.peak.cpu, 60);
});

test("the exact steps around several overflows are read in few requests", () => {
  assert.deepEqual(stepRanges([4, 5, 5, 9, 100, 99]), [[4, 9], [99, 100]]);
});

test("what is not the same quantity in two runs, and how often clipping acted, are told by the runs' names", () => {
  const comparison = {
    routes: null,
    not_compared: [{ quantity: "grad_norm", a: "the norm of the update", b: "the norm of the gradient" }],
    clipping: {
      a: { limit: 1, scope: "update", applied: 60, acted: 60 },
      b: { limit: 0.5, scope: "muon_exempt", applied: 60, acted: null },
    },
  } as unknown as Comparison;
  assert.deepEqual(notes(comparison, "stock", "ours"), [
    "Gradient norm is the norm of the update in stock and the norm of the gradient in ours: not compared.",
    "In stock the update was clipped to 1 in 60 of 60 applied steps.",
    "In ours the gradient of what AdamW takes was clipped to 0.5 in an unrecorded number of 60 applied steps.",
  ]);
  assert.deepEqual(notes({ routes: null, not_compared: [], clipping: { a: null, b: null } } as unknown as Comparison, "a", "b"), []);
});

test("parameters that not the same optimizer takes are named, the many by their number", () => {
  const told = (differing: { parameter: string; a: string; b: string }[], more = 0) => {
    const routes = { num_differing: differing.length + more, differing };
    return notes({ routes, not_compared: [], clipping: { a: null, b: null } } as unknown as Comparison, "stock", "ours");
  };
  const muons = (...names: string[]) => names.map((parameter) => ({ parameter, a: "muon", b: "adamw" }));
  assert.deepEqual(told(muons("0.weight")), ["0.weight is Muon's in stock and AdamW's in ours."]);
  const frozen = { parameter: "head", a: "adamw", b: "frozen" };
  assert.deepEqual(told([...muons("a", "b"), frozen, { parameter: "x", a: "lion", b: "muon" }]), [
    "a and b are Muon's in stock and AdamW's in ours.",
    "head is AdamW's in stock and frozen in ours.",
    "x is another optimizer's in stock and Muon's in ours.",
  ]);
  assert.deepEqual(told(muons("a", "b", "c", "d", "e"), 4), [
    "a, b, c and 2 more are Muon's in stock and AdamW's in ours.",
    "9 parameters are not the same optimizer's in both.",
  ]);
  // Counter-test: of runs that do not differ so nothing is said.
  assert.deepEqual(told([]), []);
});

test("runs without a step yet are told apart from those that will never have one", () => {
  const at = (status: Run["status"], steps: number) => run(status, {}, { status, summary: { steps } as Run["summary"] });
  const told = (...runs: Run[]) => stillToBegin(runs, ["a", "b", "c"]);
  assert.equal(told(at("queued", 0), at("pending", 0)), "Neither run has recorded a step yet");
  assert.equal(told(at("queued", 0), at("pending", 0), at("running", 0)), "None of the runs has recorded a step yet");
  assert.equal(told(at("running", 3), at("pending", 0)), "b has not recorded a step yet");
  assert.equal(told(at("queued", 0), at("running", 3), at("pending", 0)), "a and c have not recorded a step yet");
  assert.deepEqual([told(at("failed", 0), at("pending", 0)), told(at("succeeded", 3), at("running", 1))], [null, null]);
});

test("the shades go from the least finite norm to the largest", () => {
  const rows = [[0.5, Infinity, null], [NaN, 0, 8]].map((norms, index) => ({ index, name: "", route: "muon", norms }));
  assert.deepEqual(finiteRange(rows), [0.5, 8]);
  assert.deepEqual([0.5, 2, 8].map(shader(rows)), [0, 0.5, 1]);
  assert.equal(finiteRange([{ index: 0, name: "", route: "muon", norms: [NaN, 0] }]), null);
});

test("what the checks look at is said where it is the same for every run", () => {
  assert.equal(heldFigures({ checked: "what moved" }), ": what moved");
  assert.equal(heldFigures({ checked: "" }), "");
});

test("numbers of one name and two quantities have a panel each, which says what they are and whose", () => {
  const compared = (b: string | null) =>
    ({ not_compared: b === null ? [] : [{ quantity: "momentum_norm", a: "a norm times the loss scale", b }] }) as unknown as Comparison;
  const panelsOf = (...each: (Comparison | undefined)[]) => {
    const traces = quantities(each).map((recorded, index): Trace => {
      const trace = emptyTrace({ id: `${index}`, label: `run ${index}`, ordering: "ordered", quantities: recorded, end: null });
      return { ...trace, step: [0], last: 0, columns: { ...trace.columns, momentum_norm: [10 ** index] } };
    });
    const panels = panelsFor(traces).filter(({ key }) => key.startsWith("momentum"));
    return panels.map((spec) => [spec.title, spec.note, panelData(spec, traces, 0).lines.map(({ trace }) => trace.id)]);
  };
  const note = "non-finite values sit above the axis";
  assert.deepEqual(panelsOf(compared("a norm")), [
    ["Momentum norm of run 0", `a norm times the loss scale · ${note}`, ["0"]],
    ["Momentum norm of run 1", `a norm · ${note}`, ["1"]],
  ]);
  assert.deepEqual(panelsOf(compared(null), compared("a norm"), compared("a norm")), [
    ["Momentum norm of run 0, run 1", `a norm times the loss scale · ${note}`, ["0", "1"]],
    ["Momentum norm of run 2, run 3", `a norm · ${note}`, ["2", "3"]],
  ]);
  // Counter-test: what is one quantity, or not compared yet, shares its axis.
  for (const each of [compared(null), undefined]) assert.deepEqual(panelsOf(each), [["Momentum norm", note, ["0", "1"]]]);
});

test("the lower loss is told by name, with why it may mean nothing", () => {
  const told = (lower: unknown, caveat: string | null) =>
    lowerLoss({ learning: { lower, caveat } } as unknown as Comparison, "one", "two");
  const lower = { side: "b", from_step: 12, until_step: 59 };
  assert.equal(told(lower, null), "two stays below one from step 12 on, to step 59.");
  assert.equal(told({ ...lower, side: "a" }, "The data differ."), "one stays below two from step 12 on, to step 59. The data differ.");
  assert.equal(told(null, "The data differ."), null);
});

test("the readout holds against each other only what is one quantity, and says why of the rest", () => {
  const traces = [2, 3].map((value, index): Trace => {
    const trace = { ...emptyTrace({ id: `${index}`, label: `${index}`, ordering: "ordered", end: null }), step: [0], last: 0 };
    return { ...trace, columns: { ...trace.columns, loss: [value], grad_norm: [value], momentum_norm: [value] } };
  });
  const why = "Gradient norm is one thing in one and another in the other: not compared.";
  const cells = (unlike: readonly Unlike[] | null) => {
    const html = renderToStaticMarkup(createElement(Readout, { traces, step: 0, isLocked: false, unlike }));
    const row = (label: string) => {
      const found = html.match(new RegExp(`<th scope="row">${label}</th>(.*?)</tr>`))?.[1] ?? "";
      return found.replaceAll(/<\/td>/g, "|").replaceAll(/<[^>]*>/g, "").split("|").slice(0, -1);
    };
    return { loss: row("Loss"), gradient: row("Gradient norm"), isSaid: html.includes(`<p>${why}</p>`) };
  };
  const like = { loss: ["2.000", "3.000", "−1.00"], gradient: ["2.000", "3.000", "−1.00"] };
  assert.deepEqual(cells([]), { ...like, isSaid: false });
  assert.deepEqual(cells([{ quantity: "grad_norm", why }]), { ...like, gradient: ["2.000", "3.000", "—"], isSaid: true });
  assert.deepEqual(cells(null).loss, ["2.000", "3.000", "—"]);
});

test("runs that share an ordering are told apart by what their names do not share, and by a dash each", () => {
  const named = (name: string, ordering = "ordered") => run(name, { step_ordering: ordering, task: { name: "byte_gpt" } });
  const rates = ["which rate lr=0.02", "which rate lr=0.005"].map((name) => named(name));
  assert.deepEqual(traceLabels(rates), ["lr=0.02", "lr=0.005"]);
  const [one, other] = traceDashes(rates);
  assert.ok(one !== undefined && other !== undefined);
  assert.notDeepEqual(one, other);
  const eight = traceDashes(Array.from({ length: 8 }, (_, index) => named(`run ${index}`)));
  assert.equal(new Set(eight.map((dash) => JSON.stringify(dash))).size, 8);
  const pair = [named("a", "master"), named("b")];
  assert.deepEqual([traceLabels(pair), traceDashes(pair)], [["master", "ordered"], [undefined, undefined]]);
  assert.deepEqual(sharedWords(["same", "same but longer"]), { shared: "", rest: ["same", "same but longer"] });
});

test("what has no ordering is drawn as none, and no scale is drawn where there is none", () => {
  const adamw = run("a", { precision: "bf16", task: { name: "external", optimizer: "AdamW" } });
  const { ordering, hasLossScale } = traceIdentity(adamw, "AdamW");
  assert.deepEqual([orderingStyle(ordering).colour, hasLossScale], ["--ink-2", false]);
  const trace = (scaled: boolean): Trace => {
    const empty = { ...emptyTrace({ id: "a", label: "a", ordering, hasLossScale: scaled, end: null }), step: [0], last: 0 };
    return { ...empty, columns: { ...empty.columns, loss_scale_before: [1], loss_scale_after: [1] } };
  };
  const keys = (traces: readonly Trace[]) => panelsFor(traces).map(({ key }) => key);
  assert.ok(!keys([trace(false)]).includes("loss_scale"));
  assert.ok(keys([trace(false), trace(true)]).includes("loss_scale"));
  assert.equal(panelsFor([trace(false)]).filter(({ saysEnd }) => saysEnd).length, 1);
  const shown = (traces: Trace[]) => renderToStaticMarkup(createElement(Readout, { traces, step: 0, isLocked: false }));
  assert.match(shown([trace(true)]), /Loss scale<\/th><td>.*?<sup>0<\/sup>/);
  assert.match(shown([trace(false)]), /Loss scale<\/th><td><span class="ink-3">—</);
});

test("only what the service would start again is offered to be retried", () => {
  const task = { name: "external", optimizer: "AdamW" };
  const asked = (["failed", "stopped", "succeeded", "running"] as const).map((status) => canRetry(run("a", { task: { name: "byte_gpt" } }, { status })));
  assert.deepEqual(asked, [true, true, false, false]);
  assert.equal(canRetry(run("a", { task }, { status: "failed" })), false);
});

test("runs that share no step have no place to zoom to", () => {
  const until = (step: number) => landmarks([{ first_divergence: null, bit_equal_until: step } as unknown as Comparison]).landmark;
  assert.deepEqual([until(0), until(7)], [null, 7]);
});
