/** The values at one step, a column a run, and the difference where there are two. */

import { Key } from "../components/controls.tsx";
import { LossScale, OrderingGlyph, Scalar } from "../components/marks.tsx";
import { formatDelta, formatInteger, formatLoss, formatScalar, nonfiniteWord } from "../format/number.ts";
import { exponentOfTwo } from "../format/power.ts";
import { useExactSteps } from "./exactSteps.ts";
import { countBefore, spanHolds, type Field, type Trace } from "./trace.ts";

/** Why a quantity has no difference: it is not the same one in both. */
export interface Unlike {
  quantity: string;
  why: string;
}

interface Props {
  traces: readonly Trace[];
  step: number | null;
  isLocked: boolean;
  /** Of a pair; as long as it is not known, nothing is held against anything. */
  unlike?: readonly Unlike[] | null;
}

const ROWS: readonly (readonly [string, Field, (value: number) => string])[] = [
  ["Loss", "loss", formatLoss],
  ["Loss scale", "loss_scale_before", formatScalar],
  ["Gradient norm", "grad_norm", formatScalar],
  ["Update norm", "update_norm", formatScalar],
  ["Momentum norm", "momentum_norm", formatScalar],
];

export function Readout({ traces, step, isLocked, unlike = null }: Props) {
  const reader = useExactSteps(traces, step === null ? [] : [step]);
  const read = (trace: Trace, field: Field): number | null => {
    const isNobodys = field === "loss_scale_before" && trace.hasLossScale === false;
    return step === null || isNobodys ? null : reader(trace, field, step);
  };
  const isPair = traces.length === 2;
  const whyNot = new Map((unlike ?? []).map(({ quantity, why }) => [quantity, why]));
  return (
    <section className="box readout" aria-label="Values at one step">
      <header>
        <h2 className="h2">{step === null ? "No steps yet" : `At step ${formatInteger(step)}`}</h2>
        <span className="aside">
          {isLocked ? "locked" : "follows the pointer"}
          <span className="keys-only">
            {" "}
            · <Key>L</Key>
          </span>
        </span>
      </header>
      <table className="grid-table">
        <thead>
          <tr>
            <th scope="col">Metric</th>
            {traces.map((trace) => (
              <th scope="col" key={trace.id}>
                <span className="ordering">
                  <OrderingGlyph ordering={trace.ordering} dash={trace.dash} />
                  <span className="clip-label" title={trace.label}>
                    {trace.label}
                  </span>
                </span>
              </th>
            ))}
            {isPair && (
              <th scope="col">
                <span aria-label="Difference">Δ</span>
              </th>
            )}
          </tr>
        </thead>
        <tbody>
          {ROWS.map(([label, field, format]) => {
            const values = traces.map((trace) => read(trace, field));
            return (
              <tr key={field}>
                <th scope="row">{label}</th>
                {values.map((value, index) => (
                  <td key={traces[index]?.id}>
                    {field === "loss_scale_before" ? <LossScale value={value} /> : <Scalar value={value} format={format} />}
                  </td>
                ))}
                {isPair && (
                  <td className="ink-3" title={whyNot.get(field)}>
                    {unlike === null || whyNot.has(field) ? (
                      <>—</>
                    ) : field === "loss_scale_before" ? (
                      <ScaleRatio a={values[0] ?? null} b={values[1] ?? null} />
                    ) : (
                      <Difference a={values[0] ?? null} b={values[1] ?? null} />
                    )}
                  </td>
                )}
              </tr>
            );
          })}
          <CountRow label="Overflows" traces={traces} step={step} count={(trace, at) => countBefore(trace.overflow, at + 1)} />
          <CountRow
            label="Steps applied"
            traces={traces}
            step={step}
            count={(trace, at) => Math.min(at, trace.last) + 1 - countBefore(trace.discarded, at + 1)}
          />
          <tr>
            <th scope="row">This step</th>
            {traces.map((trace) => (
              <td key={trace.id}>{step === null ? "—" : stepWord(trace, step)}</td>
            ))}
            {isPair && <td />}
          </tr>
        </tbody>
      </table>
      {isPair && whyNot.size > 0 && (
        <div className="body ink-2">
          {[...whyNot.values()].map((why) => (
            <p key={why}>{why}</p>
          ))}
        </div>
      )}
    </section>
  );
}

function stepWord(trace: Trace, step: number): string {
  if (step > trace.last) return "—";
  return spanHolds(trace.discarded, step) ? "discarded" : "applied";
}

function Difference({ a, b }: { a: number | null; b: number | null }) {
  if (a === null || b === null) return <>—</>;
  const delta = a - b;
  if (!Number.isFinite(delta)) return <span className="nonfinite">{nonfiniteWord(delta)}</span>;
  return <>{formatDelta(delta)}</>;
}

/** Loss scales differ by a factor, so that is what is shown: 2⁻³, not −57,344. */
function ScaleRatio({ a, b }: { a: number | null; b: number | null }) {
  if (a === null || b === null || b === 0) return <>—</>;
  if (a === b) return <>0</>;
  const exponent = exponentOfTwo(a / b);
  return exponent === null ? <Difference a={a} b={b} /> : <>×&thinsp;<LossScale value={a / b} /></>;
}

function signedInteger(value: number): string {
  return value > 0 ? `+${formatInteger(value)}` : formatInteger(value);
}

function CountRow(props: {
  label: string;
  traces: readonly Trace[];
  step: number | null;
  count: (trace: Trace, step: number) => number;
}) {
  const { step } = props;
  const counts = props.traces.map((trace) => (step === null ? null : props.count(trace, step)));
  const [a, b] = counts;
  return (
    <tr>
      <th scope="row">{props.label}</th>
      {counts.map((count, index) => (
        <td key={props.traces[index]?.id}>{formatInteger(count)}</td>
      ))}
      {counts.length === 2 && (
        <td className="ink-3">{typeof a === "number" && typeof b === "number" ? signedInteger(a - b) : "—"}</td>
      )}
    </tr>
  );
}
