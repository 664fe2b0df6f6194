/** Several runs, read once each and kept current by the live stream, in the order asked for. */

import { useEffect, useState } from "react";

import { requestJson, runPath, type ApiError } from "../../api/client.ts";
import { live } from "../../api/live.ts";
import { asApiError } from "../../api/resource.ts";
import type { Run } from "../../api/types.ts";

export interface Runs {
  runs: Run[];
  error: ApiError | null;
  isLoading: boolean;
}

export function useRuns(ids: readonly string[]): Runs {
  const [known, setKnown] = useState<ReadonlyMap<string, Run>>(new Map());
  const [error, setError] = useState<ApiError | null>(null);
  const [generation, setGeneration] = useState(0);
  const wanted = ids.join();

  useEffect(() => live.onResync(() => setGeneration((value) => value + 1)), []);
  useEffect(() => {
    const controller = new AbortController();
    setError(null);
    for (const id of wanted.split(",").filter(Boolean)) {
      requestJson<Run>(runPath(id), { signal: controller.signal }).then(
        (run) => setKnown((before) => new Map(before).set(id, run)),
        (reason: unknown) => {
          if (!controller.signal.aborted) setError(asApiError(reason));
        },
      );
    }
    return () => controller.abort();
  }, [wanted, generation]);
  useEffect(
    () =>
      live.onRun((run) => {
        setKnown((before) => (before.has(run.id) ? new Map(before).set(run.id, run) : before));
      }),
    [],
  );

  const runs = ids.flatMap((id) => {
    const run = known.get(id);
    return run ? [run] : [];
  });
  return { runs, error, isLoading: runs.length < ids.length && error === null };
}
