/** How busy the ranks were, on the axis of the steps. Pure: samples and step times in, panels and figures out. */

import type { Attempt, LoadSample, StepSeries } from "../../api/types.ts";
import { align, type Line } from "../../charts/align.ts";
import type { LineLook, PanelData } from "../../charts/panels.ts";
import { toNumber } from "../../format/number.ts";

/** The place of a moment (Unix seconds) on the axis of the steps; null outside of them. */
export type StepClock = (at: number) => number | null;

export interface StepTimes {
  step: readonly number[];
  seconds: readonly (number | null)[];
  /** Whether every step is there: else their times do not add up. */
  exact: boolean;
}

export function readStepTimes({ series, exact }: StepSeries): StepTimes {
  return { step: series.step, seconds: (series.step_time_s ?? []).map(toNumber), exact };
}

/**
 * Samples are stamped with the time, steps with how long they took: the first step's end joins the two.
 *
 * Step k takes the room from k - 0.5 to k + 0.5. Where not every step is known, the steps between the first one's end
 * and `until`, the last moment of the record, are taken as equally long.
 */
export function stepClock(attempt: Attempt, times: StepTimes, until: number): StepClock | null {
  const anchor = attempt.phases.first_step;
  const from = times.step.findIndex((step) => step >= attempt.first_step);
  const last = times.step.at(-1);
  if (anchor === undefined || from < 0 || last === undefined) return null;
  const first = times.step[from] as number;
  const steps = times.exact ? times.step.slice(from) : [first, last];
  const ends = times.exact ? stepEnds(times.seconds.slice(from), anchor) : [anchor, Math.max(until, anchor)];
  const begin = anchor - (times.seconds[from] ?? 0);
  return (at) => {
    const index = firstFrom(ends, at);
    if (index === ends.length || at < begin) return null;
    const start = index === 0 ? begin : (ends[index - 1] as number);
    const share = (at - start) / Math.max((ends[index] as number) - start, 1e-9);
    const before = index === 0 ? first - 0.5 : (steps[index - 1] as number) + 0.5;
    return before + share * ((steps[index] as number) + 0.5 - before);
  };
}

/** The index of the first of these growing moments that is not before `at`. */
function firstFrom(moments: readonly number[], at: number): number {
  let low = 0;
  let high = moments.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((moments[middle] as number) < at) low = middle + 1;
    else high = middle;
  }
  return low;
}

function stepEnds(seconds: readonly (number | null)[], anchor: number): number[] {
  let at = anchor;
  return seconds.map((each, index) => {
    if (index > 0) at += each ?? 0;
    return at;
  });
}

const GIB = 2 ** 30;
const MOST_LINES = 8;

interface Quantity {
  key: string;
  title: string;
  note: string;
  read: (sample: LoadSample) => number | null;
}

const inGib = (bytes: number | null) => (bytes === null ? null : bytes / GIB);

export const QUANTITIES: readonly Quantity[] = [
  { key: "gpu", title: "GPU use", note: "% of the device", read: (sample) => sample.gpu_percent },
  { key: "gpu_memory", title: "GPU memory", note: "GiB in use on the device", read: (sample) => inGib(sample.gpu_memory_bytes) },
  { key: "cpu", title: "CPU", note: "% of one core, by the rank's process", read: (sample) => sample.cpu_percent },
  { key: "memory", title: "Memory", note: "GiB, of the rank's process", read: (sample) => inGib(sample.memory_bytes) },
];

const LOOKS: readonly LineLook[] = [
  { colour: "--ink", dash: [] },
  { colour: "--ink-3", dash: [] },
  { colour: "--ink", dash: [6, 3] },
  { colour: "--ink-3", dash: [6, 3] },
  { colour: "--ink", dash: [2, 2] },
  { colour: "--ink-3", dash: [2, 2] },
  { colour: "--ink", dash: [8, 3, 2, 3] },
  { colour: "--ink-3", dash: [8, 3, 2, 3] },
];

export function ranksIn(samples: readonly LoadSample[]): number[] {
  return [...new Set(samples.map((sample) => sample.rank))].sort((a, b) => a - b);
}

/** One panel a quantity that was measured, a line a rank; of more than eight ranks the highest and the lowest. */
export function loadPanels(samples: readonly LoadSample[], clock: StepClock): PanelData[] {
  const placed = samples.flatMap((sample) => {
    const step = clock(sample.at);
    return step === null ? [] : [{ step, sample }];
  });
  const ranks = ranksIn(samples);
  return QUANTITIES.flatMap(({ key, title, note, read }) => {
    const points = placed.flatMap(({ step, sample }) => {
      const value = read(sample);
      return value === null ? [] : [{ step, rank: sample.rank, value }];
    });
    // A line needs two points: of fewer the box beside the charts says all there is.
    if (new Set(points.map(({ step }) => step)).size < 2) return [];
    const named: [string, Line][] =
      ranks.length <= MOST_LINES
        ? ranks.map((rank) => [`rank ${rank}`, lineOf(points.filter((point) => point.rank === rank))])
        : [["highest", extremes(points, Math.max)], ["lowest", extremes(points, Math.min)]];
    const { x, ys } = align(named.map(([, line]) => line));
    const legend = named.length === 1 ? note : `${note}; ${named.map(([name]) => name).join(", ")}`;
    return {
      spec: { key: `load_${key}`, title, note: legend, height: 96, kind: "line" as const, fields: [], scale: "linear" as const },
      scale: "linear" as const,
      lines: named.map(([name], index) => ({
        trace: { id: name, label: name, ordering: "", end: null },
        field: null,
        isRaw: false,
        look: LOOKS[index % LOOKS.length] as LineLook,
      })),
      data: [x, ...ys] as PanelData["data"],
      strip: [],
    };
  });
}

interface Point {
  step: number;
  value: number;
}

function lineOf(points: readonly Point[]): Line {
  return { x: points.map(({ step }) => step), y: points.map(({ value }) => value) };
}

/** Ranks are sampled at moments of their own; they are taken together by whole steps. */
function extremes(points: readonly Point[], choose: (...values: number[]) => number): Line {
  const byStep = new Map<number, number>();
  for (const { step, value } of points) {
    const at = Math.round(step);
    const known = byStep.get(at);
    byStep.set(at, known === undefined ? value : choose(known, value));
  }
  const steps = [...byStep.keys()].sort((a, b) => a - b);
  return { x: steps, y: steps.map((step) => byStep.get(step) ?? null) };
}

export interface RankLoad {
  rank: number;
  /** The sample nearest to the moment that is shown, or the last one. */
  shown: LoadSample;
  peak: Record<string, number | null>;
}

/** What each rank used at a step (null: at its last sample), and its peaks. */
export function rankLoads(samples: readonly LoadSample[], clock: StepClock | null, step: number | null): RankLoad[] {
  return ranksIn(samples).map((rank) => {
    const own = samples.filter((sample) => sample.rank === rank);
    const peak = Object.fromEntries(
      QUANTITIES.map(({ key, read }) => {
        const values = own.map(read).filter((value) => value !== null);
        return [key, values.length === 0 ? null : Math.max(...values)];
      }),
    );
    return { rank, shown: nearest(own, clock, step), peak };
  });
}

function nearest(own: readonly LoadSample[], clock: StepClock | null, step: number | null): LoadSample {
  let best = own.at(-1) as LoadSample;
  if (clock === null || step === null) return best;
  let distance = Infinity;
  for (const sample of own) {
    const at = clock(sample.at);
    if (at === null || Math.abs(at - step) >= distance) continue;
    distance = Math.abs(at - step);
    best = sample;
  }
  return best;
}
