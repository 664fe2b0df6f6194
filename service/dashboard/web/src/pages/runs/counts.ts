/** The segments above the run table, and how many of the filter's runs each of them would show. */

import { useEffect, useRef } from "react";

import { withQuery } from "../../api/client.ts";
import { live } from "../../api/live.ts";
import { useResource } from "../../api/resource.ts";
import type { Run, RunCounts } from "../../api/types.ts";
import { TERMINAL } from "../../format/words.ts";
import { splitQuery, tokenField, withToken } from "./query.ts";

const REREAD_MS = 1000;

export const SEGMENTS = [
  { value: "", label: "All" },
  { value: "status:running", label: "Running" },
  { value: "status:queued", label: "Queued" },
  { value: "status:failed", label: "Failed" },
  { value: "verdict:dies", label: "Died" },
  { value: "verdict:trains", label: "Trains" },
] as const;

/** The filter without what a segment sets: the counts are of the runs among which the segments choose. */
export function withoutSegment(query: string): string {
  return withToken(withToken(query, "status", null), "verdict", null);
}

export function segmentOf(query: string): string {
  return SEGMENTS.find(({ value }) => value !== "" && splitQuery(query).includes(value))?.value ?? "";
}

export function countOf(segment: string, counts: RunCounts): number {
  const [field, word = ""] = segment.split(":");
  if (field === "") return counts.total;
  const byWord: Record<string, number | undefined> = field === "status" ? counts.statuses : counts.verdicts;
  return byWord[word] ?? 0;
}

/** How many runs the filter finds, where the segments' counts can tell; null where its own status condition is another. */
export function totalOf(query: string, counts: RunCounts | undefined): number | null {
  if (counts === undefined) return null;
  const own = splitQuery(query).filter((token) => ["status", "verdict"].includes(tokenField(token) ?? ""));
  const segment = segmentOf(query);
  if (own.length > 1 || (own[0] ?? "") !== segment) return null;
  return countOf(segment, counts);
}

/** Read anew when a run appears or changes its status or verdict, at most once a second: steps move no count. */
export function useRunCounts(query: string): RunCounts | undefined {
  const { data, refresh } = useResource<RunCounts>(withQuery("/runs/counts", { q: withoutSegment(query) }));
  const standing = useRef(new Map<string, string>());
  useEffect(() => {
    let timer: ReturnType<typeof setTimeout> | undefined;
    const stop = live.onRun((run: Run) => {
      const now = `${run.status} ${run.verdict?.name ?? ""}`;
      if (standing.current.get(run.id) === now) return;
      if (TERMINAL.has(run.status)) standing.current.delete(run.id);
      else standing.current.set(run.id, now);
      timer ??= setTimeout(() => {
        timer = undefined;
        refresh();
      }, REREAD_MS);
    });
    return () => {
      clearTimeout(timer);
      stop();
    };
  }, [refresh]);
  return data;
}
