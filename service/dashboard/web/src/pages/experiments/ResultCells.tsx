/** What came of one run, in three cells: what moved, whether its momentum stayed finite, and its outcome. */

import type { Run } from "../../api/types.ts";
import { MovedDots, ProgressBar, StatusMark, VerdictChip } from "../../components/marks.tsx";
import { formatInteger } from "../../format/number.ts";
import { words } from "../../format/words.ts";
import { Link, runHref } from "../../routing/router.tsx";
import { runShare } from "../runs/columns.tsx";
import type { Check, MatrixCell } from "./matrix.ts";

export function ResultCells({ cell, known }: { cell: MatrixCell | null; known: string }) {
  if (cell === null) {
    return (
      <td className="edge ink-3" colSpan={3}>
        not in this experiment
      </td>
    );
  }
  const { run, published } = cell;
  const { summary } = run;
  if (run.finished_at === null) {
    return (
      <>
        <td className="edge" colSpan={2}>
          <Link to={runHref(run.id)} className="row">
            <StatusMark status={run.status} share={runShare(run)} />
            <ProgressBar share={runShare(run)} label={`${run.name}: steps recorded`} />
            <span className="ink-3">{formatInteger(summary?.steps ?? 0)}</span>
          </Link>
        </td>
        <td className="ink-3">—</td>
      </>
    );
  }
  const moved = summary?.parameters_moved ?? null;
  const total = summary?.parameters_total ?? null;
  const isStill = moved === 0;
  const isBad = summary?.momentum_finite === false;
  return (
    <>
      <td className={isBad ? "edge bad" : "edge"}>
        {moved === null || total === null ? (
          <span className="ink-3">—</span>
        ) : (
          <>
            <MovedDots moved={moved} total={total} />
            <span className={isStill && isBad ? "nonfinite" : undefined}>
              {moved}/{total}
            </span>
          </>
        )}
      </td>
      <td className={isBad ? "bad" : undefined}>
        {summary?.momentum_finite == null ? (
          <span className="ink-3">—</span>
        ) : summary.momentum_finite ? (
          "finite"
        ) : (
          <span className="nonfinite">non-finite</span>
        )}
      </td>
      <td className={isBad ? "bad" : undefined}>
        <Link to={runHref(run.id)} className="row outcome">
          {hasVerdict(run) ? <VerdictChip verdict={run.verdict} /> : <StatusMark status={run.status} />}
          {!hasVerdict(run) && run.failure !== null && <span className="ink-3">{words(run.failure.kind)}</span>}
          {run.verdict?.step != null && <span className="ink-3">step {formatInteger(run.verdict.step)}</span>}
          <CheckMark check={published} known={known} />
        </Link>
      </td>
    </>
  );
}

/** Whether a run's record proves something; one that failed before it could is `failed`, and its page says why. */
function hasVerdict(run: Run): boolean {
  return run.verdict !== null && !(run.status === "failed" && run.verdict.name === "inconclusive");
}

function CheckMark({ check, known }: { check: Check; known: string }) {
  if (check === null) return null;
  if (check.matches) {
    return (
      <span className="published" title={`Equals ${known}`}>
        <span aria-hidden="true">=</span>
        <span className="visually-hidden">equals {known}</span>
      </span>
    );
  }
  return (
    <span className="published differs" title={check.differences.join("; ")}>
      ≠ <span className="visually-hidden">differs from {known}: {check.differences.join("; ")}</span>
    </span>
  );
}
