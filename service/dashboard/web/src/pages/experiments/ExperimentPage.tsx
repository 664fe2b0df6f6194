/** One experiment: its answer in a sentence, the matrix with live cells, and a pair to look at closer. */

import { useCallback, type ReactNode } from "react";

import { requestJson, requestText, runPath } from "../../api/client.ts";
import { useResource } from "../../api/resource.ts";
import type { Comparison, Experiment, Run } from "../../api/types.ts";
import { Key } from "../../components/controls.tsx";
import { useShortcuts } from "../../components/keyboard.tsx";
import { FinalScale, OrderingMark, SpecValue } from "../../components/marks.tsx";
import { ErrorState, LoadingState } from "../../components/states.tsx";
import { useTitle } from "../../components/title.ts";
import { capitalised } from "../../format/words.ts";
import { copyText, showError, showToast } from "../../components/toast.tsx";
import { formatInteger, formatScalar, plural, toNumber } from "../../format/number.ts";
import { differences } from "../../format/spec.ts";
import { withQuery } from "../../api/client.ts";
import { href, Link, navigate, useQuery } from "../../routing/router.tsx";
import { compareHref } from "../runs/links.ts";
import { useRefreshOnRuns } from "./ExperimentsPage.tsx";
import { buildMatrix, fieldLabel, heldFigures, knownFigures, tally, type Matrix, type MatrixRow, type Tally } from "./matrix.ts";
import { MatrixTable } from "./MatrixTable.tsx";

function experimentPath(id: string, suffix = ""): string {
  return `/experiments/${encodeURIComponent(id)}${suffix}`;
}

export default function ExperimentPage({ id }: { id: string }) {
  const experiment = useResource<Experiment>(experimentPath(id));
  const isMine = useCallback((of: string | null) => of === id, [id]);
  useRefreshOnRuns(experiment.refresh, isMine);
  useTitle(experiment.data?.name ?? "Experiment");
  if (experiment.data === undefined) {
    return (
      <main className="page" id="main" tabIndex={-1}>
        {experiment.error ? (
          <ErrorState
            error={experiment.error}
            onRetry={experiment.refresh}
            elsewhere={{ to: href("/experiments"), label: "All experiments" }}
          />
        ) : (
          <LoadingState what="the experiment" />
        )}
      </main>
    );
  }
  return <ExperimentView experiment={experiment.data} onChanged={experiment.refresh} />;
}

function ExperimentView({ experiment, onChanged }: { experiment: Experiment; onChanged: () => void }) {
  const matrix = buildMatrix(experiment);
  const [rowKey, setRowKey] = useQuery("row");
  const row = matrix.rows.find(({ key }) => key === rowKey) ?? matrix.rows[0];
  const pair = row?.cells.flatMap((cell) => (cell ? [cell.run] : [])) ?? [];
  const isPair = pair.length >= 2;
  const move = (by: number) => {
    const at = matrix.rows.findIndex(({ key }) => key === row?.key);
    const next = matrix.rows[Math.min(Math.max(at + by, 0), matrix.rows.length - 1)];
    if (next) setRowKey(next.key);
  };
  useShortcuts({
    j: () => move(1),
    k: () => move(-1),
    c: () => isPair && navigate(compareHref(pair.map((run) => run.id))),
  });
  return (
    <main className="page narrow" id="main" tabIndex={-1}>
      <nav className="ink-3" aria-label="Breadcrumb">
        <Link to={href("/experiments")}>Experiments</Link> /
      </nav>
      <div className="row wrap-row">
        <h1 className="h1">{experiment.name}</h1>
        <span className="grow" />
        <ExperimentActions experiment={experiment} onChanged={onChanged} />
      </div>
      <Lead tallies={tally(experiment)} experiment={experiment} />
      <div className="experiment-grid">
        <MatrixTable matrix={matrix} selected={row?.key ?? null} onSelect={setRowKey} />
        <aside aria-label="About the selected pair">
          {row && <PairBox row={row} matrix={matrix} pair={pair} />}
          <HowToRead experiment={experiment} known={matrix.known} />
          <SetUp runs={experiment.runs} />
        </aside>
      </div>
    </main>
  );
}

