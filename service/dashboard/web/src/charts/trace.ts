/**
 * A run's steps as the charts read them. Pure: wire series in, columns and spans out.
 *
 * Columns hold finite numbers or null; what was not finite lies in `nonfinite`, exactly, step by step.
 */

import type { NonfiniteRun, Step, StepSeries, WireNumber } from "../api/types.ts";
import { formatInteger, nonfiniteWord, toNumber } from "../format/number.ts";

export const FIELDS = [
  "loss",
  "loss_scale_before",
  "loss_scale_after",
  "grad_norm",
  "update_norm",
  "momentum_norm",
] as const;
export type Field = (typeof FIELDS)[number];

/** First and last step, both included. */
export type Span = [number, number];

export interface NonfiniteSpan {
  first: number;
  last: number;
  value: number;
}

export interface Trace {
  id: string;
  label: string;
  /** The step ordering, or the optimizer that has none. */
  ordering: string;
  /** Where others share the ordering: what tells its line from theirs. */
  dash?: number[];
  /** DeepSpeed records a scale of 1 where there is none. */
  hasLossScale?: boolean;
  /** Of the fields that are not the same quantity in all runs beside each other: what it is in this one. */
  quantities?: Partial<Record<Field, string>>;
  /** Whether every recorded step in view has a point. */
  exact: boolean;
  step: number[];
  columns: Record<Field, (number | null)[]>;
  overflow: Span[];
  discarded: Span[];
  nonfinite: Partial<Record<Field, NonfiniteSpan[]>>;
  /** The last recorded step, -1 where there is none. */
  last: number;
  /** Where and how the run ended before its time, as its verdict says. */
  end: { step: number; text: string } | null;
}

export type TraceIdentity = Pick<Trace, "id" | "label" | "ordering" | "dash" | "hasLossScale" | "quantities" | "end">;

export function emptyTrace(identity: TraceIdentity): Trace {
  const columns = Object.fromEntries(FIELDS.map((field) => [field, []])) as unknown as Trace["columns"];
  return { ...identity, exact: true, step: [], columns, overflow: [], discarded: [], nonfinite: {}, last: -1 };
}

function finiteOrNull(value: WireNumber | null | undefined): number | null {
  const number = toNumber(value);
  return number !== null && Number.isFinite(number) ? number : null;
}

export function readTrace(identity: TraceIdentity, wire: StepSeries): Trace {
  const trace = emptyTrace(identity);
  trace.exact = wire.exact;
  trace.step = wire.series.step;
  for (const field of FIELDS) trace.columns[field] = (wire.series[field] ?? []).map(finiteOrNull);
  trace.overflow = wire.overflow_runs;
  trace.discarded = wire.discarded_runs;
  for (const field of FIELDS) {
    const runs = wire.nonfinite_runs[field];
    if (runs) trace.nonfinite[field] = runs.map(readNonfinite);
  }
  trace.last = trace.step.at(-1) ?? -1;
  return trace;
}

function readNonfinite(run: NonfiniteRun): NonfiniteSpan {
  return { first: run.first, last: run.last, value: toNumber(run.value) ?? Number.NaN };
}

/** Add steps that follow a trace's last one; those it already has are left out. */
export function appendSteps(trace: Trace, steps: readonly Step[]): Trace {
  const fresh = steps.filter((step) => step.step > trace.last);
  if (fresh.length === 0) return trace;
  const next: Trace = {
    ...trace,
    step: [...trace.step, ...fresh.map((step) => step.step)],
    columns: { ...trace.columns },
    overflow: [...trace.overflow],
    discarded: [...trace.discarded],
    nonfinite: { ...trace.nonfinite },
    last: fresh.at(-1)?.step ?? trace.last,
  };
  for (const field of FIELDS) {
    next.columns[field] = [...trace.columns[field], ...fresh.map((step) => finiteOrNull(step[field]))];
    let spans = trace.nonfinite[field];
    for (const step of fresh) {
      const value = toNumber(step[field]);
      if (value !== null && !Number.isFinite(value)) spans = extendNonfinite(spans ?? [], step.step, value);
    }
    if (spans) next.nonfinite[field] = spans;
  }
  for (const step of fresh) {
    if (step.overflow) next.overflow = extendSpan(next.overflow, step.step);
    if (step.discarded) next.discarded = extendSpan(next.discarded, step.step);
  }
  return next;
}

function extendSpan(spans: Span[], step: number): Span[] {
  const last = spans.at(-1);
  return last && last[1] === step - 1 ? [...spans.slice(0, -1), [last[0], step]] : [...spans, [step, step]];
}

