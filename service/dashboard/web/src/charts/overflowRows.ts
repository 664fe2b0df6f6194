/** What an overflow did to each run's momentum, read from the norms before and after it. Pure. */

import { nonfiniteWord } from "../format/number.ts";
import type { Reader } from "./exactSteps.ts";
import { spanHolds, valueAt, type Trace } from "./trace.ts";

const asDrawn: Reader = (trace, field, step) => valueAt(trace, field, step);

export interface Effect {
  text: string;
  isNonfinite: boolean;
  isQuiet: boolean;
}

const quiet = (text: string): Effect => ({ text, isNonfinite: false, isQuiet: true });

export function effectAt(trace: Trace, step: number, read: Reader = asDrawn): Effect {
  if (step > trace.last) return quiet(trace.end !== null && step >= trace.end.step ? "ended" : "—");
  if (!spanHolds(trace.discarded, step)) return quiet("applied");
  const after = read(trace, "momentum_norm", step);
  const before = step === 0 ? null : read(trace, "momentum_norm", step - 1);
  if (after === null) return quiet("discarded");
  if (!Number.isFinite(after)) {
    const wasFinite = before === null || Number.isFinite(before);
    return { text: `${nonfiniteWord(after)}${wasFinite ? " enters" : ""}`, isNonfinite: true, isQuiet: false };
  }
  if (before === null) return { text: after === 0 ? "kept out" : "discarded", isNonfinite: false, isQuiet: after !== 0 };
  return { text: after === before ? "kept out" : "moved", isNonfinite: false, isQuiet: false };
}

/** The union of the runs' overflow steps, the first `most` of them from `from` on, and how many there are in all. */
export function overflowSteps(traces: readonly Trace[], from: number, most: number): { steps: number[]; total: number } {
  const spans = traces.flatMap((trace) => trace.overflow).sort(([a], [b]) => a - b);
  const merged: [number, number][] = [];
  for (const [first, last] of spans) {
    const open = merged.at(-1);
    if (open && first <= open[1] + 1) open[1] = Math.max(open[1], last);
    else merged.push([first, last]);
  }
  const steps: number[] = [];
  let total = 0;
  for (const [first, last] of merged) {
    total += last - first + 1;
    for (let step = Math.max(first, from); step <= last && steps.length < most; step += 1) steps.push(step);
  }
  return { steps, total };
}
