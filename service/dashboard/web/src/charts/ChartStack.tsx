/**
 * Panels of one x axis, one above the other: synced crosshair, drag to zoom, click to lock the readout.
 *
 * The plots are made anew when their structure changes (traces, scale kinds, strip rows, theme); data, range and
 * marks are only passed on.
 */

import { useEffect, useId, useMemo, useRef } from "react";
import uPlot from "uplot";

import { formatInteger } from "../format/number.ts";
import { useTheme } from "../theme/theme.ts";
import { orderingStyle } from "./orderings.ts";
import {
  AXIS_WIDTH,
  cssColour,
  MOST_SPANS_WITH_WORDS,
  paintBands,
  paintEnds,
  paintLanes,
  paintNoFinite,
  paintPowers,
  paintStrip,
  paintVertical,
  STRIP_ROW,
  tickCount,
} from "./paint.ts";
import { describePanel, panelData, type PanelData, type PanelSpec } from "./panels.ts";
import { countWithin, tickLabels, ticksFor, yRange } from "./scales.ts";
import { spanWords, type Trace } from "./trace.ts";

const FONT = '11px "Inter Variable"';
const CLICK_SLACK = 4;
const NONE: readonly PanelData[] = [];

export interface ChartStackProps {
  traces: readonly Trace[];
  panels: readonly PanelSpec[];
  /** Panels of other series on the same axis, below those of the traces. */
  more?: readonly PanelData[];
  range: readonly [number, number];
  divergence?: number | null;
  locked: number | null;
  smoothing?: number;
  axisLabel?: string;
  onHover: (step: number | null) => void;
  onLock: (step: number | null) => void;
  onRange: (range: [number, number] | null) => void;
}

function structureOf(panels: readonly PanelData[]): string {
  return panels
    .map(({ spec, scale, lines, strip }) => {
      const names = lines.map(({ trace, field, isRaw }) => `${trace.id}${trace.label}${field}${isRaw}`);
      return [spec.key, scale, strip.length, ...names].join("|");
    })
    .join("/");
}

export function ChartStack(props: ChartStackProps) {
  const { traces, panels: specs, range, smoothing = 0, more = NONE } = props;
  const theme = useTheme();
  const syncKey = useId();
  const own = useMemo(() => specs.map((spec) => panelData(spec, traces, smoothing)), [specs, traces, smoothing]);
  const panels = useMemo(() => (more.length === 0 ? own : [...own, ...more]), [own, more]);
  const structure = structureOf(panels);
  const hosts = useRef(new Map<string, HTMLDivElement>());
  const plots = useRef<uPlot[]>([]);
  const latest = useRef({ props, panels });
  latest.current = { props, panels };

  useEffect(() => {
    const made = latest.current.panels.map((panel, index, all) => {
      const host = hosts.current.get(panel.spec.key) as HTMLDivElement;
      return makePlot(host, index, index === all.length - 1, syncKey, latest);
    });
    plots.current = made;
    const observer = new ResizeObserver(() => {
      for (const plot of made) {
        const width = plot.root.parentElement?.clientWidth ?? 0;
        if (width > 0 && width !== plot.width) plot.setSize({ width, height: plot.height });
      }
    });
    for (const host of hosts.current.values()) observer.observe(host);
    let isGone = false;
    void Promise.all([document.fonts.load(FONT), document.fonts.load(`560 ${FONT}`)]).then(() => {
      if (!isGone) for (const plot of made) plot.redraw(false, true);
    });
    return () => {
      isGone = true;
      observer.disconnect();
      for (const plot of made) plot.destroy();
      plots.current = [];
    };
  }, [structure, theme, syncKey]);

  useEffect(() => {
    plots.current.forEach((plot, index) => {
      const panel = panels[index];
      if (!panel) return;
      setWidths(plot, panel, range);
      plot.setData(panel.data as uPlot.AlignedData, false);
    });
    const [min, max] = range;
    for (const plot of plots.current) plot.setScale("x", { min, max });
  }, [panels, range]);

  useEffect(() => {
    for (const plot of plots.current) plot.redraw(false, false);
  }, [props.locked, props.divergence]);

  return (
    <div className="chart-stack">
      {panels.map((panel) => (
        <section className="panel" key={panel.spec.key}>
          <h3>
            {panel.spec.title} <span>{noteOf(panel)}</span> <StripSummary panel={panel} isShared={traces.length > 1} />
          </h3>
          <div
            ref={(element) => {
              if (element) hosts.current.set(panel.spec.key, element);
              else hosts.current.delete(panel.spec.key);
            }}
            role="img"
            aria-label={describePanel(panel)}
          />
        </section>
      ))}
      {props.axisLabel && <div className="axis-label">{props.axisLabel}</div>}
    </div>
  );
}

