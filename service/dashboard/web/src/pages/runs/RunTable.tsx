/** The run table: TanStack Table for columns, sorting and selection state, TanStack Virtual for the rows in view. */

import {
  columnVisibilityFeature,
  createColumnHelper,
  rowSelectionFeature,
  rowSortingFeature,
  tableFeatures,
  useTable,
  type SortingState,
} from "@tanstack/react-table";
import { useVirtualizer } from "@tanstack/react-virtual";
import { memo, useCallback, useEffect, useMemo, useRef, type ReactNode } from "react";

import type { Run } from "../../api/types.ts";
import { useIsNarrow } from "../../components/narrow.ts";
import { navigate, runHref } from "../../routing/router.tsx";
import { COLUMNS, type RunColumn } from "./columns.tsx";
import type { RunGroup } from "./grouping.ts";
import { RunCard } from "./RunCard.tsx";

const ROW = 30;
const CARD_ROW = 78;
const SELECT_WIDTH = 34;
const PREFETCH_ROWS = 20;

const features = tableFeatures({ columnVisibilityFeature, rowSelectionFeature, rowSortingFeature });
const helper = createColumnHelper<typeof features, Run>();
const columns = helper.columns(
  COLUMNS.map((column) =>
    // Sorting needs an accessor, although the service does it: the value itself is never compared here.
    helper.accessor((run) => run.id, {
      id: column.id,
      header: column.label,
      enableSorting: column.sort !== undefined,
      cell: ({ row }) => column.cell(row.original),
    }),
  ),
);
const COLUMN_BY_ID = new Map(COLUMNS.map((column) => [column.id, column]));
const COLUMN_BY_SORT = new Map(COLUMNS.flatMap((column) => (column.sort ? [[column.sort, column]] : [])));

interface Props {
  runs: readonly Run[];
  groups: readonly RunGroup[] | null;
  visible: ReadonlySet<string>;
  sort: string;
  onSort: (sort: string | null) => void;
  selected: ReadonlySet<string>;
  onSelect: (ids: ReadonlySet<string>) => void;
  cursor: string | null;
  hasMore: boolean;
  onNeedMore: () => void;
  footer: ReactNode;
}

type Item = { kind: "run"; run: Run; index: number } | { kind: "group"; group: RunGroup };

function toItems(runs: readonly Run[], groups: readonly RunGroup[] | null): Item[] {
  if (groups === null) return runs.map((run, index) => ({ kind: "run", run, index }));
  let index = 0;
  return groups.flatMap((group): Item[] => [
    { kind: "group", group },
    ...group.runs.map((run): Item => ({ kind: "run", run, index: index++ })),
  ]);
}

