/** One side of a comparison: its ordering, verdict, standing and figures. */

import type { Run } from "../../api/types.ts";
import { plannedSteps } from "../../format/steps.ts";
import { RunLink } from "../../components/RunLink.tsx";
import { FinalScale, OrderingMark, Scalar, StatusMark, VerdictChip } from "../../components/marks.tsx";
import { formatInteger, formatLoss, formatScalar, toNumber } from "../../format/number.ts";
import { orderingWords } from "../../format/spec.ts";
import { Figure } from "../run/RunHeader.tsx";
import { runShare } from "../runs/columns.tsx";

export function CompareCard({ run, label, dash }: { run: Run; label: string; dash?: number[] }) {
  const summary = run.summary;
  return (
    <div className="card compare-card">
      <OrderingMark ordering={orderingWords(run.spec)} dash={dash} label={label} />
      <VerdictChip verdict={run.verdict} />
      <StatusMark status={run.status} share={runShare(run)} />
      <span className="ink-3 num">
        {run.verdict?.step != null && run.status === "failed"
          ? `at step ${formatInteger(run.verdict.step)}`
          : `${formatInteger(summary?.steps ?? 0)} of ${formatInteger(plannedSteps(run))}`}
      </span>
      <dl className="figures">
        <Figure label="Overflows">{formatInteger(summary?.overflows)}</Figure>
        <Figure label="Discarded">{formatInteger(summary?.discarded)}</Figure>
        <Figure label="Scale">
          <FinalScale run={run} />
        </Figure>
        <Figure label="Last loss" title="of the last attempted step, applied or discarded">
          <Scalar value={toNumber(summary?.last_loss)} format={formatLoss} />
        </Figure>
        <Figure label="Momentum">
          <Scalar value={toNumber(summary?.last_momentum_norm)} format={(value) => formatScalar(value, 3)} />
        </Figure>
      </dl>
      <p className="run-of">
        <RunLink id={run.id} name={run.name} /> <span className="ink-3 mono">{run.id}</span>
      </p>
    </div>
  );
}
