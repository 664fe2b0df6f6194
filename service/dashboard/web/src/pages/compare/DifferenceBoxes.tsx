/** What sets the runs apart: fields of their specs, and what they cost. */

import type { Comparison, Run } from "../../api/types.ts";
import { SpecValue } from "../../components/marks.tsx";
import { formatBytes, formatInteger } from "../../format/number.ts";
import { differences, flatten, isLabel } from "../../format/spec.ts";
import { formatSeconds } from "../../format/time.ts";

export function ConfigDifference({ runs, labels }: { runs: readonly Run[]; labels: readonly string[] }) {
  const rows = differences(runs.map((run) => run.spec)).filter(({ path }) => !isLabel(path));
  const total = runs[0] ? flatten(runs[0].spec).size : 0;
  return (
    <section className="box scroll-x">
      <header>
        <h2 className="h2">Config</h2>
        <span className="aside num">
          {rows.length} of {total} {rows.length === 1 ? "differs" : "differ"}
        </span>
      </header>
      {rows.length > 0 && (
        <table className="grid-table">
          <thead>
            <tr>
              <th scope="col">Field</th>
              {labels.map((label, index) => (
                <th scope="col" key={runs[index]?.id}>
                  {label}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {rows.map(({ path, values }) => (
              <tr key={path}>
                <td className="mono">{path}</td>
                {values.map((value, index) => (
                  <td key={runs[index]?.id}>
                    <SpecValue path={path} value={value} />
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </section>
  );
}

interface Ratio {
  a: number | null;
  b: number | null;
  ratio: number | null;
}

export function CostBox({ comparison, labels }: { comparison: Comparison; labels: readonly string[] }) {
  const { cost } = comparison;
  const rows: [string, Ratio, (value: number | null) => string][] = [
    ["Step time, median", cost.step_time_s, formatSeconds],
    ["Peak memory", cost.peak_memory_bytes, formatBytes],
    ["Newton-Schulz calls", cost.ns_calls, formatInteger],
  ];
  const shown = rows.filter(([, { a, b }]) => a !== null || b !== null);
  if (shown.length === 0) return null;
  return (
    <section className="box scroll-x">
      <header>
        <h2 className="h2">Cost</h2>
      </header>
      <table className="grid-table">
        <thead>
          <tr>
            <th scope="col">Of the run</th>
            {labels.map((label) => (
              <th scope="col" key={label}>
                {label}
              </th>
            ))}
            <th scope="col">Ratio</th>
          </tr>
        </thead>
        <tbody>
          {shown.map(([label, { a, b, ratio }, format]) => (
            <tr key={label}>
              <td>{label}</td>
              <td>{format(a)}</td>
              <td>{format(b)}</td>
              <td>{ratio === null ? "—" : `${ratio.toFixed(2)}×`}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}
