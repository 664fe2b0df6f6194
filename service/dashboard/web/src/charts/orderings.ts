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

const UNKNOWN: OrderingStyle = { colour: "--ink-2", glyph: "M.8 .8h8.4v8.4H.8Z", dash: [] };

export function orderingStyle(ordering: string): OrderingStyle {
  return STYLES[ordering as StepOrdering] ?? UNKNOWN;
}
