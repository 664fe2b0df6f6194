/** One field of a spec as a table row: its path, then its values side by side. */

import type { ReactNode } from "react";

import { SpecValue } from "./marks.tsx";

export interface SpecCell {
  key: string;
  value: unknown;
  className?: string;
  /** What is not known yet is left blank, which is not the same as a null. */
  isBlank?: boolean;
}

export function SpecRow({ path, cells, isSet, children }: { path: string; cells: readonly SpecCell[]; isSet?: boolean; children?: ReactNode }) {
  return (
    <tr className={isSet ? "is-set" : undefined}>
      <td className="mono">{path}</td>
      {cells.map(({ key, value, className, isBlank }) => (
        <td key={key} className={className}>
          {isBlank ? "" : <SpecValue path={path} value={value} />}
        </td>
      ))}
      {children}
    </tr>
  );
}
