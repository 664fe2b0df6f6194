/** Runs against each other: where they first differ, what each made of it, and every step of both. */

import { useEffect, useMemo, useRef, useState } from "react";

import { runPath, withQuery } from "../../api/client.ts";
import type { Run } from "../../api/types.ts";
import { plannedSteps } from "../../format/steps.ts";
import { ChartStack } from "../../charts/ChartStack.tsx";
import { downloadPng } from "../../charts/exportPng.ts";
import { sharedWords, traceDashes, traceIdentity, traceLabels } from "../../charts/identity.ts";
import { OverflowTable } from "../../charts/OverflowTable.tsx";
import { panelsFor } from "../../charts/panels.ts";
import { Readout } from "../../charts/Readout.tsx";
import { overAppliedSteps } from "../../charts/trace.ts";
import { around, setWindow, useChartState, useWindow } from "../../charts/useChartState.ts";
import { useTraces } from "../../charts/useTraces.ts";
import { Key, Menu, Segments } from "../../components/controls.tsx";
import { Sentence } from "../../components/marks.tsx";
import { EmptyState, ErrorState, LoadingState } from "../../components/states.tsx";
import { useTitle } from "../../components/title.ts";
import { copyText } from "../../components/toast.tsx";
import { TERMINAL } from "../../format/words.ts";
import { describeShared } from "../../format/spec.ts";
import { changeQuery, href, Link, navigate, usePlace } from "../../routing/router.tsx";
import { NoSteps, rangeWords } from "../run/StepsView.tsx";
import { compareHref } from "../runs/links.ts";
import { CompareCard } from "./CompareCard.tsx";
import { ConfigDifference, CostBox, LossBox } from "./DifferenceBoxes.tsx";
import { Finding } from "./Finding.tsx";
import { quantities, unlike } from "./notes.ts";
import { landmarks, useComparisons } from "./useComparisons.ts";
import { useRuns } from "./useRuns.ts";

const LETTERS = "abcdefgh";
const LAST_STEPS = 5000;
const MOST_BESIDE = 3;

/** The runs that the address names: `?a=…&b=…`, up to eight. */
export function readIds(query: URLSearchParams): string[] {
  return [...LETTERS].flatMap((letter) => query.get(letter) ?? []).filter((id) => id !== "");
}

export default function ComparePage() {
  const { query } = usePlace();
  const text = readIds(query).join();
  const ids = useMemo(() => text.split(",").filter(Boolean), [text]);
  const { runs, error } = useRuns(ids);
  useTitle(runs.length > 0 ? runs.map((run) => run.name).join(" vs ") : "Compare");

  if (ids.length < 2) return <NothingChosen />;
  if (runs.length < ids.length) {
    return (
      <main className="page" id="main" tabIndex={-1}>
        {error ? <ErrorState error={error} elsewhere={{ to: href("/runs"), label: "All runs" }} /> : <LoadingState what="the runs" />}
      </main>
    );
  }
  return <Compared runs={runs} ids={ids} />;
}

function NothingChosen() {
  return (
    <main className="page" id="main" tabIndex={-1}>
      <EmptyState title="Choose two runs or more">
        <p>
          Tick their boxes in the run table, then choose Compare
          <span className="keys-only">
            ; or <Key>x</Key> and <Key>c</Key> from the keyboard
          </span>
          .
        </p>
        <Link to={href("/runs")} className="btn primary">
          All runs
        </Link>
      </EmptyState>
    </main>
  );
}

