/** The parameter × step map of momentum norms. Pure: rows of norms in, cells and their shades out. */

export interface HeatRow {
  index: number;
  name: string;
  route: string;
  /** By column; NaN and infinities as they are, null where not measured. */
  norms: readonly (number | null)[];
}

export interface HeatColumns {
  /** First and last step of each column, both included. */
  first: number[];
  last: number[];
}

/** Steps 0 to last in at most `most` columns of equal width. */
export function heatColumns(last: number, most: number): HeatColumns {
  const width = Math.max(1, Math.ceil((last + 1) / Math.max(most, 1)));
  const first: number[] = [];
  const end: number[] = [];
  for (let step = 0; step <= last; step += width) {
    first.push(step);
    end.push(Math.min(step + width - 1, last));
  }
  return { first, last: end };
}

/** One value a column: the first non-finite one where there is any, for that must not be averaged away; else the largest. */
export function binNorms(steps: readonly number[], norms: readonly (number | null)[], columns: HeatColumns): (number | null)[] {
  const binned: (number | null)[] = columns.first.map(() => null);
  let column = 0;
  steps.forEach((step, index) => {
    const value = norms[index] ?? null;
    while (column < columns.last.length - 1 && step > (columns.last[column] as number)) column += 1;
    if (value === null) return;
    const held = binned[column];
    if (held !== null && held !== undefined && !Number.isFinite(held)) return;
    if (held === null || held === undefined || !Number.isFinite(value) || value > held) binned[column] = value;
  });
  return binned;
}

/** The first step whose norm is not finite, null where there is none. */
export function onsetOf(steps: readonly number[], norms: readonly (number | null)[]): number | null {
  const index = norms.findIndex((value) => value !== null && !Number.isFinite(value));
  return index < 0 ? null : (steps[index] ?? null);
}

/** The least and the largest of all finite, positive norms of the map; null where there is none. */
export function finiteRange(rows: readonly HeatRow[]): [number, number] | null {
  let low = Infinity;
  let high = -Infinity;
  for (const row of rows) {
    for (const value of row.norms) {
      if (value === null || !Number.isFinite(value) || value <= 0) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  return high > 0 ? [low, high] : null;
}

/** The shade of a finite norm, 0 to 1 on a log scale over all finite, positive norms of the map. */
export function shader(rows: readonly HeatRow[]): (value: number) => number {
  const range = finiteRange(rows);
  if (range === null) return () => 0;
  const [low, high] = range;
  const spread = Math.log(high / low) || 1;
  return (value) => (value <= 0 ? 0 : Math.min(Math.max(Math.log(value / low) / spread, 0), 1));
}
