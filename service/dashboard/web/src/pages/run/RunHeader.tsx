/** A run's name, standing, verdict and its evidence, its figures, and what can be done with it. */

import { requestJson, runPath, withQuery } from "../../api/client.ts";
import { useResource } from "../../api/resource.ts";
import type { Run, RunPage } from "../../api/types.ts";
import { plannedSteps } from "../../format/steps.ts";
import { ConfirmButton, Key } from "../../components/controls.tsx";
import { FailureText } from "../../components/FailureText.tsx";
import { useShortcuts } from "../../components/keyboard.tsx";
import { FinalScale, OrderingMark, ProgressBar, Scalar, Sentence, StatusMark, VerdictChip } from "../../components/marks.tsx";
import { Elapsed, useNow } from "../../components/time.tsx";
import { showError, showToast } from "../../components/toast.tsx";
import { formatInteger, formatLoss, formatScalar, toNumber } from "../../format/number.ts";
import { canRetry, describeSpec, isRecording, orderingWords, sharedWithPair } from "../../format/spec.ts";
import { formatDuration } from "../../format/time.ts";
import { capitalised, TERMINAL, words } from "../../format/words.ts";
import { href, Link, navigate } from "../../routing/router.tsx";
import { MomentumCell, poisonedSince, runShare } from "../runs/columns.tsx";
import { compareHref } from "../runs/links.ts";

interface Props {
  run: Run;
  onChanged: () => void;
}

export function RunHeader({ run, onChanged }: Props) {
  return (
    <>
      <div className="row wrap-row run-title">
        <h1 className="h1">{run.name}</h1>
        <span className="ink-3"><Sentence text={describeSpec(run.spec)} /></span>
        {hardwareLabels(run).map((label) => (
          <span key={label} className="chip mild" title="What this run's hardware is not">
            {label}
          </span>
        ))}
        <span className="grow" />
        <RunActions run={run} onChanged={onChanged} />
      </div>
      <div className="card run-card-head">
        <OrderingMark ordering={orderingWords(run.spec)} />
        <VerdictChip verdict={run.verdict} />
        <StatusMark status={run.status} share={runShare(run)} />
        <Progress run={run} />
        <Figures run={run} />
      </div>
      <Evidence run={run} />
    </>
  );
}

/** What the newest attempt emulates, such as `fp16 emulated on CPU`: its numbers are fp16's, its times no GPU's. */
function hardwareLabels(run: Run): string[] {
  const labels = run.attempts?.at(-1)?.environment.labels;
  return Array.isArray(labels) ? labels.map(String) : [];
}

function Progress({ run }: { run: Run }) {
  const now = useNow();
  const steps = run.summary?.steps ?? 0;
  const total = plannedSteps(run);
  if (run.status === "queued") {
    return <span className="ink-3">{run.queue_position === null ? "" : `number ${run.queue_position} in the queue`}</span>;
  }
  const firstStep = run.attempts?.at(-1)?.phases.first_step;
  const passed = firstStep === undefined ? null : now - firstStep * 1000;
  const left = run.status === "running" && passed !== null && steps > 1 ? (passed / steps) * (total - steps) : null;
  return (
    <span className="row num ink-2">
      <ProgressBar share={runShare(run)} width={72} label="Steps recorded" />
      <span>
        {formatInteger(steps)} of {formatInteger(total)}
      </span>
      {run.started_at !== null && (
        <span className="ink-3">
          <Elapsed started={run.started_at} finished={run.finished_at} />
          {left !== null && ` · about ${formatDuration(left)} left`}
        </span>
      )}
    </span>
  );
}

function Figures({ run }: { run: Run }) {
  const summary = run.summary;
  if (summary === null || !summary.steps) return null;
  const moved =
    summary.parameters_moved === null || summary.parameters_total === null
      ? null
      : `${summary.parameters_moved}/${summary.parameters_total}`;
  return (
    <dl className="figures">
      <Figure label="Overflows">{formatInteger(summary.overflows)}</Figure>
      <Figure label="Discarded">{formatInteger(summary.discarded)}</Figure>
      <Figure label={run.finished_at === null ? "Scale" : "Scale at end"}>
        <FinalScale run={run} />
      </Figure>
      <Figure label="Last loss" title="of the last attempted step, applied or discarded">
        <Scalar value={toNumber(summary.last_loss)} format={formatLoss} />
      </Figure>
      <Figure label="Momentum">
        <MomentumCell run={run} />
      </Figure>
      {moved !== null && <Figure label="Moved">{moved}</Figure>}
      {summary.max_weight_motion !== null && (
        <Figure label="Weight motion">
          <Scalar value={toNumber(summary.max_weight_motion)} format={(value) => formatScalar(value, 3)} />
        </Figure>
      )}
    </dl>
  );
}

