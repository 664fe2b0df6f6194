/** How the loaded rows change as pages and events arrive. Pure. */

import type { Run } from "../../api/types.ts";

/**
 * Put a fresh first page before what is loaded after it, in the page's order and without repeats.
 *
 * Loaded rows before the page's last one that the page lacks no longer match the filter, and go.
 */
export function mergeHead(head: readonly Run[], loaded: readonly Run[]): Run[] {
  const ids = new Set(head.map((run) => run.id));
  const last = loaded.findIndex((run) => run.id === head.at(-1)?.id);
  return [...head, ...loaded.slice(last + 1).filter((run) => !ids.has(run.id))];
}

/** Replace the rows that changed; the same array when none is on the list. */
export function replaceRuns(runs: Run[], changed: ReadonlyMap<string, Run>): Run[] {
  let next: Run[] | null = null;
  runs.forEach((run, index) => {
    const fresh = changed.get(run.id);
    if (fresh) {
      next ??= [...runs];
      next[index] = fresh;
    }
  });
  return next ?? runs;
}
