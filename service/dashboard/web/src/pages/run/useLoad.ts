/** The newest attempt's load samples, read once and then followed while it lives, with the clock of its steps. */

import { useEffect, useMemo, useRef, useState } from "react";

import { requestJson, runPath, withQuery } from "../../api/client.ts";
import type { LoadPage, LoadSample, Run, StepSeries } from "../../api/types.ts";
import { TERMINAL } from "../../format/words.ts";
import { readStepTimes, stepClock, type StepClock, type StepTimes } from "./load.ts";

/** Samples come every 5 s. */
const FOLLOW_MS = 5000;
const PAGE = 10_000;

export interface Load {
  samples: readonly LoadSample[];
  clock: StepClock | null;
}

async function readSamples(run: Run, attempt: number, after: number, signal: AbortSignal): Promise<LoadSample[]> {
  const samples: LoadSample[] = [];
  let next: number | null = after;
  while (next !== null) {
    const path: string = withQuery(runPath(run.id, "load"), { attempt, after: next, limit: PAGE });
    const page: LoadPage = await requestJson<LoadPage>(path, { signal });
    samples.push(...page.samples);
    next = page.next_after;
  }
  return samples;
}

async function readTimes(run: Run, signal: AbortSignal): Promise<StepTimes> {
  const path = withQuery(runPath(run.id, "steps"), { fields: "step_time_s", max_points: 4000 });
  return readStepTimes(await requestJson<StepSeries>(path, { signal }));
}

interface Held {
  samples: readonly LoadSample[];
  times: StepTimes | null;
}

export function useLoad(run: Run): Load {
  const attempt = run.attempts?.at(-1);
  const number = attempt?.number;
  const [held, setHeld] = useState<Held>({ samples: [], times: null });
  const latest = useRef({ run, held });
  latest.current = { run, held };
  const isLive = !TERMINAL.has(run.status);

  useEffect(() => {
    if (number === undefined) return;
    const controller = new AbortController();
    let timer: ReturnType<typeof setTimeout> | undefined;
    const read = async (before: readonly LoadSample[]) => {
      let samples = before;
      try {
        const { signal } = controller;
        const fresh = await readSamples(latest.current.run, number, before.at(-1)?.at ?? 0, signal);
        if (fresh.length > 0 || latest.current.held.times === null) {
          samples = [...before, ...fresh];
          setHeld({ samples, times: await readTimes(latest.current.run, signal) });
        }
      } catch {
        // The charts stay readable without it; the banner says when the service is away.
      }
      if (isLive && !controller.signal.aborted) timer = setTimeout(() => void read(samples), FOLLOW_MS);
    };
    void read([]);
    return () => {
      clearTimeout(timer);
      controller.abort();
    };
  }, [run.id, number, isLive]);

  const clock = useMemo(() => {
    if (attempt === undefined || held.times === null) return null;
    const end = attempt.finished_at === null ? held.samples.at(-1)?.at : Date.parse(attempt.finished_at) / 1000;
    return stepClock(attempt, held.times, end ?? 0);
  }, [attempt, held]);
  return { samples: held.samples, clock };
}
