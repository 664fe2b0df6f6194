/** One GET as React state: the last good reply stays on screen while a newer one is on its way or fails. */

import { useCallback, useEffect, useRef, useState } from "react";

import { ApiError, requestJson } from "./client.ts";
import { live } from "./live.ts";

export interface Resource<T> {
  data: T | undefined;
  error: ApiError | undefined;
  isLoading: boolean;
  refresh: () => void;
}

interface Settled<T> {
  path: string | null;
  data: T | undefined;
  error: ApiError | undefined;
}

export function asApiError(error: unknown): ApiError {
  if (error instanceof ApiError) return error;
  return new ApiError({ status: 0, title: error instanceof Error ? error.message : String(error) });
}

/**
 * Read `path` (null: nothing to read), again on `refresh()` and whenever the live stream has begun, the first time or anew.
 *
 * `load` must be stable: a module function, or memoised.
 */
export function useResource<T>(
  path: string | null,
  load: (path: string, signal: AbortSignal) => Promise<T> = defaultLoad,
): Resource<T> {
  const [settled, setSettled] = useState<Settled<T>>({ path: null, data: undefined, error: undefined });
  const [generation, setGeneration] = useState(0);
  const refresh = useCallback(() => setGeneration((value) => value + 1), []);
  const isFetching = useRef(false);

  useEffect(() => {
    if (path === null) return;
    const controller = new AbortController();
    isFetching.current = true;
    load(path, controller.signal)
      .then(
        (data) => {
          if (!controller.signal.aborted) setSettled({ path, data, error: undefined });
        },
        (error: unknown) => {
          if (controller.signal.aborted) return;
          setSettled((before) => ({
            path,
            data: before.path === path ? before.data : undefined,
            error: asApiError(error),
          }));
        },
      )
      .finally(() => {
        isFetching.current = false;
      });
    return () => controller.abort();
  }, [path, generation, load]);

  useEffect(() => live.onResync(refresh), [refresh]);

  const isCurrent = settled.path === path;
  return {
    data: isCurrent ? settled.data : undefined,
    error: isCurrent ? settled.error : undefined,
    isLoading: path !== null && !isCurrent,
    refresh,
  };
}

function defaultLoad<T>(path: string, signal: AbortSignal): Promise<T> {
  return requestJson<T>(path, { signal });
}
