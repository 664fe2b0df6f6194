/** How a run is named and marked in charts. */

import type { Run } from "../api/types.ts";
import { formatInteger } from "../format/number.ts";
import { orderingWords } from "../format/spec.ts";
import { words } from "../format/words.ts";
import { repeatedDashes } from "./orderings.ts";
import type { TraceIdentity } from "./trace.ts";

/** Runs are called by their ordering where that tells them apart, else by their name. */
export function traceLabels(runs: readonly Run[]): string[] {
  const orderings = runs.map((run) => orderingWords(run.spec));
  if (new Set(orderings).size === runs.length) return orderings;
  const names = runs.map((run) => run.name);
  return new Set(names).size === runs.length ? withoutShared(names) : runs.map((run) => `${run.name} ${run.id.slice(0, 4)}`);
}

/** The words that all names begin with, and those after them, which tell the names apart. */
export function sharedWords(names: readonly string[]): { shared: string; rest: string[] } {
  const all = names.map((name) => name.split(" "));
  const shortest = Math.min(...all.map((parts) => parts.length));
  const [first = []] = all;
  let count = 0;
  while (count < shortest - 1 && all.every((parts) => parts[count] === first[count])) count += 1;
  return { shared: first.slice(0, count).join(" "), rest: all.map((parts) => parts.slice(count).join(" ")) };
}

function withoutShared(names: readonly string[]): string[] {
  return sharedWords(names).rest;
}

/** How the runs' lines are dashed where several share an ordering. */
export function traceDashes(runs: readonly Run[]): (number[] | undefined)[] {
  return repeatedDashes(runs.map((run) => orderingWords(run.spec)));
}

function endOf(run: Run): TraceIdentity["end"] {
  if (run.status !== "failed") return null;
  const step = run.verdict?.step ?? run.failure?.step ?? null;
  if (step === null) return null;
  const why = run.failure === null ? words(run.verdict?.name ?? "ends") : words(run.failure.kind);
  return { step, text: `${run.verdict?.name === "dies" ? "dies" : "ends"} at ${formatInteger(step)}: ${why}` };
}

export function traceIdentity(run: Run, label: string, dash?: number[], quantities?: TraceIdentity["quantities"]): TraceIdentity {
  const hasLossScale = run.spec.precision === "fp16";
  return { id: run.id, label, ordering: orderingWords(run.spec), dash, hasLossScale, quantities, end: endOf(run) };
}
