/** All experiments, newest first, and the built-in ones to run. */

import { useEffect, useState } from "react";

import { requestJson } from "../../api/client.ts";
import { live } from "../../api/live.ts";
import { useResource } from "../../api/resource.ts";
import type { Experiment } from "../../api/types.ts";
import { ProgressBar } from "../../components/marks.tsx";
import { EmptyState, ErrorState, LoadingState } from "../../components/states.tsx";
import { Ago } from "../../components/time.tsx";
import { useTitle } from "../../components/title.ts";
import { showError } from "../../components/toast.tsx";
import { href, Link, navigate } from "../../routing/router.tsx";
import { OrderingGlyph } from "../../components/marks.tsx";
import { tally } from "./matrix.ts";

const REREAD_MS = 1000;

const BUILT_IN = [
  ["thirty-step", "Stage × initial scale × ordering on one fixed batch: the published table. Eight runs, a minute on a CPU."],
  ["byte-gpt", "A small GPT on bytes of real text, both orderings, at a high and at a calm initial scale."],
  ["calm-boom", "One matrix overflows on step 1 and the other stays finite: what each leaves in its momentum."],
  ["mixed-overflow", "The same matrices under every ordering of both implementations. Thirteen short runs."],
  ["gradient-accumulation", "One batch as four micro-batches at ZeRO stage 3: how often Newton-Schulz runs, and how far apart they end."],
  ["scale-change", "A halving, a sixteenfold drop and a growth of the loss scale, against the run at a fixed scale."],
  ["dtype-assertion", "The assertion that passes with no training: it compares with the model before its cast."],
  ["published-tables", "Every table above but calm-boom's and byte-gpt's, each row beside its known figure. Forty-five runs."],
] as const;

export function experimentHref(id: string): string {
  return href(`/experiments/${encodeURIComponent(id)}`);
}

/** Call `refresh` after live changes, at most once a second. */
export function useRefreshOnRuns(refresh: () => void, isWanted: (experimentId: string | null) => boolean): void {
  useEffect(() => {
    let timer: ReturnType<typeof setTimeout> | undefined;
    const stop = live.onRun((run) => {
      if (!isWanted(run.experiment_id)) return;
      timer ??= setTimeout(() => {
        timer = undefined;
        refresh();
      }, REREAD_MS);
    });
    return () => {
      stop();
      clearTimeout(timer);
    };
  }, [refresh, isWanted]);
}

const isOfAny = (id: string | null) => id !== null;

export default function ExperimentsPage() {
  useTitle("Experiments");
  const list = useResource<{ experiments: Experiment[] }>("/experiments");
  useRefreshOnRuns(list.refresh, isOfAny);
  const experiments = list.data?.experiments ?? [];
  return (
    <main className="page narrow" id="main" tabIndex={-1}>
      <h1 className="h1">Experiments</h1>
      {list.isLoading ? (
        <LoadingState what="experiments" />
      ) : list.error && !list.data ? (
        <ErrorState error={list.error} onRetry={list.refresh} />
      ) : experiments.length === 0 ? (
        <EmptyState title="No experiments yet">
          <p>An experiment is a question and the runs that answer it. Begin with one whose answer is published.</p>
        </EmptyState>
      ) : (
        <ul className="experiment-list">
          {experiments.map((experiment) => (
            <li key={experiment.id}>
              <ExperimentRow experiment={experiment} />
            </li>
          ))}
        </ul>
      )}
      <h2 className="h2 section-title">Built in</h2>
      <ul className="builtin-list">
        {BUILT_IN.map(([name, about]) => (
          <li key={name} className="card">
            <h3 className="mono">{name}</h3>
            <p className="ink-2">{about}</p>
            <RunBuiltin name={name} />
          </li>
        ))}
      </ul>
    </main>
  );
}

function ExperimentRow({ experiment }: { experiment: Experiment }) {
  const ended = experiment.runs.filter((run) => run.finished_at !== null).length;
  const total = experiment.runs.length;
  return (
    <Link to={experimentHref(experiment.id)} className="card experiment-row">
      <span className="title">{experiment.name}</span>
      {experiment.builtin !== null && experiment.builtin !== experiment.name && <code className="ink-3">{experiment.builtin}</code>}
      <span className="grow" />
      <span className="row ink-2 num">
        {tally(experiment).map(({ ordering, trained, stopped, total: of }) => (
          <span key={ordering} className="ordering">
            <OrderingGlyph ordering={ordering} /> {ordering} {trained}/{of} train{stopped > 0 && `, ${stopped} stopped`}
          </span>
        ))}
      </span>
      <span className="num ink-2">
        {ended} of {total}
      </span>
      <ProgressBar share={total === 0 ? 0 : ended / total} width={72} label={`${experiment.name}: runs ended`} />
      <span className="ink-3 num when">
        <Ago at={experiment.created_at} />
      </span>
    </Link>
  );
}

function RunBuiltin({ name }: { name: string }) {
  const [isBusy, setIsBusy] = useState(false);
  const submit = async () => {
    setIsBusy(true);
    try {
      const made = await requestJson<Experiment>("/experiments", { method: "POST", body: { builtin: name } });
      navigate(experimentHref(made.id));
    } catch (error) {
      showError(error);
      setIsBusy(false);
    }
  };
  return (
    <button type="button" className="btn" disabled={isBusy} onClick={() => void submit()}>
      Run {name}
    </button>
  );
}
