/** What sets the runs apart: fields of their specs, how their losses ended, and what they cost. */

import type { Comparison, Run } from "../../api/types.ts";
import { Box, TableHead, type HeadCell } from "../../components/Box.tsx";
import { SpecRow } from "../../components/SpecRow.tsx";
import { apart, formatBytes, formatInteger, toNumber } from "../../format/number.ts";
import { differences, flatten, isLabel } from "../../format/spec.ts";
import { formatSeconds } from "../../format/time.ts";
import { lowerLoss } from "./notes.ts";

export function ConfigDifference({ runs, labels }: { runs: readonly Run[]; labels: readonly string[] }) {
  const rows = differences(runs.map((run) => run.spec)).filter(({ path }) => !isLabel(path));
  const total = runs[0] ? flatten(runs[0].spec).size : 0;
  return (
    <Box title="Config" aside={`${rows.length} of ${total} ${rows.length === 1 ? "differs" : "differ"}`}>
      {rows.length > 0 && (
        <table className="grid-table">
          <TableHead cells={["Field", ...runHeads(runs, labels)]} />
          <tbody>
            {rows.map(({ path, values }) => (
              <SpecRow key={path} path={path} cells={values.map((value, index) => ({ key: runs[index]?.id ?? "", value }))} />
            ))}
          </tbody>
        </table>
      )}
    </Box>
  );
}

/** What heads a run's column: its label, and the name and id it is short for. */
function runHeads(runs: readonly Run[], labels: readonly string[]): HeadCell[] {
  return runs.map(({ id, name }, index) => ({
    key: id,
    label: (
      <span className="clip-label" title={`${name} · ${id}`}>
        {labels[index] ?? name}
      </span>
    ),
  }));
}

interface CostProps {
  each: readonly (Comparison | undefined)[];
  runs: readonly Run[];
  labels: readonly string[];
}

type Learned = Comparison["learning"]["a"];

/** How each run's loss ended, and whose stays below the first one's. */
export function LossBox({ each, runs, labels }: CostProps) {
  const known = each.filter((comparison) => comparison !== undefined);
  const [first] = known;
  if (first === undefined || known.length < each.length) return null;
  const sides = [first.learning.a, ...known.map(({ learning }) => learning.b)];
  if (sides.every(({ last }) => last === null)) return null;
  const lower = known.flatMap((comparison, index) => lowerLoss(comparison, labels[0] ?? "A", labels[index + 1] ?? "B") ?? []);
  return (
    <Box title="Loss">
      <table className="grid-table">
        <TableHead cells={["Of the run", ...runHeads(runs, labels)]} />
        <tbody>
          <LossRow label="Last of attempted steps" sides={sides} of={({ last }) => toNumber(last)} />
          <LossRow label="Lowest of applied steps" sides={sides} of={({ lowest }) => lowest} at={({ lowest_step: step }) => step} />
          <LossRow label="Mean, last 10 % applied" sides={sides} of={({ mean_of_last: mean }) => toNumber(mean)} />
        </tbody>
      </table>
      {lower.length > 0 && (
        <div className="body ink-2">
          {lower.map((sentence) => (
            <p key={sentence}>{sentence}</p>
          ))}
        </div>
      )}
    </Box>
  );
}

interface LossRowProps {
  label: string;
  sides: readonly Learned[];
  of: (side: Learned) => number | null;
  at?: (side: Learned) => number | null;
}

function LossRow({ label, sides, of, at }: LossRowProps) {
  const texts = apart(sides.map(of));
  return (
    <tr>
      <td>{label}</td>
      {sides.map((side, index) => {
        const step = at?.(side) ?? null;
        return (
          <td key={index}>
            {texts[index]} {step !== null && <span className="ink-3">at {formatInteger(step)}</span>}
          </td>
        );
      })}
    </tr>
  );
}

type Ratio = Comparison["cost"]["step_time_s"];

const COSTS: readonly (readonly [string, keyof Comparison["cost"], (value: number | null) => string])[] = [
  ["Step time, median", "step_time_s", formatSeconds],
  ["Peak memory", "peak_memory_bytes", formatBytes],
  ["Newton-Schulz calls", "ns_calls", formatInteger],
];

/** The first run's cost, and each other's with how many times the first one's it is. */
export function CostBox({ each, runs, labels }: CostProps) {
  const known = each.filter((comparison) => comparison !== undefined);
  const rows = COSTS.map(([label, key, format]) => ({ label, format, ratios: known.map(({ cost }) => cost[key]) })).filter(
    ({ ratios }) => ratios.some(({ a, b }) => a !== null || b !== null),
  );
  if (known.length < each.length || rows.length === 0) return null;
  return (
    <Box title="Cost">
      <table className="grid-table">
        <TableHead cells={["Of the run", ...runHeads(runs, labels)]} />
        <tbody>
          {rows.map(({ label, format, ratios }) => (
            <tr key={label}>
              <td>{label}</td>
              <td>{format(ratios[0]?.a ?? null)}</td>
              {ratios.map((ratio, index) => (
                <td key={index}>
                  {format(ratio.b)} <RatioMark ratio={ratio} />
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </Box>
  );
}

function RatioMark({ ratio: { ratio } }: { ratio: Ratio }) {
  return ratio === null ? null : <span className="ink-3">{ratio.toFixed(2)}×</span>;
}
