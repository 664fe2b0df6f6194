/** Which panels a stack of charts has, from top to bottom, and what each of them plots. */

import { formatInteger } from "../format/number.ts";
import type { Aligned, Line } from "./align.ts";
import { align } from "./align.ts";
import { orderingStyle } from "./orderings.ts";
import { chooseScale, type ScaleKind } from "./scales.ts";
import { smooth, type Field, type NonfiniteSpan, type Trace } from "./trace.ts";

/** How a line is drawn that stands for no ordering: in ink, so that hue keeps its meaning. */
export interface LineLook {
  colour: string;
  dash: number[];
}

export interface PanelSpec {
  key: string;
  title: string;
  note: string;
  height: number;
  kind: "lane" | "stepped" | "line";
  fields: readonly Field[];
  scale: "power" | "auto" | "linear";
  /** Whether the death mark carries its words here. */
  saysEnd?: boolean;
  /** The same where runs recorded several quantities under the first field's name. */
  noteOf?: (quantity: string) => string;
  /** The ids of the traces it is of; by default of all. */
  only?: readonly string[];
}

export const PANELS: readonly PanelSpec[] = [
  { key: "overflow", title: "Overflow", note: "tick = overflow, its step is discarded", height: 50, kind: "lane", fields: [], scale: "auto" },
  {
    key: "loss_scale",
    title: "Loss scale",
    note: "log₂",
    height: 156,
    kind: "stepped",
    fields: ["loss_scale_before"],
    scale: "power",
    saysEnd: true,
  },
  { key: "loss", title: "Loss", note: "", height: 156, kind: "line", fields: ["loss"], scale: "auto" },
  {
    key: "norms",
    title: "Gradient norm, update norm",
    note: "gradient, and update in grey",
    noteOf: (quantity) => `${quantity}; in grey the update norm`,
    height: 132,
    kind: "line",
    fields: ["grad_norm", "update_norm"],
    scale: "auto",
  },
  {
    key: "momentum",
    title: "Momentum norm",
    note: "non-finite values sit above the axis",
    noteOf: (quantity) => `${quantity} · non-finite values sit above the axis`,
    height: 156,
    kind: "line",
    fields: ["momentum_norm"],
    scale: "auto",
  },
];

/** The panels for these traces: none for a loss scale that no run has, and one for each quantity under one name. */
export function panelsFor(traces: readonly Trace[]): readonly PanelSpec[] {
  const hasLossScale = traces.length === 0 || traces.some((trace) => trace.hasLossScale !== false);
  const panels = hasLossScale
    ? PANELS
    : PANELS.filter(({ key }) => key !== "loss_scale").map((panel) => (panel.key === "loss" ? { ...panel, saysEnd: true } : panel));
  const parted = panels.flatMap((panel) => byQuantity(panel, traces));
  return parted.length === panels.length ? panels : parted;
}

function quantitiesOf({ fields }: PanelSpec, traces: readonly Trace[]): Map<string, Trace[]> {
  const found = new Map<string, Trace[]>();
  for (const trace of traces) {
    const name = fields.flatMap((field) => trace.quantities?.[field] ?? []).join(", ");
    found.set(name, [...(found.get(name) ?? []), trace]);
  }
  return found;
}

/** Numbers of two quantities, or of one in two units, cannot share an axis. */
function byQuantity(panel: PanelSpec, traces: readonly Trace[]): PanelSpec[] {
  const quantities = quantitiesOf(panel, traces);
  if (panel.kind !== "line" || quantities.size < 2) return [panel];
  return [...quantities].map(([quantity, those], place) => ({
    ...panel,
    key: `${panel.key}-${place}`,
    title: `${panel.title} of ${those.map(({ label }) => label).join(", ")}`,
    note: panel.noteOf?.(quantity) ?? quantity,
    only: those.map(({ id }) => id),
  }));
}

export interface StripRow {
  trace: Trace;
  field: Field;
  spans: NonfiniteSpan[];
}

export interface PanelLine {
  trace: Pick<Trace, "id" | "label" | "ordering" | "dash" | "end">;
  field: Field | null;
  isRaw: boolean;
  /** By default the ordering's. */
  look?: LineLook;
}

export interface PanelData {
  spec: PanelSpec;
  scale: ScaleKind;
  lines: PanelLine[];
  data: [number[], ...Aligned[]];
  strip: StripRow[];
}

/** The staircase ends where the last step left the scale, one step after it. */
function lossScaleLine(trace: Trace): Line {
  if (trace.hasLossScale === false) return { x: trace.step, y: trace.step.map(() => null) };
  const after = trace.columns.loss_scale_after.at(-1);
  const line = { x: trace.step, y: trace.columns.loss_scale_before };
  if (after === null || after === undefined) return line;
  return { x: [...line.x, trace.last + 1], y: [...line.y, after] };
}

function lineOf(trace: Trace, field: Field): Line {
  return field === "loss_scale_before" ? lossScaleLine(trace) : { x: trace.step, y: trace.columns[field] };
}

function dashes(trace: Trace): number {
  return Math.min((trace.dash ?? orderingStyle(trace.ordering).dash).length, 1);
}

export function panelData(spec: PanelSpec, all: readonly Trace[], smoothing: number): PanelData {
  const traces = spec.only === undefined ? all : all.filter(({ id }) => spec.only?.includes(id));
  // Dashed lines lie over solid ones: where two runs are equal, both show.
  const inDrawingOrder = [...traces].sort((a, b) => dashes(a) - dashes(b));
  const pairs = inDrawingOrder.flatMap((trace) => spec.fields.map((field) => ({ trace, field })));
  const shown = pairs.map(({ trace, field }) => lineOf(trace, field));
  const lanes = spec.kind === "lane" ? traces.map((trace): Line => ({ x: trace.step, y: trace.step.map(() => null) })) : [];
  const { x, ys } = align([...shown, ...lanes]);
  const isSmoothed = smoothing > 0 && spec.kind === "line";
  const lines: PanelLine[] = [];
  const columns: Aligned[] = [];
  pairs.forEach(({ trace, field }, index) => {
    const column = ys[index] ?? [];
    lines.push({ trace, field, isRaw: isSmoothed });
    columns.push(column);
    if (isSmoothed) {
      lines.push({ trace, field, isRaw: false });
      columns.push(smooth(column, smoothing));
    }
  });
  if (spec.kind === "lane") columns.push(x.map(() => null));
  const scale = spec.scale === "power" ? "log2" : chooseScale(shown.map((line) => line.y));
  const strip = traces
    .flatMap((trace) => spec.fields.map((field) => ({ trace, field })))
    .map(({ trace, field }) => ({ trace, field, spans: trace.nonfinite[field] ?? [] }))
    .filter(({ spans }) => spans.length > 0);
  return { spec, scale, lines, data: [x, ...columns], strip };
}

/** The x range that shows all of these traces, with room where one of them ended early. */
export function fullRange(traces: readonly Trace[], planned: number): [number, number] {
  const last = Math.max(0, ...traces.map((trace) => trace.last));
  const hasEnd = traces.some((trace) => trace.end !== null && trace.last === last);
  const room = hasEnd ? Math.min(Math.max(planned - 1, last + 1), Math.ceil(last * 1.8) + 1) : last;
  return [-0.5, Math.max(room, last + 1, 1) + 0.5];
}

export function describePanel({ spec, data, strip }: PanelData): string {
  const points = data[0].length;
  const odd = strip.length > 0 ? `, with non-finite values in ${strip.map((row) => row.trace.label).join(" and ")}` : "";
  return `${spec.title} by step, ${formatInteger(points)} points${odd}. The readout beside it has the values.`;
}
