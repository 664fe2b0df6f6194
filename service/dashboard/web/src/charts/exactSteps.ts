/** Steps that sampled traces leave out, read singly once the reader rests on them. */

import { useEffect, useState } from "react";

import { requestJson, runPath, withQuery } from "../api/client.ts";
import type { Step, StepPage } from "../api/types.ts";
import { toNumber } from "../format/number.ts";
import { valueAt, type Field, type Trace } from "./trace.ts";

const PAUSE_MS = 200;
const SAME_READ = 8;

/** A trace's value at a step: of the exact row where one was read, else as drawn. */
export type Reader = (trace: Trace, field: Field, step: number) => number | null;

/** Ranges that hold all of these steps; near ones are read together. */
export function stepRanges(steps: readonly number[]): [number, number][] {
  const ranges: [number, number][] = [];
  for (const step of [...new Set(steps)].sort((a, b) => a - b)) {
    const open = ranges.at(-1);
    if (open && step - open[1] <= SAME_READ) open[1] = step;
    else ranges.push([step, step]);
  }
  return ranges;
}

export function useExactSteps(traces: readonly Trace[], steps: readonly number[]): Reader {
  const [rows, setRows] = useState<ReadonlyMap<string, Step>>(new Map());
  const sampled = traces.filter((trace) => !trace.exact).map((trace) => trace.id);
  const wanted = steps.join();
  useEffect(() => {
    setRows((before) => (before.size === 0 ? before : new Map()));
    if (wanted === "" || sampled.length === 0) return;
    const controller = new AbortController();
    const timer = setTimeout(() => {
      for (const id of sampled) for (const range of stepRanges(steps)) void read(id, range);
    }, PAUSE_MS);
    const read = async (id: string, [first, last]: [number, number]) => {
      const path = withQuery(runPath(id, "steps"), { start: first, stop: last + 1, limit: last - first + 1 });
      try {
        const page = await requestJson<StepPage>(path, { signal: controller.signal });
        setRows((before) => new Map([...before, ...page.steps.map((row) => [`${id} ${row.step}`, row] as const)]));
      } catch {
        // The drawn points stay readable without it.
      }
    };
    return () => {
      clearTimeout(timer);
      controller.abort();
    };
  }, [wanted, sampled.join()]);
  return (trace, field, step) => {
    const row = rows.get(`${trace.id} ${step}`);
    return row ? toNumber(row[field]) : valueAt(trace, field, step);
  };
}
