/** The matrix: live cells, what moved, whether momentum stayed finite, what came of it, and the published check. */

import { Fragment } from "react";

import { OrderingMark, SpecValue } from "../../components/marks.tsx";
import { fieldLabel, type Matrix, type MatrixRow } from "./matrix.ts";
import { ResultCells } from "./ResultCells.tsx";
import { RunsTable } from "./RunsTable.tsx";

export interface TableProps {
  matrix: Matrix;
  selected: string | null;
  onSelect: (key: string) => void;
}

/** More orderings than this do not fit beside each other. */
const MOST_BESIDE = 2;

/** How many rows from `index` on share their first value: the first field is shown once for them. */
function spanOf(rows: readonly MatrixRow[], index: number): number {
  const value = JSON.stringify(rows[index]?.values[0]);
  if (index > 0 && JSON.stringify(rows[index - 1]?.values[0]) === value) return 0;
  let span = 1;
  while (index + span < rows.length && JSON.stringify(rows[index + span]?.values[0]) === value) span += 1;
  return span;
}

export function MatrixTable(props: TableProps) {
  // One's own question may be any figure's, the loss above all; a built-in one's is in what its known figures have.
  const isRowARun = props.matrix.isOwn || props.matrix.orderings.length > MOST_BESIDE;
  return isRowARun ? <RunsTable {...props} /> : <PairsTable {...props} />;
}

function PairsTable({ matrix, selected, onSelect }: TableProps) {
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
