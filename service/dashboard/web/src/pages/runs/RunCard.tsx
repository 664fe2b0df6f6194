/** A run on a narrow screen: what decides in two lines, the figures in a third. */

import { memo } from "react";

import type { Run } from "../../api/types.ts";
import { plannedSteps } from "../../format/steps.ts";
import { RunLink } from "../../components/RunLink.tsx";
import { InitialScale, FinalScale, OrderingMark, ProgressBar, StatusMark, VerdictChip } from "../../components/marks.tsx";
import { formatInteger } from "../../format/number.ts";
import { orderingWords } from "../../format/spec.ts";
import { MomentumCell, runShare } from "./columns.tsx";

interface Props {
  run: Run;
  isSelected: boolean;
  onToggle: (id: string) => void;
}

export const RunCard = memo(function RunCard({ run, isSelected, onToggle }: Props) {
  const hasLossScale = run.spec.precision === "fp16";
  return (
    <div className={isSelected ? "run-card selected" : "run-card"}>
      <input
        type="checkbox"
        className="checkbox"
        checked={isSelected}
        onChange={() => onToggle(run.id)}
        aria-label={`Select ${run.name}`}
      />
      <div className="lines">
        <div className="row">
          <RunLink id={run.id} name={run.name} isBrief />
          <span className="grow" />
          {run.verdict !== null && <VerdictChip verdict={run.verdict} />}
        </div>
        <div className="row ink-2">
          <StatusMark status={run.status} share={runShare(run)} />
          <OrderingMark ordering={orderingWords(run.spec)} />
          <span>
            ZeRO {run.spec.zero_stage} · {hasLossScale ? <InitialScale run={run} /> : run.spec.precision}
          </span>
        </div>
        <div className="row num ink-2">
          <span>{formatInteger(run.summary?.steps ?? 0)}</span>
          <ProgressBar share={runShare(run)} label={`${run.name}: steps recorded of ${plannedSteps(run)}`} />
          {hasLossScale && (
            <span>
              scale <FinalScale run={run} />
            </span>
          )}
          <span className="clip">
            momentum <MomentumCell run={run} />
          </span>
        </div>
      </div>
    </div>
  );
});