function Compared({ runs, ids }: { runs: Run[]; ids: string[] }) {
  const { query } = usePlace();
  const isApplied = query.get("x") === "applied";
  const smoothing = Math.min(Math.max(Number(query.get("smooth") ?? 0) || 0, 0), 0.99);
  const window = useWindow();
  const comparisons = useComparisons(runs);
  const stack = useRef<HTMLDivElement>(null);

  const labels = traceLabels(runs);
  const dashes = traceDashes(runs);
  const recorded = quantities(comparisons.each);
  const identities = runs.map((run, index) => traceIdentity(run, labels[index] ?? run.name, dashes[index], recorded[index]));
  const identityKey = JSON.stringify(identities);
  const requests = useMemo(
    () => runs.flatMap((run, index) => ({ run, identity: identities[index] ?? traceIdentity(run, run.name) })),
    [identityKey, runs],
  );
  const { traces, error, isLoading } = useTraces(requests, isApplied ? null : window);
  const drawn = useMemo(() => (isApplied ? traces.map(overAppliedSteps) : traces), [traces, isApplied]);
  const panels = useMemo(() => panelsFor(drawn), [drawn]);
  const { divergence, landmark } = landmarks(comparisons.each);
  const [first] = comparisons.each;
  const planned = Math.max(...runs.map((run) => plannedSteps(run)));
  const chart = useChartState(drawn, planned, landmark);
  const hasSteps = traces.some((trace) => trace.last >= 0);
  const last = Math.max(0, ...traces.map((trace) => trace.last));

  const zoom = () => {
    if (landmark === null) return;
    changeQuery({ x: null });
    setWindow(around(landmark));
  };
  const zoomValue = window === null ? "all" : landmark !== null && String(window) === String(around(landmark)) ? "divergence" : "";

  // A column a run: more of them than the aside has room for stand over the charts.
  const isWide = runs.length > MOST_BESIDE;
  const readout = (
    <Readout
      traces={drawn}
      step={chart.shown}
      isLocked={chart.locked !== null}
      unlike={first === undefined ? null : unlike(first, labels[0] ?? "A", labels[1] ?? "B")}
    />
  );

  return (
    <main className="page" id="main" tabIndex={-1}>
      <div className="row wrap-row compare-title">
        <h1 className="h1">
          <Title runs={runs} />
        </h1>
        <span className="ink-3">
          <Sentence text={describeShared(runs.map((run) => run.spec))} />
        </span>
        <span className="grow" />
        <CompareActions runs={runs} ids={ids} stack={stack} />
      </div>
      <div className="compare-cards">
        {runs.map((run, index) => (
          <CompareCard key={run.id} run={run} label={labels[index] ?? run.name} dash={dashes[index]} />
        ))}
      </div>
      <Finding comparisons={comparisons} runs={runs} labels={labels} dashes={dashes} onZoom={landmark === null ? null : zoom} />
      {isWide && hasSteps && <div className="wide-readout">{readout}</div>}
      <div className={isWide ? "with-aside below" : "with-aside"}>
        <div>
          <div className="tool">
            {hasSteps && (
              <>
                <Segments
                  label="Axis"
                  value={isApplied ? "applied" : "attempted"}
                  options={[
                    { value: "attempted", label: "Attempted" },
                    { value: "applied", label: "Applied" },
                  ]}
                  onChange={(value) => changeQuery({ x: value === "applied" ? value : null, step: null, from: null, to: null })}
                />
                <Segments
                  label="Steps shown"
                  value={zoomValue}
                  options={[
                    { value: "all", label: "All" },
                    ...(landmark === null || isApplied ? [] : [{ value: "divergence", label: "Divergence" }]),
                    ...(last > LAST_STEPS ? [{ value: "last", label: "Last 5k" }] : []),
                  ]}
                  onChange={(value) => {
                    if (value === "divergence") zoom();
                    else setWindow(value === "last" ? [last - LAST_STEPS, last] : null);
                  }}
                />
                <SmoothSlider value={smoothing} />
                <span className="grow" />
                <span className="label">
                  {traces.length > 0 && rangeWords(chart.range, Math.max(...drawn.map((trace) => trace.last)), traces.every((trace) => trace.exact))}
                </span>
              </>
            )}
          </div>
          {error && traces.length === 0 ? (
            <ErrorState error={error} />
          ) : isLoading ? (
            <LoadingState what="the steps" />
          ) : !hasSteps ? (
            <NoSteps ended={runs.every((run) => TERMINAL.has(run.status)) ? runs.length : 0} />
          ) : (
            <div ref={stack}>
              <ChartStack
                traces={drawn}
                panels={panels}
                range={chart.range}
                divergence={isApplied ? null : divergence}
                locked={chart.locked}
                smoothing={smoothing}
                axisLabel={isApplied ? "applied steps" : undefined}
                onHover={chart.onHover}
                onLock={chart.onLock}
                onRange={chart.onRange}
              />
            </div>
          )}
        </div>
        <aside aria-label="Details">
          {!isWide && hasSteps && readout}
          {!isApplied && hasSteps && <OverflowTable traces={traces} locked={chart.locked} onLock={chart.onLock} />}
          <ConfigDifference runs={runs} labels={labels} />
          <LossBox each={comparisons.each} runs={runs} labels={labels} />
          <CostBox each={comparisons.each} runs={runs} labels={labels} />
        </aside>
      </div>
    </main>
  );
}

/** Two names in full; of more runs what all names begin with once, then what tells each apart. */
function Title({ runs }: { runs: readonly Run[] }) {
  const names = runs.map((run) => run.name);
  const { shared, rest } = runs.length > 2 ? sharedWords(names) : { shared: "", rest: names };
  return (
    <>
      {shared !== "" && <span className="title-part">{shared}: </span>}
      {runs.map((run, index) => (
        <span key={run.id} className="title-part">
          {index > 0 && <span className="ink-3"> vs </span>}
          <b>{rest[index]}</b>
        </span>
      ))}
    </>
  );
}

function SmoothSlider({ value }: { value: number }) {
  const [shown, setShown] = useState(value);
  useEffect(() => setShown(value), [value]);
  return (
    <label className="smooth">
      <span className="label">Smooth</span>
      <input
        type="range"
        min={0}
        max={0.98}
        step={0.02}
        value={shown}
        onChange={(event) => {
          setShown(Number(event.target.value));
          changeQuery({ smooth: Number(event.target.value) === 0 ? null : event.target.value });
        }}
      />
      <span className="num">{shown.toFixed(2)}</span>
      {shown > 0 && <span className="ink-3">The raw line stays beneath</span>}
    </label>
  );
}

interface ActionProps {
  runs: readonly Run[];
  ids: string[];
  stack: React.RefObject<HTMLDivElement | null>;
}

function CompareActions({ runs, ids, stack }: ActionProps) {
  return (
    <div className="row wrap-row">
      <button type="button" className="btn" onClick={() => navigate(compareHref([...ids].reverse()), { replace: true })}>
        Swap
      </button>
      <Link to={href("/runs", { selected: ids.join() })} className="btn">
        Add run
      </Link>
      <button type="button" className="btn" onClick={() => void copyText(globalThis.location.href, "Link copied.")}>
        Copy link
      </button>
      <Menu
        label={
          <>
            Export <span className="ink-3">CSV · PNG</span>
          </>
        }
      >
        {(close) => (
          <>
            {runs.map((run) => (
              <a key={run.id} href={withQuery(runPath(run.id, "steps"), { format: "csv" })} download={`${run.id}-steps.csv`} onClick={close}>
                {run.name} <span className="hint">CSV, every step</span>
              </a>
            ))}
            <button
              type="button"
              onClick={() => {
                if (stack.current) downloadPng(stack.current, `compare-${ids.join("-")}.png`);
                close();
              }}
            >
              Charts <span className="hint">PNG</span>
            </button>
          </>
        )}
      </Menu>
    </div>
  );
}
