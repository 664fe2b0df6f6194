/** The run's charts, with the readout, the overflows, the events and the start-up phases beside them. */

import { useMemo } from "react";

import { runPath } from "../../api/client.ts";
import type { Run } from "../../api/types.ts";
import { orderingWords } from "../../format/spec.ts";
import { plannedSteps } from "../../format/steps.ts";
import { ChartStack } from "../../charts/ChartStack.tsx";
import { traceIdentity } from "../../charts/identity.ts";
import { OverflowTable } from "../../charts/OverflowTable.tsx";
import { panelsFor } from "../../charts/panels.ts";
import { Readout } from "../../charts/Readout.tsx";
import { around, setWindow, useChartState, useWindow } from "../../charts/useChartState.ts";
import { useTraces } from "../../charts/useTraces.ts";
import { Key, Segments } from "../../components/controls.tsx";
import { EmptyState, ErrorState, LoadingState } from "../../components/states.tsx";
import { formatInteger } from "../../format/number.ts";
import { TERMINAL } from "../../format/words.ts";
import { useQuery } from "../../routing/router.tsx";
import { poisonedSince } from "../runs/columns.tsx";
import { EventList } from "./EventList.tsx";
import { loadPanels } from "./load.ts";
import { LoadBox } from "./LoadBox.tsx";
import { PhaseTimeline } from "./PhaseTimeline.tsx";
import { useLoad } from "./useLoad.ts";

const LAST_STEPS = 5000;

export function StepsView({ run }: { run: Run }) {
  const window = useWindow();
  const identity = traceIdentity(run, orderingWords(run.spec));
  const identityKey = JSON.stringify(identity);
  const requests = useMemo(() => [{ identity, run }], [identityKey, run]);
  const { traces, error, isLoading } = useTraces(requests, window);
  const trace = traces[0];
  const landmark = poisonedSince(run) ?? trace?.overflow[0]?.[0] ?? null;
  const chart = useChartState(traces, plannedSteps(run), landmark);
  const recorded = run.summary?.steps ?? 0;
  const load = useLoad(run);
  const [hidden, setHidden] = useQuery("load");
  const panels = useMemo(
    () => (load.clock === null || hidden === "off" ? [] : loadPanels(load.samples, load.clock)),
    [load.samples, load.clock, hidden],
  );

  if (error && traces.length === 0) return <ErrorState error={error} />;
  const hasSteps = trace !== undefined && trace.last >= 0;
  const view = chart.window === null ? "all" : "part";

  return (
    <div className="with-aside">
      <div>
        <div className="tool">
          <Segments
            label="Steps shown"
            value={view}
            options={[
              { value: "all", label: "All" },
              { value: "landmark", label: "Overflow" },
              { value: "last", label: "Last 5k" },
            ].filter(({ value }) => (value === "landmark" ? landmark !== null : value !== "last" || recorded > LAST_STEPS))}
            onChange={(value) => {
              if (value === "landmark" && landmark !== null) setWindow(around(landmark));
              else if (value === "last") setWindow([Math.max(recorded - LAST_STEPS, 0), recorded]);
              else setWindow(null);
            }}
          />
          {load.samples.length > 0 && (
            <button
              type="button"
              className="btn"
              aria-pressed={hidden !== "off"}
              onClick={() => setHidden(hidden === "off" ? null : "off")}
            >
              System load
            </button>
          )}
          <span className="grow" />
          <span className="label">{hasSteps && rangeWords(chart.range, trace.last, trace.exact)}</span>
        </div>
        {hasSteps ? (
          <ChartStack
            traces={traces}
            panels={panelsFor(traces)}
            more={panels}
            range={chart.range}
            locked={chart.locked}
            onHover={chart.onHover}
            onLock={chart.onLock}
            onRange={chart.onRange}
          />
        ) : isLoading ? (
          <LoadingState what="the steps" />
        ) : (
          <NoSteps ended={TERMINAL.has(run.status) ? 1 : 0} />
        )}
      </div>
      <aside aria-label="Details">
        {hasSteps && <Readout traces={traces} step={chart.shown} isLocked={chart.locked !== null} />}
        {hasSteps && <OverflowTable traces={traces} locked={chart.locked} onLock={chart.onLock} />}
        {load.samples.length > 0 && hidden !== "off" && (
          <LoadBox samples={load.samples} clock={load.clock} step={chart.locked ?? chart.pointed} />
        )}
        <EventList path={runPath(run.id, "events")} mark={`${run.status} ${run.attempts?.length ?? 0}`} />
        <PhaseTimeline attempt={run.attempts?.at(-1)} />
        {hasSteps && (
          <p className="ink-3 hint-line keys-only">
            <Key>J</Key> <Key>K</Key> overflows, <Key>D</Key> first of them, <Key>L</Key> lock; drag to zoom, double-click
            for all.
          </p>
        )}
      </aside>
    </div>
  );
}

/** What stands where charts would, of runs without a step: all of them have ended so, or one may still come. */
export function NoSteps({ ended }: { ended: number }) {
  const why = `${ended === 1 ? "This run" : "These runs"} ended before the first step; logs and attempts say why.`;
  return (
    <div className="card">
      <EmptyState title={ended > 0 ? "No steps recorded" : "No steps recorded yet"}>
        <p>{ended > 0 ? why : "Charts begin with the first step."}</p>
      </EmptyState>
    </div>
  );
}

export function rangeWords(range: readonly [number, number], last: number, isExact: boolean): string {
  const from = Math.max(Math.ceil(range[0]), 0);
  const to = Math.min(Math.floor(range[1]), Math.max(last, 0));
  const drawn = isExact ? "every step drawn" : "sampled; overflows and non-finite steps exact";
  return `Steps ${formatInteger(from)} – ${formatInteger(to)} of ${formatInteger(last + 1)} · ${drawn}`;
}
