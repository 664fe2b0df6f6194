/** The run's overflows, newest last, each a way to its step. */

import { Key } from "../../components/controls.tsx";
import { LossScale, Scalar } from "../../components/marks.tsx";
import { spanHolds, valueAt, type Trace } from "../../charts/trace.ts";
import { formatInteger } from "../../format/number.ts";

const SHOWN = 8;

interface Props {
  trace: Trace;
  locked: number | null;
  onLock: (step: number | null) => void;
}

/** The first steps of the spans and how many more there are. */
export function firstSteps(spans: readonly (readonly [number, number])[], most: number): { steps: number[]; more: number } {
  const steps: number[] = [];
  let total = 0;
  for (const [first, last] of spans) {
    total += last - first + 1;
    for (let step = first; step <= last && steps.length < most; step += 1) steps.push(step);
  }
  return { steps, more: total - steps.length };
}

export function OverflowList({ trace, locked, onLock }: Props) {
  const { steps, more } = firstSteps(trace.overflow, SHOWN);
  return (
    <section className="box">
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
            <th scope="col" className="left">
              Momentum
            </th>
            <th scope="col">Scale</th>
          </tr>
        </thead>
        <tbody>
          {steps.map((step) => (
            <tr key={step} className={step === locked ? "here" : undefined}>
              <td>
                <button type="button" className="link" onClick={() => onLock(step)}>
                  {formatInteger(step)}
                </button>
                {!spanHolds(trace.discarded, step) && " applied"}
              </td>
              <td className="left">
                <Scalar value={valueAt(trace, "momentum_norm", step)} />
              </td>
              <td>
                <ScaleStep before={valueAt(trace, "loss_scale_before", step)} after={valueAt(trace, "loss_scale_after", step)} />
              </td>
            </tr>
          ))}
          {more > 0 && (
            <tr>
              <td colSpan={3} className="left ink-3">
                {formatInteger(more)} more
              </td>
            </tr>
          )}
        </tbody>
      </table>
    </section>
  );
}

export function ScaleStep({ before, after }: { before: number | null; after: number | null }) {
  if (before === null || before === after) return <LossScale value={before} />;
  return (
    <>
      <LossScale value={before} /> → <LossScale value={after} />
    </>
  );
}
