/** How a run is named and marked in charts. */

import type { Run } from "../api/types.ts";
import { formatInteger } from "../format/number.ts";
import { orderingWords } from "../format/spec.ts";
import { words } from "../format/words.ts";
import type { TraceIdentity } from "./trace.ts";

/** Runs are called by their ordering where that tells them apart, else by their name. */
export function traceLabels(runs: readonly Run[]): string[] {
  const orderings = runs.map((run) => orderingWords(run.spec));
  if (new Set(orderings).size === runs.length) return orderings;
  const names = runs.map((run) => run.name);
  return new Set(names).size === runs.length ? names : runs.map((run) => `${run.name} ${run.id.slice(0, 4)}`);
}

function endOf(run: Run): TraceIdentity["end"] {
  if (run.status !== "failed") return null;
  const step = run.verdict?.step ?? run.failure?.step ?? null;
  if (step === null) return null;
  const why = run.failure === null ? words(run.verdict?.name ?? "ends") : words(run.failure.kind);
  return { step, text: `${run.verdict?.name === "dies" ? "dies" : "ends"} at ${formatInteger(step)}: ${why}` };
}

export function traceIdentity(run: Run, label: string): TraceIdentity {
  return { id: run.id, label, ordering: run.spec.step_ordering, end: endOf(run) };
}