/** What the runs have shown so far, counted; each ordering's own runs, no conclusion beyond them. */
function Lead({ tallies, experiment }: { tallies: Tally[]; experiment: Experiment }) {
  const ended = experiment.runs.filter((run) => run.finished_at !== null).length;
  const checks = experiment.table.published.filter((check) => check !== null);
  const matching = checks.filter((check) => check.matches).length;
  return (
    <p className="lead">
      {tallies.map(({ ordering, died, trained, stopped, total }) => (
        <span key={ordering}>
          With <b>{ordering}</b>,{" "}
          {died > 0 && (
            <>
              <span className="nonfinite">
                {died} of {total}
              </span>{" "}
              {died === 1 ? "dies" : "die"} and{" "}
            </>
          )}
          <b>
            {trained} of {total}
          </b>{" "}
          {trained === 1 ? "trains" : "train"}
          {stopped > 0 && `, and ${stopped} ${stopped === 1 ? "was" : "were"} stopped`}.{" "}
        </span>
      ))}
      {ended < experiment.runs.length && <span className="ink-2">{plural(experiment.runs.length - ended, "run")} to go. </span>}
      {checks.length > 0 && (
        <span className="ink-2">
          {matching} of {checks.length} equal {knownFigures(experiment.table)}
          {heldFigures(experiment.table)}.
        </span>
      )}
    </p>
  );
}

function ExperimentActions({ experiment, onChanged }: { experiment: Experiment; onChanged: () => void }) {
  const missing = experiment.runs.filter((run) => run.status === "stopped" || (run.status === "failed" && run.verdict === null));
  const copy = async () => {
    try {
      await copyText(await requestText(experimentPath(experiment.id, ".md")), "Table copied as Markdown.");
    } catch (error) {
      showError(error);
    }
  };
  const runMissing = async () => {
    const results = await Promise.allSettled(missing.map((run) => requestJson(runPath(run.id, "retry"), { method: "POST" })));
    const failed = results.find((result) => result.status === "rejected");
    if (failed) showError(failed.reason);
    else showToast(`Queued ${plural(missing.length, "run")} again.`);
    onChanged();
  };
  return (
    <div className="row wrap-row">
      {missing.length > 0 && (
        <button type="button" className="btn" onClick={() => void runMissing()}>
          Run missing <span className="ink-3">{missing.length}</span>
        </button>
      )}
      <Link to={href("/runs", { q: `experiment:${experiment.id}` })} className="btn">
        Runs <span className="ink-3">{experiment.runs.length}</span>
      </Link>
      <button type="button" className="btn" onClick={() => void copy()}>
        Copy as Markdown
      </button>
      <a className="btn" href={experimentPath(experiment.id, ".csv")} download={`${experiment.id}.csv`}>
        CSV
      </a>
    </div>
  );
}

function PairBox({ row, matrix, pair }: { row: MatrixRow; matrix: Matrix; pair: Run[] }) {
  const [a, b] = pair;
  const hasSteps = (run: Run | undefined) => (run?.summary?.steps ?? 0) > 0;
  const comparison = useResource<Comparison>(
    a && b && pair.length === 2 && hasSteps(a) && hasSteps(b) ? withQuery("/compare", { a: a.id, b: b.id }) : null,
  );
  return (
    <section className="side-box">
      <h2 className="h2">{pair.length === 2 ? "Selected pair" : `Selected ${pair.length === 1 ? "run" : "runs"}`}</h2>
      <dl className="kv">
        {matrix.fields.map((field, index) => (
          <Entry key={field} label={fieldLabel(field)}>
            <SpecValue path={field} value={row.values[index]} />
          </Entry>
        ))}
        {a && <Entry label="Seed">{sharedSeed(pair, a)}</Entry>}
        {pair.length <= 2 && <PairFigures pair={pair} comparison={comparison.data} />}
      </dl>
      <div className="row side-actions">
        {pair.length >= 2 && (
          <Link to={compareHref(pair.map((run) => run.id))} className="btn primary">
            Compare <Key>C</Key>
          </Link>
        )}
        {pair.map((run) => (
          <Link key={run.id} to={href(`/runs/${run.id}`)} className="btn" aria-label={`Open ${run.name}`}>
            <OrderingMark ordering={run.spec.step_ordering} />
          </Link>
        ))}
      </div>
    </section>
  );
}