function extendNonfinite(spans: NonfiniteSpan[], step: number, value: number): NonfiniteSpan[] {
  const last = spans.at(-1);
  if (last && last.last === step - 1 && Object.is(last.value, value)) return [...spans.slice(0, -1), { ...last, last: step }];
  return [...spans, { first: step, last: step, value }];
}

/** How many steps before `step` the spans hold. */
export function countBefore(spans: readonly Span[], step: number): number {
  let count = 0;
  for (const [first, last] of spans) {
    if (first >= step) break;
    count += Math.min(last, step - 1) - first + 1;
  }
  return count;
}

export function spanHolds(spans: readonly Span[], step: number): boolean {
  return spans.some(([first, last]) => first <= step && step <= last);
}

/** The next (by = 1) or previous (by = -1) step in any of these span lists, from `step` (null: from the edge). */
export function neighbourInSpans(lists: readonly (readonly Span[])[], step: number | null, by: 1 | -1): number | null {
  let best: number | null = null;
  const from = step ?? (by === 1 ? -Infinity : Infinity);
  for (const [first, last] of lists.flat()) {
    const candidate = by === 1 ? Math.max(first, from + 1) : Math.min(last, from - 1);
    if (candidate < first || candidate > last) continue;
    if (best === null || (by === 1 ? candidate < best : candidate > best)) best = candidate;
  }
  return best;
}

/** The index of the point at `step`, or of the last point before it; -1 where there is none. */
export function indexAt(steps: readonly number[], step: number): number {
  let low = 0;
  let high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((steps[middle] as number) <= step) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** A field's value at exactly this step: a number (finite or not), or null where it was not measured or not sent. */
export function valueAt(trace: Trace, field: Field, step: number): number | null {
  const span = trace.nonfinite[field]?.find(({ first, last }) => first <= step && step <= last);
  if (span) return span.value;
  const index = indexAt(trace.step, step);
  return index >= 0 && trace.step[index] === step ? (trace.columns[field][index] ?? null) : null;
}

const MOST_WORDS = 3;

/** The non-finite spans of a trace in words: `+inf at 5,012, nan 5,013 to the end`. */
export function spanWords(spans: readonly NonfiniteSpan[], trace: Pick<Trace, "last" | "end">): string {
  if (spans.length > MOST_WORDS) {
    const steps = spans.reduce((sum, { first, last }) => sum + last - first + 1, 0);
    return `non-finite at ${formatInteger(steps)} steps, first at ${formatInteger(spans[0]?.first)}`;
  }
  return spans
    .map(({ first, last, value }) => {
      const word = nonfiniteWord(value);
      if (first === last) return `${word} at ${formatInteger(first)}`;
      if (last === trace.last && trace.end !== null) return `${word} ${formatInteger(first)} to the end`;
      return `${word} ${formatInteger(first)} to ${formatInteger(last)}`;
    })
    .join(", ");
}

/**
 * The same trace over applied steps: discarded steps take no room, overflows stand between their neighbours.
 *
 * Step k becomes the number of applied steps before it, so two runs that discard differently line up by progress.
 */
export function overAppliedSteps(trace: Trace): Trace {
  const at = (step: number) => step - countBefore(trace.discarded, step);
  const kept = trace.step.map((step) => !spanHolds(trace.discarded, step));
  const columns = {} as Trace["columns"];
  for (const field of FIELDS) columns[field] = trace.columns[field].filter((_, index) => kept[index]);
  const nonfinite: Trace["nonfinite"] = {};
  for (const field of FIELDS) {
    const spans = trace.nonfinite[field];
    if (spans) nonfinite[field] = spans.map((span) => ({ ...span, first: at(span.first), last: at(span.last) }));
  }
  const between = trace.overflow.map(([first]): Span => [at(first) - 0.5, at(first) - 0.5]);
  return {
    ...trace,
    step: trace.step.filter((_, index) => kept[index]).map(at),
    columns,
    nonfinite,
    overflow: between,
    discarded: [],
    last: at(trace.last),
    end: trace.end === null ? null : { ...trace.end, step: at(trace.end.step) },
  };
}

/** An exponential mean that starts anew after a gap. It is drawn over the raw line, never instead of it. */
export function smooth(values: readonly (number | null | undefined)[], weight: number): (number | null | undefined)[] {
  let mean: number | null = null;
  return values.map((value) => {
    if (value === undefined) return undefined;
    if (value === null) {
      mean = null;
      return null;
    }
    mean = mean === null ? value : mean * weight + value * (1 - weight);
    return mean;
  });
}
