/** Every parameter's momentum norm at every step: where the poison begins, and how far it spreads. */

import { useEffect, useMemo, useRef, useState, type PointerEvent } from "react";

import { requestJson, runPath, withQuery } from "../../api/client.ts";
import { useResource } from "../../api/resource.ts";
import type { Parameter, ParameterSteps, Run } from "../../api/types.ts";
import { binNorms, finiteRange, heatColumns, onsetOf, shader, type HeatColumns, type HeatRow } from "../../charts/heat.ts";
import { cssColour } from "../../charts/paint.ts";
import { useIsNarrow } from "../../components/narrow.ts";
import { Scalar } from "../../components/marks.tsx";
import { EmptyState, ErrorState, LoadingState } from "../../components/states.tsx";
import { formatInteger, formatScalar, formatShape, plural, toNumber } from "../../format/number.ts";
import { MiddleCut } from "../../components/RunLink.tsx";
import { useTheme } from "../../theme/theme.ts";

const ROW = 20;
const MOST_COLUMNS = 600;
const MOST_ROWS = 200;
const PARALLEL = 4;
const PAGE = 20_000;
// As `.shade-scale` has them.
const FAINTEST = 0.06;
const STRONGEST = 0.68;

interface Norms {
  steps: number[];
  norms: (number | null)[];
}

async function readNorms(id: string, index: number, signal: AbortSignal): Promise<Norms> {
  const found: Norms = { steps: [], norms: [] };
  let start: number | null = 0;
  while (start !== null) {
    const path: string = withQuery(runPath(id, "parameters", index, "steps"), { start, limit: PAGE });
    const page: ParameterSteps = await requestJson<ParameterSteps>(path, { signal });
    for (const { step, momentum_norm: norm } of page.steps) {
      found.steps.push(step);
      found.norms.push(toNumber(norm));
    }
    start = page.next_start;
  }
  return found;
}

/** Norms of these parameters, a few requests at a time, again when `mark` changes. */
function useNorms(id: string, indices: readonly number[], mark: string): ReadonlyMap<number, Norms> {
  const [norms, setNorms] = useState<ReadonlyMap<number, Norms>>(new Map());
  const wanted = indices.join();
  useEffect(() => {
    const controller = new AbortController();
    const queue = wanted === "" ? [] : wanted.split(",").map(Number);
    const work = async () => {
      for (let index = queue.shift(); index !== undefined; index = queue.shift()) {
        const at = index;
        try {
          const found = await readNorms(id, at, controller.signal);
          setNorms((before) => new Map(before).set(at, found));
        } catch {
          if (controller.signal.aborted) return; // else: this row stays empty, the others go on
        }
      }
    };
    for (let worker = 0; worker < PARALLEL; worker += 1) void work();
    return () => controller.abort();
  }, [id, wanted, mark]);
  return norms;
}

