/** The overflows of one run or several, step by step: what entered a momentum and what was kept out. */

import { Box, TableHead } from "../components/Box.tsx";
import { Key } from "../components/controls.tsx";
import { LossScale } from "../components/marks.tsx";
import { formatInteger } from "../format/number.ts";
import { useExactSteps } from "./exactSteps.ts";
import { effectAt, overflowSteps, type Effect } from "./overflowRows.ts";
import type { Trace } from "./trace.ts";

const SHOWN = 10;

interface Props {
  traces: readonly Trace[];
  locked: number | null;
  onLock: (step: number | null) => void;
}

export function OverflowTable({ traces, locked, onLock }: Props) {
  const from = Math.max(0, (locked ?? 0) - 2);
  const { steps, total } = overflowSteps(traces, from, SHOWN);
  // An effect is read off the norms before and after a step; sampled traces may hold neither.
  const read = useExactSteps(traces, steps.flatMap((step) => (step === 0 ? [0] : [step - 1, step])));
  if (total === 0) return null;
  const isOne = traces.length === 1;
  const names = traces.map((trace) => ({
    key: trace.id,
    isLeft: true,
    label: isOne ? (
      "Momentum"
    ) : (
      <span className="clip-label" title={trace.label}>
        {trace.label}
      </span>
    ),
  }));
  return (
    <Box
      title="Overflows"
      aside={
        <span className="keys-only">
          <Key>J</Key> <Key>K</Key> to step
        </span>
      }
    >
      <table className="grid-table">
        <TableHead cells={["Step", ...names, "Scale"]} />
        <tbody>
          {steps.map((step) => {
            const first = traces.find((trace) => step <= trace.last && trace.hasLossScale !== false);
            return (
              <tr key={step} className={step === locked ? "here" : undefined}>
                <td>
                  <button type="button" className="link" onClick={() => onLock(step)}>
                    {formatInteger(step)}
                  </button>
                </td>
                {traces.map((trace) => (
                  <EffectCell key={trace.id} effect={effectAt(trace, step, read)} />
                ))}
                <td>
                  {first && (
                    <ScaleStep before={read(first, "loss_scale_before", step)} after={read(first, "loss_scale_after", step)} />
                  )}
                </td>
              </tr>
            );
          })}
          {total > steps.length && (
            <tr>
              <td colSpan={traces.length + 2} className="left ink-3">
                {formatInteger(total)} in all
              </td>
            </tr>
          )}
        </tbody>
      </table>
    </Box>
  );
}

function EffectCell({ effect }: { effect: Effect }) {
  return <td className={`left ${effect.isNonfinite ? "nonfinite" : effect.isQuiet ? "ink-3" : ""}`}>{effect.text}</td>;
}

function ScaleStep({ before, after }: { before: number | null; after: number | null }) {
  if (before === null || before === after) return <LossScale value={before} />;
  return (
    <>
      <LossScale value={before} /> → <LossScale value={after} />
    </>
  );
}
