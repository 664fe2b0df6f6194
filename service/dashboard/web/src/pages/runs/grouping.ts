/** Rows under headings: by experiment, by tag, or by what a pair shares. */

import type { Run } from "../../api/types.ts";
import { sharedWithPair } from "../../format/spec.ts";

export interface RunGroup {
  key: string;
  title: string;
  runs: Run[];
}

export const GROUPINGS = [
  ["", "none"],
  ["experiment", "experiment"],
  ["pair", "pair"],
  ["tag", "tag"],
] as const;

export function groupRuns(runs: readonly Run[], by: string, experimentNames: ReadonlyMap<string, string>): RunGroup[] {
  const groups = new Map<string, RunGroup>();
  const put = (key: string, title: string, run: Run) => {
    const group = groups.get(key) ?? { key, title, runs: [] };
    group.runs.push(run);
    groups.set(key, group);
  };
  for (const run of runs) {
    if (by === "experiment") {
      const id = run.experiment_id;
      put(id ?? "", id === null ? "No experiment" : (experimentNames.get(id) ?? id), run);
    } else if (by === "tag") {
      if (run.tags.length === 0) put("", "No tag", run);
      else put(run.tags[0] as string, run.tags[0] as string, run);
    } else {
      const shared = sharedWithPair(run);
      put(shared.key, shared.title, run);
    }
  }
  return [...groups.values()];
}
