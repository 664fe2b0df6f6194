/** The matrix: live cells, what moved, whether momentum stayed finite, what came of it, and the published check. */

import { Fragment } from "react";

import type { Run } from "../../api/types.ts";
import { MovedDots, OrderingMark, ProgressBar, SpecValue, StatusMark, VerdictChip } from "../../components/marks.tsx";
import { formatInteger } from "../../format/number.ts";
import { Link, runHref } from "../../routing/router.tsx";
import { runShare } from "../runs/columns.tsx";
import { fieldLabel, type Check, type Matrix, type MatrixCell, type MatrixRow } from "./matrix.ts";

interface Props {
  matrix: Matrix;
  selected: string | null;
  onSelect: (key: string) => void;
}

/** How many rows from `index` on share their first value: the first field is shown once for them. */
function spanOf(rows: readonly MatrixRow[], index: number): number {
  const value = JSON.stringify(rows[index]?.values[0]);
  if (index > 0 && JSON.stringify(rows[index - 1]?.values[0]) === value) return 0;
  let span = 1;
  while (index + span < rows.length && JSON.stringify(rows[index + span]?.values[0]) === value) span += 1;
  return span;
}

export function MatrixTable({ matrix, selected, onSelect }: Props) {
  const { fields, orderings, rows } = matrix;
  return (
    <div className="scroll-x matrix-scroll" tabIndex={0} role="region" aria-label="Results">
      <table className="matrix">
        <thead>
          <tr>
            {fields.length > 0 && (
              <td colSpan={fields.length}>
                <span className="visually-hidden">Configuration</span>
              </td>
            )}
            {orderings.map((ordering) => (
              <th key={ordering} scope="colgroup" className="edge group" colSpan={3}>
                <OrderingMark ordering={ordering} />
              </th>
            ))}
          </tr>
          <tr>
            {fields.map((field) => (
              <th key={field} scope="col">
                {fieldLabel(field)}
              </th>
            ))}
            {orderings.map((ordering) => (
              <Fragment key={ordering}>
                <th scope="col" className="edge">
                  Moved
                </th>
                <th scope="col">Momentum</th>
                <th scope="col">Outcome</th>
              </Fragment>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map((row, index) => {
            const span = spanOf(rows, index);
            const isSplit = fields.length > 1;
            return (
              <tr
                key={row.key}
                className={[row.key === selected && "selected", span > 0 && index > 0 && isSplit && "new-group"].filter(Boolean).join(" ") || undefined}
                aria-selected={row.key === selected}
                onClick={(event) => {
                  if (!(event.target as HTMLElement).closest("a")) onSelect(row.key);
                }}
              >
                {fields.map((field, at) => {
                  if (at === 0 && isSplit) {
                    return span === 0 ? null : (
                      <td key={field} rowSpan={span} className="stage">
                        {field === "zero_stage" ? "Stage " : ""}
                        <SpecValue path={field} value={row.values[0]} />
                      </td>
                    );
                  }
                  return (
                    <td key={field}>
                      <SpecValue path={field} value={row.values[at]} />
                    </td>
                  );
                })}
                {row.cells.map((cell, at) => (
                  <ResultCells key={orderings[at]} cell={cell} known={matrix.known} />
                ))}
              </tr>
            );
          })}
        </tbody>
      </table>
    </div>
  );
}

function ResultCells({ cell, known }: { cell: MatrixCell | null; known: string }) {
  if (cell === null) {
    return (
      <td className="edge ink-3" colSpan={3}>
        not in this experiment
      </td>
    );
  }
  const { run, published } = cell;
  const { summary } = run;
  if (run.finished_at === null) {
    return (
      <>
        <td className="edge" colSpan={2}>
          <Link to={runHref(run.id)} className="row">
            <StatusMark status={run.status} share={runShare(run)} />
            <ProgressBar share={runShare(run)} label={`${run.name}: steps recorded`} />
            <span className="ink-3">{formatInteger(summary?.steps ?? 0)}</span>
          </Link>
        </td>
        <td className="ink-3">—</td>
      </>
    );
  }
  const moved = summary?.parameters_moved ?? null;
  const total = summary?.parameters_total ?? null;
  const isStill = moved === 0;
  const isBad = summary?.momentum_finite === false;
  return (
    <>
      <td className={isBad ? "edge bad" : "edge"}>
        {moved === null || total === null ? (
          <span className="ink-3">—</span>
        ) : (
          <>
            <MovedDots moved={moved} total={total} />
            <span className={isStill && isBad ? "nonfinite" : undefined}>
              {moved}/{total}
            </span>
          </>
        )}
      </td>
      <td className={isBad ? "bad" : undefined}>
        {summary?.momentum_finite == null ? (
          <span className="ink-3">—</span>
        ) : summary.momentum_finite ? (
          "finite"
        ) : (
          <span className="nonfinite">non-finite</span>
        )}
      </td>
      <td className={isBad ? "bad" : undefined}>
        <Link to={runHref(run.id)} className="row outcome">
          {hasVerdict(run) ? <VerdictChip verdict={run.verdict} /> : <StatusMark status={run.status} />}
          {run.verdict?.step != null && <span className="ink-3">step {formatInteger(run.verdict.step)}</span>}
          <CheckMark check={published} known={known} />
        </Link>
      </td>
    </>
  );
}

/** Whether a run's record proves something; one that failed before it could is `failed`, and its page says why. */
function hasVerdict(run: Run): boolean {
  return run.verdict !== null && !(run.status === "failed" && run.verdict.name === "inconclusive");
}

function CheckMark({ check, known }: { check: Check; known: string }) {
  if (check === null) return null;
  if (check.matches) {
    return (
      <span className="published" title={`Equals ${known}`}>
        <span aria-hidden="true">=</span>
        <span className="visually-hidden">equals {known}</span>
      </span>
    );
  }
  return (
    <span className="published differs" title={check.differences.join("; ")}>
      ≠ <span className="visually-hidden">differs from {known}: {check.differences.join("; ")}</span>
    </span>
  );
}
