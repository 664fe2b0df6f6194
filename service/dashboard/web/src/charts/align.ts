/** Several traces on one x axis, as uPlot wants them: undefined where a trace has no point, null where it has a gap. */

export type Aligned = (number | null | undefined)[];

export interface Line {
  x: readonly number[];
  y: readonly (number | null)[];
}

export function align(lines: readonly Line[]): { x: number[]; ys: Aligned[] } {
  const x = unionOf(lines.map((line) => line.x));
  const ys = lines.map((line) => {
    if (line.x.length === x.length) return [...line.y];
    const aligned: Aligned = new Array<undefined>(x.length).fill(undefined);
    let from = 0;
    x.forEach((step, index) => {
      while (from < line.x.length && (line.x[from] as number) < step) from += 1;
      if (line.x[from] === step) aligned[index] = line.y[from] ?? null;
    });
    return aligned;
  });
  return { x, ys };
}

function unionOf(columns: readonly (readonly number[])[]): number[] {
  const longest = columns.reduce((best, column) => (column.length > best.length ? column : best), [] as readonly number[]);
  // The common case, exact traces from step 0: the longest holds the others.
  if (columns.every((column) => column.every((step, index) => longest[index] === step))) return [...longest];
  return [...new Set(columns.flat())].sort((a, b) => a - b);
}
