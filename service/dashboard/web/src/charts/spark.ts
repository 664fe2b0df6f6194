/** The geometry of a sparkline. Non-finite values and unmeasured ones are gaps. */

export interface SparkPoints {
  step: readonly number[];
  value: readonly (number | null)[];
}

export interface SparkPath {
  line: string;
  endX: number;
  endY: number;
}

export function sparkPath(
  points: SparkPoints,
  box: { width: number; height: number; steps: number },
): SparkPath | null {
  const finite = points.value.filter((value): value is number => value !== null && Number.isFinite(value));
  if (finite.length === 0) return null;
  const low = Math.min(...finite);
  const spread = Math.max(...finite) - low || 1;
  const last = Math.max(box.steps - 1, 1);
  let line = "";
  let isOpen = false;
  let endX = 0;
  let endY = 0;
  points.value.forEach((value, index) => {
    if (value === null || !Number.isFinite(value)) {
      isOpen = false;
      return;
    }
    endX = Math.round(((points.step[index] ?? 0) / last) * box.width * 10) / 10;
    endY = Math.round((box.height - 3 - ((value - low) / spread) * (box.height - 6)) * 10) / 10;
    line += `${isOpen ? "L" : "M"}${endX} ${endY}`;
    isOpen = true;
  });
  return { line, endX, endY };
}