function noteOf({ spec, scale }: PanelData): string {
  if (spec.kind === "lane" || spec.scale === "power" || spec.scale === "linear") return spec.note;
  return [scale === "log10" ? "log" : "linear", spec.note].filter(Boolean).join(" · ");
}

/** Where a strip has more marks than words fit beside, the heading counts them. */
function StripSummary({ panel, isShared }: { panel: PanelData; isShared: boolean }) {
  const crowded = panel.strip.filter((row) => row.spans.length > MOST_SPANS_WITH_WORDS);
  if (crowded.length === 0) return null;
  const text = crowded.map((row) => (isShared ? `${row.trace.label} ` : "") + spanWords(row.spans, row.trace)).join("; ");
  return <em className="nonfinite">{text}</em>;
}

interface Latest {
  current: { props: ChartStackProps; panels: PanelData[] };
}

function makePlot(host: HTMLElement, index: number, isLast: boolean, syncKey: string, latest: Latest): uPlot {
  const panel = () => latest.current.panels[index] as PanelData;
  const traces = () => latest.current.props.traces;
  const { spec, scale, lines, strip, data } = panel();
  const [min, max] = latest.current.props.range;
  const height = spec.kind === "lane" ? Math.max(spec.height, 20 * traces().length + 12) : spec.height;
  const stripHeight = strip.length * STRIP_ROW;
  const options: uPlot.Options = {
    width: host.clientWidth || 600,
    height: height + stripHeight + (isLast ? 20 : 0),
    padding: [spec.kind === "lane" ? 4 : 10 + stripHeight, 28, 0, 0],
    legend: { show: false },
    cursor: {
      sync: { key: syncKey, setSeries: false },
      y: false,
      points: { size: 6 },
      drag: { x: true, y: false, setScale: false },
    },
    scales: {
      x: { time: false, auto: false, min, max },
      y:
        spec.kind === "lane"
          ? { range: [0, 1] }
          : {
              distr: scale === "linear" ? 1 : 3,
              log: scale === "log2" ? 2 : 10,
              range: (_, low, high) => yRange(scale, low, high),
            },
    },
    series: [{}, ...(spec.kind === "lane" ? [{}] : lines.map((line) => lineSeries(spec, line)))],
    axes: [xAxis(isLast), yAxis(panel())],
    hooks: {
      drawClear: [(u) => paintBands(u, traces())],
      draw: [
        (u) => {
          const { props } = latest.current;
          if (spec.kind === "lane") paintLanes(u, traces());
          if (scale === "log2") paintPowers(u);
          paintVertical(u, props.divergence ?? null, "--nf", [3, 3]);
          paintVertical(u, props.locked, "--ink", []);
          if (spec.kind !== "lane") {
            paintEnds(u, panel());
            if (!hasFinite(u)) paintNoFinite(u);
          }
          paintStrip(u, panel().strip, traces().length > 1);
        },
      ],
      setCursor: index === 0 ? [(u) => latest.current.props.onHover(stepUnder(u))] : [],
      setSelect: [
        (u) => {
          if (u.select.width < CLICK_SLACK) return;
          const low = u.posToVal(u.select.left, "x");
          const high = u.posToVal(u.select.left + u.select.width, "x");
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          if (high - low >= 1) latest.current.props.onRange([Math.floor(low), Math.ceil(high)]);
        },
      ],
    },
  };
  const plot = new uPlot(options, data as uPlot.AlignedData, host);
  setWidths(plot, panel(), latest.current.props.range);
  listenForClicks(plot, latest);
  return plot;
}

/**
 * Draw lines with more points than pixels one pixel wide: they are as well seen, and a browser that draws without a GPU
 * takes several times as long for a wider one.
 */
