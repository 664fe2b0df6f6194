/** How many steps a run has, or is to have. */

import type { Run } from "../api/types.ts";

/** The steps planned; of a recorded script that said none, those that have come. */
export function plannedSteps(run: Run): number {
  const task = run.spec.task;
  const isOpenEnded = task !== undefined && "is_open_ended" in task && task.is_open_ended === true;
  return isOpenEnded ? Math.max(run.summary?.steps ?? 0, 1) : run.spec.steps;
}
