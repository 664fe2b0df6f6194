/** A run's loss as a small line: read when the row is in view, a few at a time, and kept. */

import { useEffect, useState } from "react";

import { requestJson, runPath, withQuery } from "../api/client.ts";
import type { Run, StepSeries } from "../api/types.ts";
import { plannedSteps } from "../format/steps.ts";
import { sparkPath, type SparkPoints } from "../charts/spark.ts";
import { toNumber } from "../format/number.ts";

const WIDTH = 68;
const HEIGHT = 18;
const POINTS = 34;
const PARALLEL = 3;
const SETTLE_MS = 150;
const KEPT = 500;

interface Entry {
  steps: number;
  points: SparkPoints;
}

const kept = new Map<string, Entry>();
const waiting: (() => Promise<void>)[] = [];
let busy = 0;

function enqueue(task: () => Promise<void>): void {
  waiting.push(task);
  pump();
}

function pump(): void {
  while (busy < PARALLEL) {
    const task = waiting.pop(); // newest first: those are the rows in view
    if (!task) return;
    busy += 1;
    void task().finally(() => {
      busy -= 1;
      pump();
    });
  }
}

async function readPoints(id: string): Promise<SparkPoints> {
  const path = withQuery(runPath(id, "steps"), { max_points: POINTS, fields: "loss" });
  const { series } = await requestJson<StepSeries>(path);
  return { step: series.step, value: (series.loss ?? []).map(toNumber) };
}

function remember(id: string, entry: Entry): void {
  kept.delete(id);
  kept.set(id, entry);
  const oldest = kept.keys().next();
  if (kept.size > KEPT && !oldest.done) kept.delete(oldest.value);
}

export function LossSparkline({ run }: { run: Run }) {
  const total = plannedSteps(run);
  const recorded = run.summary?.steps ?? 0;
  // A live run's line is read again each time another thirtieth of it is there.
  const mark = run.finished_at === null ? Math.floor((recorded * POINTS) / Math.max(total, 1)) : -1;
  const [entry, setEntry] = useState(() => kept.get(run.id));

  useEffect(() => {
    if (recorded === 0) return;
    const known = kept.get(run.id);
    if (known?.steps === recorded) {
      setEntry(known);
      return;
    }
    let isGone = false;
    const timer = setTimeout(() => {
      enqueue(async () => {
        if (isGone) return;
        try {
          const fresh = { steps: recorded, points: await readPoints(run.id) };
          remember(run.id, fresh);
          if (!isGone) setEntry(fresh);
        } catch {
          // A sparkline is a courtesy: the last loss stands beside it.
        }
      });
    }, SETTLE_MS);
    return () => {
      isGone = true;
      clearTimeout(timer);
    };
    // Not on `recorded` itself: that would read a live run's line anew on every step.
  }, [run.id, mark, recorded === 0]);

  if (!entry) return null;
  const path = sparkPath(entry.points, { width: WIDTH, height: HEIGHT, steps: total });
  if (path === null) return null;
  return (
    <svg className="spark" width={WIDTH} height={HEIGHT} aria-hidden="true">
      <path d={path.line} fill="none" stroke="var(--ink-2)" strokeWidth="1.2" strokeLinejoin="round" />
      {run.status === "failed" && (
        <path
          d={`M${path.endX - 2.5} ${path.endY - 2.5}l5 5m0 -5l-5 5`}
          stroke="var(--ink)"
          strokeWidth="1.5"
        />
      )}
    </svg>
  );
}
