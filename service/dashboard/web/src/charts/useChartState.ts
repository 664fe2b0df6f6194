/** What a stack of charts shows and where its readout stands. Range and locked step live in the address. */

import { useCallback, useMemo, useRef, useState } from "react";

import { useShortcuts } from "../components/keyboard.tsx";
import { changeQuery, usePlace } from "../routing/router.tsx";
import { fullRange } from "./panels.ts";
import { neighbourInSpans, type Trace } from "./trace.ts";

const HOVER_MS = 30;

function readInteger(text: string | null): number | null {
  return text !== null && /^\d+$/.test(text) ? Number(text) : null;
}

/** The window from the address, null for the whole run. */
export function useWindow(): readonly [number, number] | null {
  const { query } = usePlace();
  const from = readInteger(query.get("from"));
  const to = readInteger(query.get("to"));
  return useMemo(() => (from !== null && to !== null && to > from ? ([from, to] as const) : null), [from, to]);
}

export function setWindow(range: readonly [number, number] | null): void {
  changeQuery({
    from: range === null ? null : String(Math.max(range[0], 0)),
    to: range === null ? null : String(Math.max(range[1], 1)),
  });
}

export interface ChartState {
  range: readonly [number, number];
  window: readonly [number, number] | null;
  locked: number | null;
  /** The step whose values are read out: the locked one, else the one under the pointer, else the last one that all runs have. */
  shown: number | null;
  /** The step under the pointer. */
  pointed: number | null;
  onHover: (step: number | null) => void;
  onLock: (step: number | null) => void;
  onRange: (range: readonly [number, number] | null) => void;
}

const AROUND = [20, 48] as const;

/** A window around a step that leaves more room after it than before. */
export function around(step: number): [number, number] {
  return [Math.max(step - AROUND[0], 0), step + AROUND[1]];
}

export function useChartState(traces: readonly Trace[], planned: number, landmark: number | null): ChartState {
  const { query } = usePlace();
  const window = useWindow();
  const locked = readInteger(query.get("step"));
  const [hovered, setHovered] = useState<number | null>(null);
  const hoverTimer = useRef<ReturnType<typeof setTimeout>>(undefined);
  const last = Math.max(-1, ...traces.map((trace) => trace.last));

  const range = useMemo(
    () => (window === null ? fullRange(traces, planned) : ([window[0] - 0.5, window[1] + 0.5] as const)),
    [window, traces, planned],
  );
  const onHover = useCallback((step: number | null) => {
    clearTimeout(hoverTimer.current);
    hoverTimer.current = setTimeout(() => setHovered(step), HOVER_MS);
  }, []);
  const onLock = useCallback((step: number | null) => {
    changeQuery({ step: step === null ? null : String(step) });
  }, []);

  const go = (step: number | null) => {
    if (step === null) return;
    onLock(step);
    if (window !== null && (step < window[0] || step > window[1])) setWindow(around(step));
  };
  const overflow = traces.map((trace) => trace.overflow);
  useShortcuts({
    J: () => go(neighbourInSpans(overflow, locked, 1)),
    K: () => go(neighbourInSpans(overflow, locked, -1)),
    L: () => onLock(locked === null ? (hovered ?? (last >= 0 ? last : null)) : null),
    l: () => onLock(locked === null ? (hovered ?? (last >= 0 ? last : null)) : null),
    D: () => landmark !== null && setWindow(around(landmark)),
    d: () => landmark !== null && setWindow(around(landmark)),
    ArrowRight: () => locked !== null && go(Math.min(locked + 1, Math.max(last, 0))),
    ArrowLeft: () => locked !== null && go(Math.max(locked - 1, 0)),
    Escape: () => (locked !== null ? onLock(null) : setWindow(null)),
  });

  // Where nothing is pointed at: the last step that all of them have.
  const common = Math.min(...traces.filter((trace) => trace.last >= 0).map((trace) => trace.last));
  const shown = locked ?? hovered ?? (Number.isFinite(common) ? common : null);
  return { range, window, locked, shown, pointed: hovered, onHover, onLock, onRange: setWindow };
}
