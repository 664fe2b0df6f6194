/** One clock for the page: relative times agree with each other, and tick without a timer each. */

import { useSyncExternalStore } from "react";

import { elapsed, formatAgo, formatDuration, formatExact } from "../format/time.ts";

const TICK_MS = 1000;
const listeners = new Set<() => void>();
let now = Date.now();
let timer: ReturnType<typeof setInterval> | undefined;

function subscribe(listener: () => void): () => void {
  listeners.add(listener);
  timer ??= setInterval(() => {
    if (document.visibilityState === "hidden") return;
    now = Date.now();
    for (const each of [...listeners]) each();
  }, TICK_MS);
  return () => {
    listeners.delete(listener);
    if (listeners.size === 0) {
      clearInterval(timer);
      timer = undefined;
    }
  };
}

/** The present, in milliseconds, advancing once a second. */
export function useNow(): number {
  return useSyncExternalStore(subscribe, () => now);
}

export function Ago({ at }: { at: string | null }) {
  const text = useSyncExternalStore(subscribe, () => formatAgo(at, now));
  if (at === null) return <span className="ink-3">—</span>;
  return (
    <time dateTime={at} title={formatExact(at)}>
      {text}
    </time>
  );
}

export function Elapsed({ started, finished }: { started: string | null; finished: string | null }) {
  const text = useSyncExternalStore(subscribe, () => formatDuration(elapsed(started, finished, now)));
  return <>{text}</>;
}
