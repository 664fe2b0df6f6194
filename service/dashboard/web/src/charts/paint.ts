/** What is drawn around uPlot's lines: bands, ticks, strips, marks, and powers of two. All in canvas pixels. */

import type uPlot from "uplot";

import { orderingStyle } from "./orderings.ts";
import type { PanelData, StripRow } from "./panels.ts";
import { ticksFor } from "./scales.ts";
import { spanWords, type Span, type Trace } from "./trace.ts";

export const AXIS_WIDTH = 66;
export const STRIP_ROW = 16;
export const MOST_SPANS_WITH_WORDS = 3;

export function cssColour(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function font(size: number, weight = 400): string {
  return `${weight} ${size * devicePixelRatio}px "Inter Variable"`;
}

function inside(u: uPlot, draw: (context: CanvasRenderingContext2D) => void): void {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  draw(ctx);
  ctx.restore();
}

function visible(u: uPlot, [first, last]: Span): boolean {
  return last >= (u.scales.x?.min ?? -Infinity) - 1 && first <= (u.scales.x?.max ?? Infinity) + 1;
}

export function paintBands(u: uPlot, traces: readonly Trace[]): void {
  inside(u, (context) => {
    traces.forEach((trace) => {
      context.fillStyle = cssColour(orderingStyle(trace.ordering).colour);
      context.globalAlpha = trace.ordering === "ordered" ? 0.14 : 0.08;
      for (const span of trace.discarded) {
        if (!visible(u, span)) continue;
        const left = u.valToPos(span[0] - 0.5, "x", true);
        const right = u.valToPos(span[1] + 0.5, "x", true);
        context.fillRect(left, u.bbox.top, Math.max(right - left, devicePixelRatio), u.bbox.height);
      }
    });
  });
}

export function paintLanes(u: uPlot, traces: readonly Trace[]): void {
  const { ctx, bbox } = u;
  const ratio = devicePixelRatio;
  const rowHeight = bbox.height / Math.max(traces.length, 1);
  const tick = Math.min(rowHeight * 0.66, 14 * ratio);
  traces.forEach((trace, row) => {
    const middle = bbox.top + rowHeight * (row + 0.5);
    inside(u, (context) => {
      context.fillStyle = cssColour(orderingStyle(trace.ordering).colour);
      const unit = u.valToPos(1, "x", true) - u.valToPos(0, "x", true);
      for (const span of trace.overflow) {
        if (!visible(u, span)) continue;
        if (unit > 4 * ratio) {
          for (let step = span[0]; step <= span[1]; step += 1) {
            context.fillRect(u.valToPos(step, "x", true) - 1.25 * ratio, middle - tick / 2, 2.5 * ratio, tick);
          }
        } else {
          const left = u.valToPos(span[0], "x", true) - ratio;
          const right = u.valToPos(span[1], "x", true) + ratio;
          context.fillRect(left, middle - tick / 2, right - left, tick);
        }
      }
    });
    ctx.save();
    ctx.font = font(11);
    ctx.fillStyle = cssColour("--ink-2");
    ctx.textAlign = "right";
    ctx.textBaseline = "middle";
    ctx.fillText(clip(ctx, trace.label, (AXIS_WIDTH - 8) * ratio), bbox.left - 6 * ratio, middle);
    ctx.restore();
  });
}

function clip(context: CanvasRenderingContext2D, text: string, width: number): string {
  if (context.measureText(text).width <= width) return text;
  let end = text.length;
  while (end > 1 && context.measureText(`${text.slice(0, end)}…`).width > width) end -= 1;
  return `${text.slice(0, end)}…`;
}

/** Axis labels as 2 with a raised exponent. */
export function paintPowers(u: uPlot): void {
  const { ctx, bbox } = u;
  const scale = u.scales.y;
  if (scale?.min == null || scale.max == null) return;
  const ratio = devicePixelRatio;
  ctx.save();
  ctx.fillStyle = cssColour("--ink-3");
  ctx.textAlign = "right";
  ctx.textBaseline = "middle";
  for (const tick of ticksFor("log2", scale.min, scale.max, tickCount(u))) {
    const y = u.valToPos(tick, "y", true);
    const exponent = String(Math.round(Math.log2(tick))).replace("-", "−");
    const right = bbox.left - 8 * ratio;
    ctx.font = font(9);
    ctx.fillText(exponent, right, y - 4 * ratio);
    const width = ctx.measureText(exponent).width;
    ctx.font = font(11);
    ctx.fillText("2", right - width - ratio, y);
  }
  ctx.restore();
}

export function tickCount(u: uPlot): number {
  return Math.max(2, Math.floor(u.bbox.height / devicePixelRatio / 24));
}

/** An axis without a finite value has no scale to show; it says so instead. */
export function paintNoFinite(u: uPlot): void {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.font = font(11);
  ctx.fillStyle = cssColour("--ink-3");
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  ctx.fillText("no finite value here", bbox.left + bbox.width / 2, bbox.top + bbox.height / 2);
  ctx.restore();
}

export function paintVertical(u: uPlot, step: number | null, colour: string, dash: readonly number[]): void {
  if (step === null) return;
  inside(u, (context) => {
    const x = Math.round(u.valToPos(step, "x", true)) + 0.5;
    context.strokeStyle = cssColour(colour);
    context.lineWidth = 1.25 * devicePixelRatio;
    context.setLineDash(dash.map((length) => length * devicePixelRatio));
    context.beginPath();
    context.moveTo(x, u.bbox.top);
    context.lineTo(x, u.bbox.top + u.bbox.height);
    context.stroke();
  });
}

/** A cross where a run ended before its time, with the words beside it where there is room. */
export function paintEnds(u: uPlot, panel: PanelData): void {
  const { ctx, bbox } = u;
  const ratio = devicePixelRatio;
  panel.lines.forEach(({ trace, field, isRaw }, index) => {
    const last = lastFinite(u.data[0] as number[], u.data[index + 1] as (number | null | undefined)[]);
    if (trace.end === null || isRaw || field === "update_norm" || last === null) return;
    const x = u.valToPos(last.x, "x", true);
    const y = u.valToPos(last.y, "y", true);
    if (x < bbox.left || x > bbox.left + bbox.width || y < bbox.top || y > bbox.top + bbox.height) return;
    const arm = 4 * ratio;
    ctx.save();
    ctx.strokeStyle = cssColour(orderingStyle(trace.ordering).colour);
    ctx.fillStyle = ctx.strokeStyle;
    ctx.lineWidth = 2 * ratio;
    ctx.setLineDash([]);
    ctx.beginPath();
    ctx.moveTo(x - arm, y - arm);
    ctx.lineTo(x + arm, y + arm);
    ctx.moveTo(x + arm, y - arm);
    ctx.lineTo(x - arm, y + arm);
    ctx.stroke();
    if (panel.spec.saysEnd) {
      ctx.font = font(11, 560);
      ctx.textBaseline = "middle";
      const width = ctx.measureText(trace.end.text).width;
      const edge = bbox.left + bbox.width;
      if (x + 11 * ratio + width < edge) {
        ctx.textAlign = "left";
        ctx.fillText(trace.end.text, x + 11 * ratio, y);
      } else {
        // No room beside the cross: above it, against the right edge, where a falling staircase leaves space.
        ctx.textAlign = "right";
        ctx.fillText(trace.end.text, edge, bbox.top + 8 * ratio);
      }
    }
    ctx.restore();
  });
}

function lastFinite(x: readonly number[], y: readonly (number | null | undefined)[]): { x: number; y: number } | null {
  for (let index = y.length - 1; index >= 0; index -= 1) {
    const value = y[index];
    if (typeof value === "number") return { x: x[index] as number, y: value };
  }
  return null;
}

/** The strip above the finite axis: a triangle for an infinity, a bar for an interval of nan, and the words. */
export function paintStrip(u: uPlot, rows: readonly StripRow[], isShared: boolean): void {
  const { ctx, bbox } = u;
  const ratio = devicePixelRatio;
  const colour = cssColour("--nf");
  rows.forEach((row, index) => {
    const middle = bbox.top - (rows.length - index) * STRIP_ROW * ratio + 5 * ratio;
    const clampX = (step: number) =>
      Math.min(Math.max(u.valToPos(step, "x", true), bbox.left), bbox.left + bbox.width);
    const shown = row.spans.filter((span) => visible(u, [span.first, span.last]));
    if (shown.length === 0) return;
    ctx.save();
    ctx.fillStyle = colour;
    let left = Infinity;
    let right = -Infinity;
    for (const span of shown) {
      const from = clampX(span.first - (span.first === span.last ? 0 : 0.3));
      const to = clampX(span.last);
      const isInfinite = !Number.isNaN(span.value);
      if (isInfinite) paintTriangle(ctx, clampX(span.first), middle, span.value > 0 ? 1 : -1);
      if (!isInfinite || span.last > span.first) {
        const start = isInfinite ? from + 7 * ratio : from;
        const height = (isInfinite ? 2 : 6) * ratio;
        ctx.fillRect(start, middle - height / 2, Math.max(to - start, 2.5 * ratio), height);
      }
      left = Math.min(left, from - (isInfinite ? 6 * ratio : 0));
      right = Math.max(right, to + (isInfinite && span.first === span.last ? 6 * ratio : 0));
    }
    if (row.spans.length > MOST_SPANS_WITH_WORDS) return ctx.restore(); // the panel's heading says it
    const label = (isShared ? `${row.trace.label} ` : "") + spanWords(row.spans, row.trace);
    ctx.font = font(11, 560);
    ctx.textBaseline = "middle";
    const width = ctx.measureText(label).width;
    if (right + 10 * ratio + width <= bbox.left + bbox.width + 24 * ratio) {
      ctx.textAlign = "left";
      ctx.fillText(label, right + 10 * ratio, middle);
    } else if (left - 10 * ratio - width >= bbox.left - AXIS_WIDTH * ratio) {
      ctx.textAlign = "right";
      ctx.fillText(label, left - 10 * ratio, middle);
    } else {
      // Over the end of the bar: its beginning is what matters.
      paintOnPlate(ctx, label, bbox.left + bbox.width - width, middle, width);
    }
    ctx.restore();
  });
}

function paintTriangle(context: CanvasRenderingContext2D, x: number, y: number, direction: 1 | -1): void {
  const size = 5 * devicePixelRatio;
  context.beginPath();
  context.moveTo(x - size, y + size * 0.9 * direction);
  context.lineTo(x + size, y + size * 0.9 * direction);
  context.lineTo(x, y - size * 0.9 * direction);
  context.fill();
}

/** Words over a bar that leaves no room beside it. */
function paintOnPlate(context: CanvasRenderingContext2D, text: string, x: number, y: number, width: number): void {
  const ratio = devicePixelRatio;
  const ink = context.fillStyle;
  context.fillStyle = cssColour("--surface");
  context.fillRect(x - 5 * ratio, y - 8 * ratio, width + 10 * ratio, 16 * ratio);
  context.fillStyle = ink;
  context.textAlign = "left";
  context.fillText(text, x, y);
}