export function RunTable(props: Props) {
  const { runs, groups, visible, selected, onSelect, cursor } = props;
  const isNarrow = useIsNarrow();
  const scroller = useRef<HTMLDivElement>(null);
  const data = useMemo(() => [...runs], [runs]);
  const descending = props.sort.startsWith("-");
  const sortedColumn = COLUMN_BY_SORT.get(props.sort.replace(/^-/, ""))?.id;

  const sorting: SortingState = sortedColumn ? [{ id: sortedColumn, desc: descending }] : [];
  const table = useTable({
    features,
    columns,
    data,
    getRowId: (run) => run.id,
    manualSorting: true,
    sortDescFirst: true,
    enableSortingRemoval: true,
    state: {
      sorting,
      columnVisibility: Object.fromEntries(COLUMNS.map(({ id }) => [id, visible.has(id)])),
      rowSelection: Object.fromEntries([...selected].map((id) => [id, true as const])),
    },
    onSortingChange: (updater) => {
      const [next] = typeof updater === "function" ? updater(sorting) : updater;
      const key = next && COLUMN_BY_ID.get(next.id)?.sort;
      props.onSort(next && key ? (next.desc ? `-${key}` : key) : null);
    },
    onRowSelectionChange: (updater) => {
      const before = Object.fromEntries([...selected].map((id) => [id, true as const]));
      onSelect(new Set(Object.keys(typeof updater === "function" ? updater(before) : updater)));
    },
  });

  const items = useMemo(() => toItems(runs, groups), [runs, groups]);
  const rowHeight = isNarrow ? CARD_ROW : ROW;
  const virtual = useVirtualizer({
    count: items.length,
    getScrollElement: () => scroller.current,
    estimateSize: (index) => (items[index]?.kind === "group" ? ROW : rowHeight),
    overscan: 8,
    scrollMargin: 0,
    scrollPaddingStart: 34,
  });
  useEffect(() => virtual.measure(), [virtual, rowHeight, groups]);

  const inView = virtual.getVirtualItems();
  const lastInView = inView.at(-1)?.index ?? 0;
  const { hasMore, onNeedMore } = props;
  useEffect(() => {
    if (hasMore && lastInView >= items.length - PREFETCH_ROWS) onNeedMore();
  }, [hasMore, lastInView, items.length, onNeedMore]);

  useEffect(() => {
    if (cursor === null) return;
    const index = items.findIndex((item) => item.kind === "run" && item.run.id === cursor);
    if (index >= 0) virtual.scrollToIndex(index);
    // Only when the cursor moves: rows that arrive must not pull the view back to it.
  }, [cursor]);

  const shown = table.getVisibleLeafColumns().map((column) => COLUMN_BY_ID.get(column.id) as RunColumn);
  const shownKey = shown.map(({ id }) => id).join();
  const before = inView[0]?.start ?? 0;
  const after = virtual.getTotalSize() - (inView.at(-1)?.end ?? 0);
  const latestSelected = useRef(selected);
  latestSelected.current = selected;
  const toggle = useCallback(
    (id: string) => {
      const next = new Set(latestSelected.current);
      if (!next.delete(id)) next.add(id);
      onSelect(next);
    },
    [onSelect],
  );

  if (isNarrow) {
    return (
      <div className="run-scroll cards" ref={scroller} tabIndex={0} aria-label="Runs" role="region">
        <ul style={{ height: virtual.getTotalSize() }}>
          {inView.map(({ index, start, size }) => {
            const item = items[index];
            if (!item) return null;
            return (
              <li key={item.kind === "run" ? item.run.id : item.group.key} style={{ transform: `translateY(${start}px)`, height: size }}>
                {item.kind === "group" ? (
                  <div className="group-title">{item.group.title}</div>
                ) : (
                  <RunCard run={item.run} isSelected={selected.has(item.run.id)} onToggle={toggle} />
                )}
              </li>
            );
          })}
        </ul>
        {props.footer}
      </div>
    );
  }

  return (
    <div className="run-scroll" ref={scroller}>
      <table
        className="run-table"
        aria-rowcount={items.length + 1}
        style={{ minWidth: SELECT_WIDTH + shown.reduce((sum, column) => sum + column.width, 0) }}
      >
        <colgroup>
          <col style={{ width: SELECT_WIDTH }} />
          {shown.map((column) => (
            <col key={column.id} style={column.id === "name" ? undefined : { width: column.width }} />
          ))}
        </colgroup>
        <thead>
          {table.getHeaderGroups().map((group) => (
            <tr key={group.id} aria-rowindex={1}>
              <th className="pin select">
                <input
                  type="checkbox"
                  className="checkbox"
                  aria-label="Select all loaded runs"
                  checked={runs.length > 0 && runs.every((run) => selected.has(run.id))}
                  onChange={(event) => onSelect(new Set(event.target.checked ? runs.map((run) => run.id) : []))}
                />
              </th>
              {group.headers.map((header) => {
                const column = COLUMN_BY_ID.get(header.column.id) as RunColumn;
                const direction = header.column.getIsSorted();
                return (
                  <th
                    key={header.id}
                    scope="col"
                    className={headClass(column)}
                    aria-sort={direction ? (direction === "desc" ? "descending" : "ascending") : undefined}
                  >
                    {column.sort ? (
                      <button type="button" onClick={header.column.getToggleSortingHandler()}>
                        {column.label}
                        {direction ? <span aria-hidden="true">{direction === "desc" ? " ↓" : " ↑"}</span> : null}
                      </button>
                    ) : (
                      column.label
                    )}
                  </th>
                );
              })}
            </tr>
          ))}
        </thead>
        <tbody>
          {before > 0 && <Spacer height={before} />}
          {inView.map(({ index }) => {
            const item = items[index];
            if (!item) return null;
            if (item.kind === "group") {
              return (
                <tr key={`group ${item.group.key}`} className="group" aria-rowindex={index + 2}>
                  <td colSpan={shown.length + 1}>
                    <span className="group-title">
                      {item.group.title} <span className="ink-3">{item.group.runs.length}</span>
                    </span>
                  </td>
                </tr>
              );
            }
            return (
              <RunRow
                key={item.run.id}
                run={item.run}
                shown={shown}
                shownKey={shownKey}
                rowIndex={index + 2}
                isSelected={selected.has(item.run.id)}
                isCursor={item.run.id === cursor}
                onToggle={toggle}
              />
            );
          })}
          {after > 0 && <Spacer height={after} />}
        </tbody>
      </table>
      {props.footer}
    </div>
  );
}

function headClass(column: RunColumn): string | undefined {
  return [column.id === "name" && "pin name", column.isNumeric && "number"].filter(Boolean).join(" ") || undefined;
}

function Spacer({ height }: { height: number }) {
  return (
    <tr aria-hidden="true" className="spacer" style={{ height }}>
      <td />
    </tr>
  );
}

interface RowProps {
  run: Run;
  shown: readonly RunColumn[];
  shownKey: string;
  rowIndex: number;
  isSelected: boolean;
  isCursor: boolean;
  onToggle: (id: string) => void;
}

const RunRow = memo(
  function RunRow({ run, shown, rowIndex, isSelected, isCursor, onToggle }: RowProps) {
    return (
      <tr
        aria-rowindex={rowIndex}
        aria-selected={isSelected}
        className={[isSelected && "selected", isCursor && "cursor"].filter(Boolean).join(" ") || undefined}
        onClick={(event) => {
          if ((event.target as HTMLElement).closest("a, button, input")) return;
          if (window.getSelection()?.toString()) return; // the reader is copying a figure
          navigate(runHref(run.id));
        }}
      >
        <td className="pin select">
          <input
            type="checkbox"
            className="checkbox"
            checked={isSelected}
            onChange={() => onToggle(run.id)}
            aria-label={`Select ${run.name}`}
          />
        </td>
        {shown.map((column) => (
          <td key={column.id} className={headClass(column)}>
            {column.cell(run)}
          </td>
        ))}
      </tr>
    );
  },
  (before, after) =>
    before.run === after.run &&
    before.shownKey === after.shownKey &&
    before.rowIndex === after.rowIndex &&
    before.isSelected === after.isSelected &&
    before.isCursor === after.isCursor &&
    before.onToggle === after.onToggle,
);
