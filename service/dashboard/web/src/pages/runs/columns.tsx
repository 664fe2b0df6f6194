/** The run table's columns: what each shows, how wide it is, and by which of the service's keys it sorts. */

import type { ReactNode } from "react";

import type { Run } from "../../api/types.ts";
import { plannedSteps } from "../../format/steps.ts";
import {
  InitialScale,
  FinalScale,
  MovedDots,
  OrderingMark,
  ProgressBar,
  Scalar,
  StatusMark,
  VerdictChip,
} from "../../components/marks.tsx";
import { RunLink } from "../../components/RunLink.tsx";
import { LossSparkline } from "../../components/Sparkline.tsx";
import { Ago, Elapsed } from "../../components/time.tsx";
import { formatInteger, formatLoss, formatScalar, plural, toNumber } from "../../format/number.ts";
import { orderingWords, taskWords } from "../../format/spec.ts";

export interface RunColumn {
  id: string;
  label: string;
  width: number;
  isNumeric?: boolean;
  /** The `sort=` key; columns without one do not sort. */
  sort?: string;
  isOptional?: boolean;
  cell: (run: Run) => ReactNode;
}

export function runShare(run: Run): number {
  return (run.summary?.steps ?? 0) / Math.max(plannedSteps(run), 1);
}

const dash = <span className="ink-3">—</span>;

function count(value: number | null | undefined): ReactNode {
  return value === null || value === undefined ? dash : formatInteger(value);
}

/** The first step whose momentum was not finite, where the record's findings name it. */
export function poisonedSince(run: Run): number | null {
  return run.findings.find((finding) => finding.name === "poisoned")?.step ?? null;
}

function hasRecord(run: Run): boolean {
  return (run.summary?.steps ?? 0) > 0;
}

function isLossScaled(run: Run): boolean {
  return run.spec.precision === "fp16" && run.attempts?.at(-1)?.momentum_unit === "loss_scaled";
}

export function MomentumCell({ run }: { run: Run }) {
  const value = toNumber(run.summary?.last_momentum_norm);
  if (value === null) return dash;
  const since = poisonedSince(run);
  if (Number.isFinite(value)) {
    return (
      <>
        <Scalar value={value} format={(number) => formatScalar(number, 3)} />{" "}
        {isLossScaled(run) ? (
          <span className="ink-3" title="times the loss scale: DeepSpeed's own Muon holds its momentum so">
            scaled
          </span>
        ) : (
          <span className="ink-3">finite</span>
        )}
      </>
    );
  }
  return (
    <>
      <Scalar value={value} />
      {since !== null && <span className="ink-3"> since {formatInteger(since)}</span>}
    </>
  );
}

