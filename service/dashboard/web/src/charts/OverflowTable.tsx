/** The overflows of all runs, step by step: what entered a momentum and what was kept out. */

import { Key } from "../../components/controls.tsx";
import { valueAt, type Trace } from "../../charts/trace.ts";
import { formatInteger } from "../../format/number.ts";
import { ScaleStep } from "../run/OverflowList.tsx";
import { effectAt, overflowSteps } from "./overflowRows.ts";

const SHOWN = 10;

interface Props {
  traces: readonly Trace[];
  locked: number | null;
  onLock: (step: number | null) => void;
}

export function OverflowTable({ traces, locked, onLock }: Props) {
  const from = Math.max(0, (locked ?? 0) - 2);
  const { steps, total } = overflowSteps(traces, from, SHOWN);
  if (total === 0) return null;
  return (
    <section className="box scroll-x">
      <header>
        <h2 className="h2">Overflows</h2>
        <span className="aside">
          <Key>J</Key> <Key>K</Key> to step
        </span>
      </header>
      <table className="grid-table">
        <thead>
          <tr>
            <th scope="col">Step</th>
            {traces.map((trace) => (
              <th scope="col" className="left" key={trace.id}>
                {trace.label}
              </th>
            ))}
            <th scope="col">Scale</th>
          </tr>
        </thead>
        <tbody>
          {steps.map((step) => {
            const first = traces.find((trace) => step <= trace.last);
            return (
              <tr key={step} className={step === locked ? "here" : undefined}>
                <td>
                  <button type="button" className="link" onClick={() => onLock(step)}>
                    {formatInteger(step)}
                  </button>
                </td>
                {traces.map((trace) => {
                  const effect = effectAt(trace, step);
                  return (
                    <td key={trace.id} className={`left ${effect.isNonfinite ? "nonfinite" : effect.isQuiet ? "ink-3" : ""}`}>
                      {effect.text}
                    </td>
                  );
                })}
                <td>
                  {first && (
                    <ScaleStep
                      before={valueAt(first, "loss_scale_before", step)}
                      after={valueAt(first, "loss_scale_after", step)}
                    />
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
    </section>
  );
}
