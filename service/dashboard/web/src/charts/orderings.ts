/** How each step ordering is drawn: a hue, a glyph and a dash, so that no one of them carries the meaning alone. */

import type { StepOrdering } from "../api/types.ts";

export interface OrderingStyle {
  /** The CSS custom property that holds the hue. */
  colour: string;
  /** An SVG path in a 10 × 10 box. */
  glyph: string;
  dash: number[];
}

const STYLES: Record<StepOrdering, OrderingStyle> = {
  master: { colour: "--master", glyph: "M5 .5 9.8 9.5H.2Z", dash: [6, 4] },
  per_tensor: { colour: "--per-tensor", glyph: "M5 0 10 5 5 10 0 5Z", dash: [8, 3, 2, 3] },
  inverted: { colour: "--inverted", glyph: "M.2 .5H9.8L5 9.5Z", dash: [3, 3] },
  precheck: { colour: "--precheck", glyph: "M.8 .8h8.4v8.4H.8Z", dash: [10, 3] },
  deferred: { colour: "--deferred", glyph: "M2.8.6h4.4L9.6 5 7.2 9.4H2.8L.4 5Z", dash: [2, 3] },
  ordered: { colour: "--ordered", glyph: "M5 .5a4.5 4.5 0 1 1 0 9 4.5 4.5 0 0 1 0-9Z", dash: [] },
};

/** What has no ordering, such as AdamW: in ink, for it takes part in no comparison of orders. */
const UNKNOWN: OrderingStyle = { colour: "--ink-2", glyph: "M0 3.4h10v3.2H0Z", dash: [] };

/** Lines of one ordering share its hue; these tell up to eight of them apart. */
const REPEATED: readonly (readonly number[])[] = [[], [7, 3], [2, 2], [10, 3, 2, 3], [4, 2], [14, 4], [6, 2, 2, 2, 2, 2], [1, 4]];

/** A dash for each of several lines; undefined where a line's ordering is its own, and its own dash tells it. */
export function repeatedDashes(orderings: readonly string[]): (number[] | undefined)[] {
  const seen = new Map<string, number>();
  return orderings.map((ordering) => {
    const nth = seen.get(ordering) ?? 0;
    seen.set(ordering, nth + 1);
    const isRepeated = orderings.indexOf(ordering) !== orderings.lastIndexOf(ordering);
    return isRepeated ? [...(REPEATED[nth % REPEATED.length] ?? [])] : undefined;
  });
}

export function orderingStyle(ordering: string): OrderingStyle {
  return STYLES[ordering as StepOrdering] ?? UNKNOWN;
}