function setWidths(plot: uPlot, { spec, lines, data }: PanelData, [min, max]: readonly [number, number]): void {
  if (spec.kind === "lane") return;
  const isDense = countWithin(data[0], min, max) > plot.width - AXIS_WIDTH;
  lines.forEach((line, index) => {
    const series = plot.series[index + 1];
    if (series) series.width = isDense ? 1 : lineWidth(spec, line);
  });
}

function stepUnder(u: uPlot): number | null {
  const { left } = u.cursor;
  return left === undefined || left === null || left < 0 ? null : Math.round(u.posToVal(left, "x"));
}

function listenForClicks(plot: uPlot, latest: Latest): void {
  let downAt = 0;
  plot.over.addEventListener("mousedown", (event) => {
    downAt = event.clientX;
  });
  plot.over.addEventListener("click", (event) => {
    if (Math.abs(event.clientX - downAt) > CLICK_SLACK) return;
    const step = Math.round(plot.posToVal(event.clientX - plot.over.getBoundingClientRect().left, "x"));
    const { locked, onLock } = latest.current.props;
    onLock(step === locked ? null : Math.max(step, 0));
  });
  plot.over.addEventListener("dblclick", () => latest.current.props.onRange(null));
}

function isSecond(spec: PanelSpec, line: PanelData["lines"][number]): boolean {
  return line.field !== null && spec.fields.indexOf(line.field) > 0;
}

function lineWidth(spec: PanelSpec, line: PanelData["lines"][number]): number {
  return isSecond(spec, line) || line.isRaw ? 1.1 : 1.6;
}

function lineSeries(spec: PanelSpec, line: PanelData["lines"][number]): uPlot.Series {
  const style = line.look ?? orderingStyle(line.trace.ordering);
  const dash = line.look?.dash ?? line.trace.dash ?? style.dash;
  const colour = isSecond(spec, line) ? "--ink-3" : style.colour;
  return {
    stroke: cssColour(colour),
    alpha: line.isRaw ? 0.35 : 1,
    width: lineWidth(spec, line),
    dash: dash.length > 0 ? dash : undefined,
    paths: spec.kind === "stepped" ? uPlot.paths.stepped?.({ align: 1 }) : undefined,
    points: { show: (u, index) => isSparse(u, index), size: 4, fill: cssColour(colour) },
    spanGaps: false,
  };
}

/** Points are drawn where a line alone would show nothing: a single value between two gaps. */
function isSparse(u: uPlot, index: number): boolean {
  const values = u.data[index] as (number | null | undefined)[];
  return values.filter((value) => typeof value === "number").length < 3;
}

/** Whether any line has a value in the window that is shown. */
function hasFinite(u: uPlot): boolean {
  const [x, ...columns] = u.data;
  const { min = -Infinity, max = Infinity } = u.scales.x ?? {};
  return columns.some((column) =>
    column.some((value, index) => {
      const step = x[index] as number;
      return typeof value === "number" && step >= (min ?? -Infinity) && step <= (max ?? Infinity);
    }),
  );
}

function xAxis(isLast: boolean): uPlot.Axis {
  return {
    stroke: cssColour("--ink-3"),
    font: FONT,
    size: isLast ? 26 : 6,
    gap: 4,
    grid: { stroke: cssColour("--line"), width: 1 },
    ticks: { show: false },
    space: 90,
    incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 1e7],
    values: (_, ticks) => ticks.map((tick) => (isLast && tick >= 0 ? formatInteger(tick) : "")),
  };
}

function yAxis({ spec, scale }: PanelData): uPlot.Axis {
  const shared: uPlot.Axis = {
    stroke: cssColour("--ink-3"),
    font: FONT,
    size: AXIS_WIDTH,
    gap: 8,
    ticks: { show: false },
    grid: { stroke: cssColour("--line"), width: 1, show: spec.kind !== "lane" },
  };
  if (spec.kind === "lane") return { ...shared, values: (_, ticks) => ticks.map(() => "") };
  return {
    ...shared,
    splits: (u, _axis, low, high) => (hasFinite(u) ? ticksFor(scale, low, high, tickCount(u)) : []),
    filter: (_, ticks) => ticks,
    values: (_, ticks) => (scale === "log2" ? ticks.map(() => "") : tickLabels(ticks)),
  };
}
