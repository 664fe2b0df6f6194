/**
 * The run list: pages by cursor as the reader scrolls, rows replaced in place as the live stream reports them.
 *
 * A run that the stream names and the list lacks may belong to the filter or not; only the service knows, so the
 * first page is read again, at most once a second.
 */

import { useCallback, useEffect, useRef, useState } from "react";

import { requestJson, withQuery, type ApiError } from "../../api/client.ts";
import { live } from "../../api/live.ts";
import { asApiError } from "../../api/resource.ts";
import type { Run, RunPage } from "../../api/types.ts";
import { mergeHead, replaceRuns } from "./runList.ts";

const FIRST_PAGE = 50;
const PAGE = 100;
const FLUSH_MS = 100;
const REREAD_MS = 1000;

export interface RunList {
  runs: readonly Run[];
  hasMore: boolean;
  isLoading: boolean;
  error: ApiError | null;
  loadMore: () => void;
  reload: () => void;
}

interface State {
  key: string;
  runs: Run[];
  cursor: string | null;
  error: ApiError | null;
}

export function useRunList(query: string, sort: string): RunList {
  const key = `${sort} ${query}`;
  const [state, setState] = useState<State>({ key: "", runs: [], cursor: null, error: null });
  const latest = useRef(state);
  latest.current = state;
  const loadingMore = useRef<string | null>(null);

  const readFirst = useCallback(
    async (signal: AbortSignal | undefined, keepTail: boolean) => {
      try {
        const page = await requestJson<RunPage>(withQuery("/runs", { q: query, sort, limit: FIRST_PAGE }), { signal });
        setState((before) => {
          const tail = keepTail && before.key === key && page.next_cursor !== null && before.runs.length > page.runs.length;
          return {
            key,
            runs: tail ? mergeHead(page.runs, before.runs) : page.runs,
            cursor: tail ? before.cursor : page.next_cursor,
            error: null,
          };
        });
      } catch (error) {
        if (signal?.aborted) return;
        setState((before) => ({ ...before, key, error: asApiError(error) }));
      }
    },
    [key, query, sort],
  );

  useEffect(() => {
    const controller = new AbortController();
    void readFirst(controller.signal, false);
    return () => controller.abort();
  }, [readFirst]);

  useEffect(() => {
    const changed = new Map<string, Run>();
    let flushTimer: ReturnType<typeof setTimeout> | undefined;
    let rereadTimer: ReturnType<typeof setTimeout> | undefined;
    const reread = () => {
      rereadTimer ??= setTimeout(() => {
        rereadTimer = undefined;
        void readFirst(undefined, true);
      }, REREAD_MS);
    };
    const flush = () => {
      flushTimer = undefined;
      const known = new Map(latest.current.runs.map((run) => [run.id, run]));
      const isRegrouped = [...changed.values()].some((run) => known.get(run.id)?.status !== run.status);
      const batch = new Map(changed);
      changed.clear();
      setState((before) => ({ ...before, runs: replaceRuns(before.runs, batch) }));
      if (isRegrouped) reread();
    };
    const stopRuns = live.onRun((run) => {
      changed.set(run.id, run);
      flushTimer ??= setTimeout(flush, FLUSH_MS);
    });
    const stopResync = live.onResync(() => void readFirst(undefined, true));
    return () => {
      stopRuns();
      stopResync();
      clearTimeout(flushTimer);
      clearTimeout(rereadTimer);
    };
  }, [readFirst]);

  const loadMore = useCallback(() => {
    const { cursor } = latest.current;
    if (cursor === null || loadingMore.current === cursor || latest.current.key !== key) return;
    loadingMore.current = cursor;
    requestJson<RunPage>(withQuery("/runs", { q: query, sort, limit: PAGE, cursor })).then(
      (page) =>
        setState((before) => {
          if (before.key !== key || before.cursor !== cursor) return before;
          const known = new Set(before.runs.map((run) => run.id));
          const fresh = page.runs.filter((run) => !known.has(run.id));
          return { ...before, runs: [...before.runs, ...fresh], cursor: page.next_cursor };
        }),
      () => {
        loadingMore.current = null; // scrolling again asks again; the banner says when the service is away
      },
    );
  }, [key, query, sort]);

  return {
    runs: state.runs,
    hasMore: state.cursor !== null,
    isLoading: state.key === "",
    error: state.key === key ? state.error : null,
    loadMore,
    reload: useCallback(() => void readFirst(undefined, false), [readFirst]),
  };
}