function sharedSeed(runs: readonly Run[], { spec }: Run): string {
  if (runs.length === 1) return String(spec.seed);
  return runs.every((run) => run.spec.seed === spec.seed) ? `${spec.seed}, shared` : "differs";
}

/** What a pair shows side by side; of more runs than two the table has these. */
function PairFigures({ pair, comparison }: { pair: Run[]; comparison: Comparison | undefined }) {
  const divergence = comparison?.first_divergence?.step;
  const until = comparison?.bit_equal_until;
  return (
    <>
      {pair.length === 2 && (
        <Entry label="First divergence">
          {divergence !== undefined
            ? `step ${formatInteger(divergence)}`
            : comparison
              ? until === null || until === undefined
                ? "—"
                : `none until ${formatInteger(until)}`
              : "—"}
        </Entry>
      )}
      <Entry label="Overflows">{pair.map((run) => formatInteger(run.summary?.overflows)).join(" / ")}</Entry>
      <Entry label="Scale at end">
        {pair.map((run, index) => (
          <span key={run.id}>
            {index > 0 && " / "}
            <FinalScale run={run} />
          </span>
        ))}
      </Entry>
      <Entry label="Weight motion">
        {pair.map((run) => formatScalar(toNumber(run.summary?.max_weight_motion), 3)).join(" / ")}
      </Entry>
    </>
  );
}

function Entry({ label, children }: { label: string; children: React.ReactNode }) {
  return (
    <>
      <dt>{label}</dt>
      <dd>{children}</dd>
    </>
  );
}

const VERDICTS: [name: string, meaning: string][] = [
  ["dies", "exits with the loss scale at its minimum"],
  ["poisoned", "its momentum is not finite from a step on"],
  ["absorbed", "finite momentum moved on steps that were discarded"],
];

/** Only the words that this experiment's table holds. */
function HowToRead({ experiment, known }: { experiment: Experiment; known: string }) {
  const { runs, table } = experiment;
  const found = VERDICTS.filter(([name]) => runs.some((run) => run.verdict?.name === name));
  return (
    <section className="side-box how">
      <h2 className="h2">How to read</h2>
      <dl className="kv">
        <Entry label="Moved">parameters that changed after initialisation</Entry>
        {found.map(([name, meaning]) => (
          <Entry key={name} label={capitalised(name)}>
            {meaning}
          </Entry>
        ))}
        {table.published.some((check) => check !== null) && <Entry label={`= ${table.check_label}`}>equals {known}
            {heldFigures(table) !== "" && " as named above"}
          </Entry>}
        {runs.some((run) => run.status === "queued") && <Entry label="Queued">no result yet</Entry>}
      </dl>
    </section>
  );
}

/** What the runs share; what they differ in stands in the table. */
function SetUp({ runs }: { runs: readonly Run[] }) {
  const [first] = runs;
  if (first === undefined) return null;
  const { spec } = first;
  const varied = new Set(differences(runs.map((run) => run.spec)).map(({ path }) => path));
  const unless = (path: string, value: ReactNode) => (varied.has(path) ? "varies" : value);
  return (
    <section className="side-box">
      <h2 className="h2">Set-up</h2>
      <dl className="kv">
        <Entry label="Task">{unless("task.name", spec.task.name)}</Entry>
        <Entry label="Optimizer">Muon, lr {unless("optimizer.lr", spec.optimizer.lr)}</Entry>
        <Entry label="Precision">{unless("precision", spec.precision)}</Entry>
        <Entry label="Steps">{unless("steps", formatInteger(spec.steps))}</Entry>
        <Entry label="Ranks">{unless("world_size", spec.world_size)}</Entry>
        <Entry label="Implementation">{unless("implementation", spec.implementation)}</Entry>
      </dl>
    </section>
  );
}
