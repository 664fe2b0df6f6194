/** Ranges and ticks of the y axes. Only finite values reach these functions. */

export type ScaleKind = "linear" | "log10" | "log2";

const LOG_FROM_RATIO = 4;

/** Whether a panel of these values reads better on a log axis: all positive, and spread widely enough. */
export function chooseScale(columns: readonly (readonly (number | null)[])[]): ScaleKind {
  let low = Infinity;
  let high = -Infinity;
  for (const column of columns) {
    for (const value of column) {
      if (value === null) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return low > 0 && high / low >= LOG_FROM_RATIO && Number.isFinite(high) ? "log10" : "linear";
}

export function yRange(kind: ScaleKind, low: number | null, high: number | null): [number, number] {
  if (low === null || high === null || !Number.isFinite(low) || !Number.isFinite(high)) {
    return kind === "linear" ? [0, 1] : [1, kind === "log2" ? 2 : 10];
  }
  if (kind === "log2") return [2 ** (Math.log2(low) - 0.8), 2 ** (Math.log2(high) + 1)];
  if (kind === "log10") {
    const room = Math.max((Math.log10(high) - Math.log10(low)) * 0.08, 0.02);
    return [10 ** (Math.log10(low) - room), 10 ** (Math.log10(high) + room)];
  }
  const room = (high - low) * 0.08 || Math.abs(high) * 0.05 || 0.5;
  return [low - room, high + room];
}

/** Round steps between low and high: 1, 2 or 5 times a power of ten. */
export function linearTicks(low: number, high: number, most: number): number[] {
  const rough = (high - low) / Math.max(most, 1);
  if (!(rough > 0) || !Number.isFinite(rough)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5, 10].find((factor) => factor * power >= rough) ?? 10);
  const ticks: number[] = [];
  const first = Math.ceil(low / step - 1e-9);
  for (let index = first; index * step <= high + step * 1e-9; index += 1) {
    ticks.push(Number((index * step).toPrecision(12)));
  }
  return ticks;
}

export function logTicks(low: number, high: number, most: number): number[] {
  const decades = Math.log10(high / low);
  if (decades < 1) return linearTicks(low, high, most).filter((tick) => tick > 0);
  const factors = decades < 2 ? [1, 2, 5] : decades < most ? [1, 3].slice(0, decades < 3 ? 2 : 1) : [1];
  const every = Math.max(1, Math.ceil(decades / most));
  const ticks: number[] = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    if (power % every !== 0) continue;
    for (const factor of factors) {
      const tick = Number((factor * 10 ** power).toPrecision(12));
      if (tick >= low && tick <= high) ticks.push(tick);
    }
  }
  return ticks;
}

/** Whole powers of two, at most `most` of them, on even distances. */
export function powerTicks(low: number, high: number, most: number): number[] {
  const first = Math.ceil(Math.log2(low) - 1e-9);
  const last = Math.floor(Math.log2(high) + 1e-9);
  const distance = [1, 2, 4, 8, 16].find((step) => Math.floor((last - first) / step) + 1 <= most) ?? 32;
  const ticks: number[] = [];
  for (let power = Math.ceil(first / distance) * distance; power <= last; power += distance) ticks.push(2 ** power);
  return ticks;
}

export function ticksFor(kind: ScaleKind, low: number, high: number, most: number): number[] {
  if (kind === "log2") return powerTicks(low, high, most);
  return kind === "log10" ? logTicks(low, high, most) : linearTicks(low, high, most);
}

/** Labels of one axis, all with the same number of decimals where no exponent is needed. */
export function tickLabels(ticks: readonly number[]): string[] {
  const sizes = ticks.filter((tick) => tick !== 0).map(Math.abs);
  if (sizes.length > 0 && (Math.max(...sizes) >= 1e5 || Math.min(...sizes) < 1e-3)) {
    return ticks.map((tick) => (tick === 0 ? "0" : tick.toExponential().replace("e+", "e").replaceAll("-", "−")));
  }
  const decimals = Math.max(0, ...ticks.map((tick) => (String(tick).split(".")[1] ?? "").length));
  return ticks.map((tick) => tick.toFixed(Math.min(decimals, 6)).replace("-", "−"));
}

/** How many of these rising values lie in a window. */
export function countWithin(values: readonly number[], min: number, max: number): number {
  const firstFrom = (bound: number, isPast: (value: number) => boolean) => {
    let [low, high] = [0, values.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (isPast(values[middle] ?? bound)) high = middle;
      else low = middle + 1;
    }
    return low;
  };
  return Math.max(firstFrom(max, (value) => value > max) - firstFrom(min, (value) => value >= min), 0);
}