export function Figure({ label, title, children }: { label: string; title?: string; children: React.ReactNode }) {
  return (
    <div title={title}>
      <dt className="label">{label}</dt>
      <dd>{children}</dd>
    </div>
  );
}

/** The verdict's evidence, as the service words it, with the lesser findings after it. */
function Evidence({ run }: { run: Run }) {
  if (run.status === "queued") {
    const reason = run.waiting_reason ?? "The scheduler has not looked at this run yet.";
    return (
      <div className="finding">
        <p>
          <b>Waiting.</b> <span className="ink-2">{reason}</span>
        </p>
      </div>
    );
  }
  const others = run.findings.filter((finding) => finding.name !== run.verdict?.name && finding.evidence);
  const failure = run.failure;
  if (run.verdict === null && failure === null && others.length === 0) return null;
  return (
    <div className={poisonedSince(run) === null ? "finding" : "finding nonfinite-edge"}>
      <div>
        {run.verdict !== null && (
          <p>
            <b>{verdictHeadline(run)}</b> <span className="ink-2"><Sentence text={run.verdict.evidence ?? ""} /></span>
          </p>
        )}
        {others.map((finding) => (
          <p key={finding.name} className="ink-2">
            <span className="strong">{capitalised(words(finding.name))}.</span> <Sentence text={finding.evidence ?? ""} />
          </p>
        ))}
        {failure !== null && failure.kind !== "loss_scale_exhausted" && (
          <div className="failure">
            <b>{words(failure.kind)}</b>
            {failure.rank !== null && ` on rank ${failure.rank}`}
            {failure.message && <FailureText message={failure.message} />}
          </div>
        )}
      </div>
    </div>
  );
}

function verdictHeadline({ verdict }: Run): string {
  if (verdict === null) return "";
  const where = verdict.step === null ? "" : ` at step ${formatInteger(verdict.step)}`;
  return `${capitalised(words(verdict.name))}${where}.`;
}

function RunActions({ run, onChanged }: Props) {
  const isOver = TERMINAL.has(run.status);
  const isRecorded = isRecording(run.spec);
  const command = async (name: "stop" | "retry", notice: string) => {
    try {
      await requestJson<Run>(runPath(run.id, name), { method: "POST" });
      showToast(notice);
      onChanged();
    } catch (error) {
      showError(error);
    }
  };
  return (
    <div className="row wrap-row">
      <PairLink run={run} />
      {!isRecorded && (
        <Link to={href("/submit", { from: run.id })} className="btn" title="Submit a run like this one">
          Clone
        </Link>
      )}
      {canRetry(run) && (
        <button type="button" className="btn" onClick={() => void command("retry", "Queued for another attempt.")}>
          Retry
        </button>
      )}
      {!isOver && !isRecorded && (
        <ConfirmButton
          label="Stop"
          confirm="Stop it now?"
          onConfirm={() => void command("stop", "Stopping: the GPUs are freed within seconds.")}
        />
      )}
    </div>
  );
}

/** The run this one was submitted to be compared with: of the same experiment, the same but for the ordering. */
function PairLink({ run }: { run: Run }) {
  const path = run.experiment_id === null ? null : withQuery("/runs", { q: `experiment:${run.experiment_id}`, limit: 200 });
  const siblings = useResource<RunPage>(path);
  const { key } = sharedWithPair(run);
  const partner = siblings.data?.runs.find((other) => other.id !== run.id && sharedWithPair(other).key === key);
  const target = partner && compareHref(run.spec.step_ordering === "ordered" ? [partner.id, run.id] : [run.id, partner.id]);
  useShortcuts(target ? { c: () => navigate(target) } : {});
  if (!target || !partner) return null;
  return (
    <Link to={target} className="btn primary" title={`Compare with ${partner.name}`}>
      Compare with {partner.spec.step_ordering} <Key>C</Key>
    </Link>
  );
}
