/**
 * Keep the traces of some runs current: read them once, append what arrives while they are short enough to be exact,
 * read them again (at a calmer pace) when they are long, and read a part anew when the reader zooms into it.
 */

import { useEffect, useMemo, useRef, useState } from "react";

import { requestJson, runPath, withQuery, type ApiError } from "../api/client.ts";
import { live } from "../api/live.ts";
import { asApiError } from "../api/resource.ts";
import type { Run, StepPage, StepSeries } from "../api/types.ts";
import { appendSteps, FIELDS, readTrace, type Trace, type TraceIdentity } from "./trace.ts";

const MAX_POINTS = 4000;
const APPEND_LIMIT = 1000;
const APPEND_MS = 250;
const REREAD_MS = 2000;

export interface TraceRequest {
  identity: TraceIdentity;
  run: Run;
}

interface Held {
  /** What was asked for: an attempt's record, a window, a read. Traces of another key are not appended to. */
  key: string;
  trace: Trace;
}

export interface Traces {
  traces: Trace[];
  error: ApiError | null;
  isLoading: boolean;
}

type Window = readonly [number, number] | null;

function keyOf(run: Run, window: Window, generation: number): string {
  const attempt = run.attempts?.at(-1)?.number ?? 0;
  return [run.id, attempt, window?.join("-") ?? "all", generation].join(" ");
}

async function readSeries(request: TraceRequest, window: Window, signal?: AbortSignal): Promise<Trace> {
  const path = withQuery(runPath(request.run.id, "steps"), {
    max_points: MAX_POINTS,
    fields: FIELDS.join(),
    start: window === null ? null : Math.max(window[0], 0),
    stop: window === null ? null : window[1] + 1,
  });
  return readTrace(request.identity, await requestJson<StepSeries>(path, { signal }));
}

/** Whether what is held can grow by single steps: it is exact, up to the end, and short. */
function canAppend(held: Held | undefined, window: Window): held is Held {
  return held !== undefined && window === null && held.trace.exact && held.trace.step.length < MAX_POINTS;
}

export function useTraces(requests: readonly TraceRequest[], window: Window): Traces {
  const [held, setHeld] = useState<ReadonlyMap<string, Held>>(new Map());
  const [error, setError] = useState<ApiError | null>(null);
  const [generation, setGeneration] = useState(0);
  const latest = useRef({ held, requests });
  latest.current = { held, requests };
  const scheduled = useRef(false);
  const timer = useRef<ReturnType<typeof setTimeout>>(undefined);

  useEffect(() => live.onResync(() => setGeneration((value) => value + 1)), []);

  const keys = requests.map(({ run }) => keyOf(run, window, generation)).join();
  useEffect(() => {
    const controller = new AbortController();
    for (const request of latest.current.requests) {
      const key = keyOf(request.run, window, generation);
      readSeries(request, window, controller.signal).then(
        (trace) => {
          if (controller.signal.aborted) return;
          setError(null);
          setHeld((before) => new Map(before).set(request.run.id, { key, trace }));
        },
        (reason: unknown) => {
          if (!controller.signal.aborted) setError(asApiError(reason));
        },
      );
    }
    return () => controller.abort();
    // `keys` names everything that is read here; the runs themselves change with every step.
  }, [keys]);

  // Follow what is recorded after the first read.
  const recorded = requests.map(({ run }) => run.summary?.steps ?? 0).join();
  useEffect(() => {
    const behind = latest.current.requests.filter(({ run }) => {
      const known = latest.current.held.get(run.id);
      return known !== undefined && window === null && (run.summary?.steps ?? 0) > known.trace.last + 1;
    });
    if (behind.length === 0) return;
    const grows = behind.every(({ run }) => canAppend(latest.current.held.get(run.id), window));
    if (scheduled.current) return;
    scheduled.current = true;
    timer.current = setTimeout(
      () => {
        for (const request of behind) void follow(request);
      },
      grows ? APPEND_MS : REREAD_MS,
    );
    const follow = async (request: TraceRequest) => {
      const id = request.run.id;
      const known = latest.current.held.get(id);
      try {
        if (!known) return;
        const next = canAppend(known, window) ? await readFollowing(known.trace) : await readSeries(request, window);
        setHeld((before) => {
          // Nothing new, or another read replaced what this one continues.
          if (next === known.trace || before.get(id)?.key !== known.key) return before;
          return new Map(before).set(id, { ...known, trace: next });
        });
      } catch (reason) {
        setError(asApiError(reason));
      } finally {
        scheduled.current = false;
      }
    };
    // Not cleared when the next step arrives: a run faster than the pause would never be followed.
  }, [recorded, keys, held]);
  useEffect(() => () => clearTimeout(timer.current), []);

  const identities = requests.map(({ identity }) => JSON.stringify(identity)).join();
  const traces = useMemo(
    () =>
      requests.flatMap(({ identity, run }) => {
        const known = held.get(run.id);
        return known ? [{ ...known.trace, ...identity }] : [];
      }),
    // The runs change with every step; what is drawn changes with what is held and how it is named.
    [held, identities],
  );
  return { traces, error, isLoading: traces.length < requests.length && error === null };
}

async function readFollowing(trace: Trace): Promise<Trace> {
  const path = withQuery(runPath(trace.id, "steps"), { start: trace.last + 1, limit: APPEND_LIMIT });
  const page = await requestJson<StepPage>(path);
  return appendSteps(trace, page.steps);
}
