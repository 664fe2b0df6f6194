/** The phases of an attempt as bars on one time axis. Pure. */

export interface PhaseBar {
  name: string;
  /** Seconds this phase took, and how long after submission it began. */
  took: number;
  from: number;
}

/** Phases are recorded by when they ended; what each took is the time since the one before. */
export function phaseBars(phases: Record<string, number>): PhaseBar[] {
  const stations = Object.entries(phases).sort(([, a], [, b]) => a - b);
  const start = stations[0]?.[1] ?? 0;
  let before = start;
  const bars: PhaseBar[] = [];
  for (const [name, ended] of stations.slice(1)) {
    bars.push({ name, took: ended - before, from: before - start });
    before = ended;
  }
  return bars;
}