export const COLUMNS: readonly RunColumn[] = [
  {
    id: "name",
    label: "Run",
    width: 190,
    sort: "name",
    cell: (run) => (
      <span className="run-name">
        <RunLink id={run.id} name={run.name} isBrief />
        <span className="ink-3">{taskWords(run.spec.task.name)}</span>
      </span>
    ),
  },
  {
    id: "status",
    label: "Status",
    width: 100,
    sort: "status",
    cell: (run) => <StatusMark status={run.status} share={runShare(run)} />,
  },
  { id: "verdict", label: "Verdict", width: 112, sort: "verdict", cell: (run) => <VerdictChip verdict={run.verdict} /> },
  {
    id: "ordering",
    label: "Ordering",
    width: 100,
    sort: "step_ordering",
    cell: (run) => <OrderingMark ordering={orderingWords(run.spec)} />,
  },
  { id: "stage", label: "ZeRO", width: 48, isNumeric: true, sort: "zero_stage", cell: (run) => run.spec.zero_stage },
  {
    id: "scale",
    label: "Init scale",
    width: 66,
    isNumeric: true,
    sort: "initial_scale",
    cell: (run) => <InitialScale run={run} />,
  },
  {
    id: "step",
    label: "Step",
    width: 112,
    isNumeric: true,
    sort: "steps",
    cell: (run) => (
      <span className="step-cell">
        {formatInteger(run.summary?.steps ?? 0)}
        <ProgressBar share={runShare(run)} label={`${run.name}: steps recorded of ${plannedSteps(run)}`} />
      </span>
    ),
  },
  { id: "curve", label: "Loss", width: 80, cell: (run) => <LossSparkline run={run} /> },
  {
    id: "loss",
    label: "Last loss",
    width: 68,
    isNumeric: true,
    sort: "last_loss",
    cell: (run) => <Scalar value={toNumber(run.summary?.last_loss)} format={formatLoss} />,
  },
  {
    id: "scale_now",
    label: "Scale now",
    width: 72,
    isNumeric: true,
    sort: "final_loss_scale",
    cell: (run) => (hasRecord(run) ? <FinalScale run={run} /> : dash),
  },
  {
    id: "overflows",
    label: "Overflows",
    width: 72,
    isNumeric: true,
    sort: "overflows",
    cell: (run) => (hasRecord(run) ? count(run.summary?.overflows) : dash),
  },
  {
    id: "discarded",
    label: "Discarded",
    width: 72,
    isNumeric: true,
    sort: "discarded",
    cell: (run) => (hasRecord(run) ? count(run.summary?.discarded) : dash),
  },
  {
    id: "momentum",
    label: "Momentum norm",
    width: 112,
    sort: "last_momentum_norm",
    cell: (run) => <MomentumCell run={run} />,
  },
  {
    id: "started",
    label: "Started",
    width: 80,
    isNumeric: true,
    sort: "started_at",
    cell: (run) => (
      <span className="ink-2">
        <Ago at={run.started_at} />
      </span>
    ),
  },
  {
    id: "duration",
    label: "Duration",
    width: 66,
    isNumeric: true,
    cell: (run) => (
      <span className="ink-2">
        <Elapsed started={run.started_at} finished={run.finished_at} />
      </span>
    ),
  },
  {
    id: "moved",
    label: "Moved",
    width: 136,
    sort: "parameters_moved",
    isOptional: true,
    cell: (run) => {
      const moved = run.summary?.parameters_moved ?? null;
      const total = run.summary?.parameters_total ?? null;
      if (moved === null || total === null) return dash;
      return (
        <>
          <MovedDots moved={moved} total={total} />
          {moved}/{total}
        </>
      );
    },
  },
  {
    id: "motion",
    label: "Weight motion",
    width: 96,
    isNumeric: true,
    sort: "max_weight_motion",
    isOptional: true,
    cell: (run) => <Scalar value={toNumber(run.summary?.max_weight_motion)} />,
  },
  {
    id: "implementation",
    label: "Implementation",
    width: 110,
    sort: "implementation",
    isOptional: true,
    cell: (run) => run.spec.implementation,
  },
  { id: "precision", label: "Precision", width: 74, isOptional: true, cell: (run) => run.spec.precision },
  {
    id: "world_size",
    label: "Ranks",
    width: 60,
    isNumeric: true,
    sort: "world_size",
    isOptional: true,
    cell: (run) => run.spec.world_size,
  },
  { id: "lr", label: "lr", width: 64, isNumeric: true, isOptional: true, cell: (run) => formatScalar(run.spec.optimizer.lr, 3) },
  { id: "seed", label: "Seed", width: 64, isNumeric: true, isOptional: true, cell: (run) => run.spec.seed },
  {
    id: "attempts",
    label: "Attempts",
    width: 72,
    isNumeric: true,
    isOptional: true,
    cell: (run) => count(run.attempts?.length ?? null),
  },
  {
    id: "tags",
    label: "Tags",
    width: 140,
    isOptional: true,
    cell: (run) => (run.tags.length === 0 ? dash : <span title={plural(run.tags.length, "tag")}>{run.tags.join(", ")}</span>),
  },
  {
    id: "priority",
    label: "Priority",
    width: 66,
    isNumeric: true,
    sort: "priority",
    isOptional: true,
    cell: (run) => String(run.spec.priority ?? 0),
  },
  {
    id: "created",
    label: "Created",
    width: 84,
    isNumeric: true,
    sort: "created_at",
    isOptional: true,
    cell: (run) => (
      <span className="ink-2">
        <Ago at={run.created_at} />
      </span>
    ),
  },
  {
    id: "fingerprint",
    label: "Fingerprint",
    width: 96,
    isOptional: true,
    cell: (run) => <code title={run.fingerprint}>{run.fingerprint.slice(0, 10)}</code>,
  },
];

export const DEFAULT_COLUMNS: readonly string[] = COLUMNS.filter((column) => !column.isOptional).map(({ id }) => id);

/** The visible columns as the address says them (`cols=a,b`), the default set where it says nothing. */
export function readColumns(text: string | null): ReadonlySet<string> {
  if (text === null) return new Set(DEFAULT_COLUMNS);
  const known = new Set(COLUMNS.map(({ id }) => id));
  return new Set(["name", ...text.split(",").filter((id) => known.has(id))]);
}

export function writeColumns(ids: ReadonlySet<string>): string | null {
  const inOrder = COLUMNS.map(({ id }) => id).filter((id) => ids.has(id));
  return inOrder.join() === DEFAULT_COLUMNS.join() ? null : inOrder.join();
}
