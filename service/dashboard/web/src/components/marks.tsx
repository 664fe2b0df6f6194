/** The small marks that rows, headers and legends share: status, verdict, ordering, powers of two, scalars. */

import type { Run, RunStatus, AttemptStatus, Verdict } from "../api/types.ts";
import { orderingStyle } from "../charts/orderings.ts";
import { formatScalar, NOT_MEASURED, nonfiniteWord, toNumber } from "../format/number.ts";
import { exponentOfTwo, splitPowers } from "../format/power.ts";
import { formatSpecValue, isPower } from "../format/spec.ts";
import { words } from "../format/words.ts";

const CIRCLE = 2 * Math.PI * 2;

function StatusGlyph({ status, share }: { status: string; share: number }) {
  const ring = { fill: "none", stroke: "currentColor", strokeWidth: 1.5 };
  switch (status) {
    case "queued":
      return <circle cx="5" cy="5" r="3.9" {...ring} strokeDasharray="1.6 1.46" />;
    case "pending":
      return <circle cx="5" cy="5" r="3.9" {...ring} />;
    case "running":
      return (
        <>
          <circle cx="5" cy="5" r="4" fill="none" stroke="currentColor" strokeWidth="1.3" />
          <circle
            cx="5"
            cy="5"
            r="2"
            fill="none"
            stroke="currentColor"
            strokeWidth="4"
            strokeDasharray={`${Math.max(share, 0.02) * CIRCLE} ${CIRCLE}`}
            transform="rotate(-90 5 5)"
          />
        </>
      );
    case "succeeded":
      return <circle cx="5" cy="5" r="4.2" fill="currentColor" />;
    case "failed":
      return <path d="M1.4 1.4 8.6 8.6M8.6 1.4 1.4 8.6" stroke="currentColor" strokeWidth="2" />;
    case "lost":
      return <path d="M1.5 5h2M6.5 5h2" stroke="currentColor" strokeWidth="2" />;
    default:
      return <path d="M1.4 1.4h7.2v7.2H1.4Z" fill="currentColor" />;
  }
}

export function StatusMark({ status, share = 0 }: { status: RunStatus | AttemptStatus; share?: number }) {
  return (
    <span className={`status ${status}`}>
      <svg width="10" height="10" viewBox="0 0 10 10" aria-hidden="true">
        <StatusGlyph status={status} share={share} />
      </svg>
      {status}
    </span>
  );
}

const TICK = "M1.5 5.4 4 7.8 8.5 2.4";
const CROSS = "M2 2l6 6M8 2 2 8";
const BAR = "M2 5h6";
const WAVE = "M1 6.2c1.3-3.4 2.7-3.4 4-1.2s2.7 2.2 4-1.2";

/** How a verdict looks. What it is, the service has decided. */
const VERDICT_LOOKS: Record<string, { tone: string; glyph: string }> = {
  dies: { tone: "grave", glyph: CROSS },
  poisoned: { tone: "grave", glyph: CROSS },
  diverged: { tone: "grave", glyph: CROSS },
  stalled: { tone: "mild", glyph: BAR },
  absorbed: { tone: "mild", glyph: WAVE },
  inconclusive: { tone: "mild", glyph: BAR },
  trains: { tone: "good", glyph: TICK },
};

export function VerdictChip({ verdict }: { verdict: Verdict | null }) {
  if (verdict === null) return <span className="chip open">{NOT_MEASURED}</span>;
  const look = VERDICT_LOOKS[verdict.name] ?? { tone: "mild", glyph: BAR };
  return (
    <span className={`chip ${look.tone}`} title={verdict.evidence ?? undefined}>
      <svg width="10" height="10" viewBox="0 0 10 10" aria-hidden="true">
        <path d={look.glyph} fill="none" stroke="currentColor" strokeWidth="1.7" />
      </svg>
      {words(verdict.name)}
    </span>
  );
}

interface OrderingProps {
  ordering: string;
  /** Where several runs share the ordering: how this one's line is dashed. */
  dash?: number[];
}