export default function ParametersView({ run }: { run: Run }) {
  const parameters = useResource<{ parameters: Parameter[] }>(runPath(run.id, "parameters"));
  const all = parameters.data?.parameters ?? [];
  const trained = useMemo(() => all.filter(({ route }) => route !== "frozen").slice(0, MOST_ROWS), [parameters.data]);
  const recorded = run.summary?.steps ?? 0;
  // A live run's map is read again in steps of a tenth, so that a long one does not read for ever.
  const mark = run.finished_at ?? String(Math.floor(Math.log(recorded + 1) * 10));
  const norms = useNorms(run.id, trained.map(({ index }) => index), mark);
  // What the page is for comes first where not all columns have room.
  const isNarrow = useIsNarrow();
  const [hover, setHover] = useState<{ row: number; column: number } | null>(null);

  const last = Math.max(recorded - 1, ...[...norms.values()].map(({ steps }) => steps.at(-1) ?? 0));
  const columns = useMemo(() => heatColumns(Math.max(last, 0), MOST_COLUMNS), [last]);
  const rows = useMemo(
    (): HeatRow[] =>
      trained.map(({ index, name, route }) => {
        const read = norms.get(index);
        return { index, name, route, norms: read ? binNorms(read.steps, read.norms, columns) : [] };
      }),
    [trained, norms, columns],
  );

  if (parameters.error && !parameters.data) return <ErrorState error={parameters.error} onRetry={parameters.refresh} />;
  if (parameters.isLoading) return <LoadingState what="the parameters" />;
  if (all.length === 0) {
    return (
      <EmptyState title="No parameters recorded yet">
        <p>Names, shapes and routes come with the first attempt's initialisation.</p>
      </EmptyState>
    );
  }
  const hovered = hover === null ? null : rows[hover.row];
  const onsets = rows.map(({ index }) => {
    const read = norms.get(index);
    return read ? onsetOf(read.steps, read.norms) : null;
  });
  const steps = (
    <th scope="col" className="map">
      <span>step 0</span>
      <span>{formatInteger(last)}</span>
    </th>
  );
  const map = trained.length > 0 && (
    <td className="map" rowSpan={trained.length}>
      <HeatMap rows={rows} columns={columns} onHover={setHover} />
    </td>
  );
  const poisoned = onsets.filter((onset) => onset !== null).length;
  return (
    <>
      <div className="tool">
        <span className="ink-2">
          {plural(all.length, "parameter")}, {all.filter(({ route }) => route === "muon").length} by Muon.{" "}
          {poisoned > 0 ? (
            <>
              Momentum of <span className="nonfinite">{plural(poisoned, "parameter")}</span> became non-finite.
            </>
          ) : (
            "All momentum finite."
          )}
        </span>
        <span className="grow" />
        <span className="label num">
          {hovered && hover ? (
            <>
              {hovered.name}, {columnWords(columns, hover.column)}: <Scalar value={hovered.norms[hover.column] ?? null} />
            </>
          ) : (
            <ShadeScale rows={rows} />
          )}
        </span>
      </div>
      <div className="card heat scroll-x" tabIndex={0} role="region" aria-label="Momentum norms">
        <table>
          <thead>
            <tr>
              <th scope="col">Parameter</th>
              {isNarrow && steps}
              <th scope="col">Shape</th>
              <th scope="col">Route</th>
              <th scope="col">Non-finite from</th>
              {!isNarrow && steps}
            </tr>
          </thead>
          <tbody>
            {trained.map((parameter, row) => (
              <tr key={parameter.index}>
                <th scope="row" className="mono" title={parameter.name}>
                  <MiddleCut text={parameter.name} />
                </th>
                {isNarrow && row === 0 && map}
                <td className="num">{formatShape(parameter.shape)}</td>
                <td title={parameter.reason}>{parameter.route}</td>
                <td className="num">
                  {onsets[row] === null ? (
                    <span className="ink-3">—</span>
                  ) : (
                    <span className="nonfinite">{formatInteger(onsets[row])}</span>
                  )}
                </td>
                {!isNarrow && row === 0 && map}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {all.length > trained.length && (
        <p className="ink-3 hint-line">
          {trained.length} of {all.length} shown; {all.filter(({ route }) => route === "frozen").length} frozen.
        </p>
      )}
    </>
  );
}

/** The shades from the least norm to the largest, drawn as the map draws them: which is darker is the theme's matter. */
function ShadeScale({ rows }: { rows: readonly HeatRow[] }) {
  const range = finiteRange(rows);
  if (range === null) return null;
  return (
    <span className="shade-scale">
      norm {formatScalar(range[0], 3)} <i aria-label="to" role="img" /> {formatScalar(range[1], 3)}, log
    </span>
  );
}

function columnWords({ first, last }: HeatColumns, column: number): string {
  const from = first[column] ?? 0;
  const to = last[column] ?? from;
  return from === to ? `step ${formatInteger(from)}` : `steps ${formatInteger(from)} – ${formatInteger(to)}`;
}

interface HeatMapProps {
  rows: readonly HeatRow[];
  columns: HeatColumns;
  onHover: (cell: { row: number; column: number } | null) => void;
}

function HeatMap({ rows, columns, onHover }: HeatMapProps) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const theme = useTheme();
  const [width, setWidth] = useState(0);
  const height = rows.length * ROW;

  useEffect(() => {
    const element = canvas.current?.parentElement;
    if (!element) return;
    const observer = new ResizeObserver(() => setWidth(element.clientWidth));
    observer.observe(element);
    return () => observer.disconnect();
  }, []);

  useEffect(() => {
    const context = canvas.current?.getContext("2d");
    if (context && width > 0) paintHeat(context, rows, columns, width, height);
  }, [rows, columns, width, height, theme]);

  const cellAt = (event: PointerEvent<HTMLCanvasElement>) => {
    const box = event.currentTarget.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left) / box.width) * columns.first.length);
    const row = Math.floor((event.clientY - box.top) / ROW);
    onHover(row >= 0 && row < rows.length && column >= 0 ? { row, column } : null);
  };

  return (
    <canvas
      ref={canvas}
      style={{ width: "100%", height }}
      role="img"
      aria-label="Momentum norm by parameter and step. A column beside it names the step from which it is non-finite."
      onPointerDown={cellAt}
      onPointerMove={cellAt}
      onPointerLeave={() => onHover(null)}
    />
  );
}

function paintHeat(
  context: CanvasRenderingContext2D,
  rows: readonly HeatRow[],
  columns: HeatColumns,
  width: number,
  height: number,
): void {
  const ratio = devicePixelRatio;
  const { canvas } = context;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  context.scale(ratio, ratio);
  context.clearRect(0, 0, width, height);
  const shade = shader(rows);
  const ink = cssColour("--ink");
  const nonfinite = cssColour("--nf");
  const surface = cssColour("--surface");
  const cell = width / Math.max(columns.first.length, 1);
  const gap = cell > 6 ? 1 : 0;
  rows.forEach((row, index) => {
    row.norms.forEach((value, column) => {
      if (value === null) return;
      const x = column * cell;
      const isFinite = Number.isFinite(value);
      context.globalAlpha = isFinite ? FAINTEST + shade(value) * (STRONGEST - FAINTEST) : 1;
      context.fillStyle = isFinite ? ink : nonfinite;
      context.fillRect(x, index * ROW + 1, Math.max(cell - gap, 0.5), ROW - 2);
      if (!isFinite && !Number.isNaN(value) && cell > 5) {
        // An infinity is told from nan by its triangle, not by a second hue.
        context.fillStyle = surface;
        const middle = x + (cell - gap) / 2;
        const direction = value > 0 ? 1 : -1;
        context.beginPath();
        context.moveTo(middle - 3, index * ROW + ROW / 2 + 3 * direction);
        context.lineTo(middle + 3, index * ROW + ROW / 2 + 3 * direction);
        context.lineTo(middle, index * ROW + ROW / 2 - 3 * direction);
        context.fill();
      }
    });
  });
  context.globalAlpha = 1;
}
