/** Each run against the first one, read again as they record more, but not on every step. */

import { useCallback, useEffect, useRef, useState } from "react";

import { requestJson, withQuery, type ApiError } from "../../api/client.ts";
import { live } from "../../api/live.ts";
import { asApiError } from "../../api/resource.ts";
import type { Comparison, Run } from "../../api/types.ts";

const REREAD_MS = 2000;

export interface Comparisons {
  /** By the place of the run after the first; undefined until read. */
  each: (Comparison | undefined)[];
  error: ApiError | null;
}

interface Pair {
  key: string;
  a: Run;
  b: Run;
}

function pairsOf(runs: readonly Run[]): Pair[] {
  const [a, ...others] = runs;
  return a === undefined ? [] : others.map((b) => ({ key: `${a.id} ${b.id}`, a, b }));
}

function markOf({ a, b }: Pair): string {
  return [a, b].map((run) => `${run.status} ${run.summary?.steps ?? 0}`).join();
}

export function useComparisons(runs: readonly Run[]): Comparisons {
  const [known, setKnown] = useState<ReadonlyMap<string, Comparison>>(new Map());
  const [error, setError] = useState<ApiError | null>(null);
  const [generation, setGeneration] = useState(0);
  const pairs = pairsOf(runs);
  const latest = useRef(pairs);
  latest.current = pairs;
  const readAt = useRef(new Map<string, string>());
  const timer = useRef<ReturnType<typeof setTimeout>>(undefined);

  useEffect(() => live.onResync(() => setGeneration((value) => value + 1)), []);

  const read = useCallback(async (signal?: AbortSignal) => {
    for (const pair of latest.current) {
      const mark = markOf(pair);
      if (readAt.current.get(pair.key) === mark || signal?.aborted) continue;
      readAt.current.set(pair.key, mark);
      try {
        const found = await requestJson<Comparison>(withQuery("/compare", { a: pair.a.id, b: pair.b.id }), { signal });
        setKnown((before) => new Map(before).set(pair.key, found));
        setError(null);
      } catch (reason) {
        readAt.current.delete(pair.key);
        if (!signal?.aborted) setError(asApiError(reason));
      }
    }
  }, []);

  const wanted = pairs.map(({ key }) => key).join();
  useEffect(() => {
    const controller = new AbortController();
    readAt.current.clear();
    void read(controller.signal);
    return () => controller.abort();
  }, [wanted, generation, read]);

  // Not put off by the next step: a run that never pauses would never be compared.
  const recorded = pairs.map(markOf).join();
  useEffect(() => {
    timer.current ??= setTimeout(() => {
      timer.current = undefined;
      void read();
    }, REREAD_MS);
  }, [recorded, read]);
  useEffect(
    () => () => {
      clearTimeout(timer.current);
      timer.current = undefined;
    },
    [],
  );

  return { each: pairs.map(({ key }) => known.get(key)), error };
}

/** The earliest step at which any of the runs parts from the first, or up to which the last of them is known equal: never 0. */
export function landmarks(each: readonly (Comparison | undefined)[]): { divergence: number | null; landmark: number | null } {
  const steps = each.flatMap((comparison) => comparison?.first_divergence?.step ?? []);
  const equal = each.flatMap((comparison) => comparison?.bit_equal_until || []);
  const divergence = steps.length === 0 ? null : Math.min(...steps);
  return { divergence, landmark: divergence ?? (equal.length === 0 ? null : Math.min(...equal)) };
}