export function OrderingGlyph({ ordering, dash }: OrderingProps) {
  const style = orderingStyle(ordering);
  if (dash !== undefined) {
    return (
      <svg width="18" height="10" viewBox="0 0 18 10" aria-hidden="true">
        <path d="M0 5h18" stroke={`var(${style.colour})`} strokeWidth="2" strokeDasharray={dash.join(" ") || undefined} />
      </svg>
    );
  }
  return (
    <svg width="10" height="10" viewBox="0 0 10 10" aria-hidden="true">
      <path d={style.glyph} fill={`var(${style.colour})`} />
    </svg>
  );
}

export function OrderingMark({ ordering, dash, label }: OrderingProps & { label?: string }) {
  return (
    <span className="ordering">
      <OrderingGlyph ordering={ordering} dash={dash} />
      {label ?? ordering}
    </span>
  );
}

export function Power({ exponent }: { exponent: number }) {
  return (
    <span className="num">
      2<sup>{exponent < 0 ? `−${-exponent}` : exponent}</sup>
    </span>
  );
}

/** A sentence in which `2^16` is drawn as a power. */
export function Sentence({ text }: { text: string }) {
  return splitPowers(text).map(({ text: part, exponent }, index) =>
    exponent === null ? part : <Power key={index} exponent={exponent} />,
  );
}

export function SpecValue({ path, value }: { path: string; value: unknown }) {
  if (isPower(path) && typeof value === "number") return <Power exponent={value} />;
  return <>{formatSpecValue(value)}</>;
}

/** A loss scale: 2ⁿ where it is a power of two, else a number. */
export function LossScale({ value }: { value: number | null }) {
  if (value === null) return <span className="ink-3">{NOT_MEASURED}</span>;
  const exponent = exponentOfTwo(value);
  return exponent === null ? <Scalar value={value} /> : <Power exponent={exponent} />;
}

/** The scale a run begins with, as its spec says it; a dash where the precision has none. */
export function InitialScale({ run }: { run: Run }) {
  const { precision, loss_scale: scale } = run.spec;
  if (precision !== "fp16") return <span className="ink-3">{NOT_MEASURED}</span>;
  if (scale.static !== null && scale.static !== undefined) return <LossScale value={scale.static} />;
  return <Power exponent={scale.initial_power} />;
}

/** The scale a run ends with or has now; DeepSpeed's 1 of a precision that has none is nobody's. */
export function FinalScale({ run }: { run: Run }) {
  return <LossScale value={run.spec.precision === "fp16" ? toNumber(run.summary?.final_loss_scale) : null} />;
}

/** A measured number; nan and the infinities stand out, "not measured" is a dash. */
export function Scalar({ value, format = formatScalar }: { value: number | null; format?: (value: number) => string }) {
  if (value === null) return <span className="ink-3">{NOT_MEASURED}</span>;
  if (!Number.isFinite(value)) return <span className="nonfinite">{nonfiniteWord(value)}</span>;
  return <span className="num">{format(value)}</span>;
}

export function ProgressBar({ share, label, width = 44 }: { share: number; label: string; width?: number }) {
  const percent = Math.round(Math.min(Math.max(share, 0), 1) * 1000) / 10;
  return (
    <span
      className="progress"
      style={{ width }}
      role="progressbar"
      aria-label={label}
      aria-valuenow={percent}
      aria-valuemin={0}
      aria-valuemax={100}
    >
      <i style={{ width: `${percent}%` }} />
    </span>
  );
}

/** One small box a parameter, filled where it moved. Many parameters are shown as their share of ten boxes. */
export function MovedDots({ moved, total }: { moved: number; total: number }) {
  const boxes = Math.min(total, 10);
  const filled = total === 0 ? 0 : Math.round((moved / total) * boxes);
  return (
    <span className="dots" aria-hidden="true">
      {Array.from({ length: boxes }, (_, index) => (
        <i key={index} className={index < filled ? "on" : undefined} />
      ))}
    </span>
  );
}
