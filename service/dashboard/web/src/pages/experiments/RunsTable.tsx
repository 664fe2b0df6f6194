/** An experiment of many orderings, or of one's own: a row a run, those that differ in their ordering alone below each other. */

import { FinalScale, OrderingMark, Scalar, SpecValue } from "../../components/marks.tsx";
import { formatInteger, formatLoss, formatScalar, toNumber } from "../../format/number.ts";
import { fieldLabel, type MatrixCell, type MatrixRow } from "./matrix.ts";
import type { TableProps } from "./MatrixTable.tsx";
import { ResultCells } from "./ResultCells.tsx";

const RESULTS = ["Moved", "Momentum", "Outcome", "Overflows", "Scale at end", "Weight motion", "Last loss"];

export function RunsTable({ matrix, selected, onSelect }: TableProps) {
  return (
    <div className="scroll-x matrix-scroll" tabIndex={0} role="region" aria-label="Results">
      <table className="matrix">
        <thead>
          <tr>
            {[...matrix.fields.map(fieldLabel), "Ordering"].map((label) => (
              <th key={label} scope="col">
                {label}
              </th>
            ))}
            {RESULTS.map((label, at) => (
              <th key={label} scope="col" className={at === 0 ? "edge" : undefined}>
                {label}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {matrix.rows.map((row, index) => (
            <Group
              key={row.key}
              row={row}
              fields={matrix.fields}
              known={matrix.known}
              isFirst={index === 0}
              isSelected={row.key === selected && matrix.rows.length > 1}
              onSelect={onSelect}
            />
          ))}
        </tbody>
      </table>
    </div>
  );
}

interface GroupProps {
  row: MatrixRow;
  fields: string[];
  known: string;
  isFirst: boolean;
  isSelected: boolean;
  onSelect: (key: string) => void;
}

function Group({ row, fields, known, isFirst, isSelected, onSelect }: GroupProps) {
  const cells = row.cells.filter((cell) => cell !== null);
  return cells.map((cell, at) => (
    <tr
      key={cell.run.id}
      className={[isSelected && "selected", at === 0 && !isFirst && "new-group"].filter(Boolean).join(" ") || undefined}
      aria-selected={isSelected}
      onClick={(event) => {
        if (!(event.target as HTMLElement).closest("a")) onSelect(row.key);
      }}
    >
      {at === 0 &&
        fields.map((field, place) => (
          <td key={field} rowSpan={cells.length} className="stage">
            <SpecValue path={field} value={row.values[place]} />
          </td>
        ))}
      <td>
        <OrderingMark ordering={cell.run.spec.step_ordering} />
      </td>
      <ResultCells cell={cell} known={known} />
      <Figures cell={cell} />
    </tr>
  ));
}

function Figures({ cell }: { cell: MatrixCell }) {
  const { summary } = cell.run;
  return (
    <>
      <td>{formatInteger(summary?.overflows)}</td>
      <td>
        <FinalScale run={cell.run} />
      </td>
      <td>
        <Scalar value={toNumber(summary?.max_weight_motion)} format={(value) => formatScalar(value, 4)} />
      </td>
      <td>
        <Scalar value={toNumber(summary?.last_loss)} format={formatLoss} />
      </td>
    </>
  );
}
