/** All runs: filter, sort, select, compare. Everything a colleague should see is in the address. */

import { useCallback, useMemo, useRef, useState } from "react";

import { withQuery } from "../../api/client.ts";
import { useResource } from "../../api/resource.ts";
import { Key, Menu, Segments } from "../../components/controls.tsx";
import { useShortcuts } from "../../components/keyboard.tsx";
import { EmptyState, ErrorState, LoadingState } from "../../components/states.tsx";
import { useTitle } from "../../components/title.ts";
import { copyText } from "../../components/toast.tsx";
import { formatInteger, plural } from "../../format/number.ts";
import { changeQuery, href, Link, navigate, runHref, usePlace } from "../../routing/router.tsx";
import { COLUMNS, DEFAULT_COLUMNS, readColumns, writeColumns } from "./columns.tsx";
import { countOf, segmentOf, SEGMENTS, totalOf, useRunCounts, withoutSegment } from "./counts.ts";
import { FilterField } from "./FilterField.tsx";
import { GROUPINGS, groupRuns } from "./grouping.ts";
import { compareHref } from "./links.ts";
import { withToken } from "./query.ts";
import { RunTable } from "./RunTable.tsx";
import { MOST_COMPARED, SelectionBar } from "./SelectionBar.tsx";
import { useRunList } from "./useRunList.ts";
import { SavedViews } from "./SavedViews.tsx";

const DEFAULT_SORT = "-created_at";
interface ExperimentList {
  experiments: { id: string; name: string }[];
}

export function RunsPage() {
  useTitle("Runs");
  const { query: address } = usePlace();
  const query = address.get("q") ?? "";
  const sort = address.get("sort") ?? DEFAULT_SORT;
  const group = address.get("group") ?? "";
  const selectedText = address.get("selected") ?? "";
  const columnsText = address.get("cols");

  const list = useRunList(query, sort);
  const counts = useRunCounts(query);
  const experiments = useResource<ExperimentList>(group === "experiment" ? "/experiments" : null);
  const visible = useMemo(() => readColumns(columnsText), [columnsText]);
  const selected = useMemo(() => new Set(selectedText.split(",").filter(Boolean)), [selectedText]);
  const [cursor, setCursor] = useState<string | null>(null);
  const filterInput = useRef<HTMLInputElement>(null);

  const groups = useMemo(() => {
    if (group === "") return null;
    const names = new Map(experiments.data?.experiments.map(({ id, name }) => [id, name]));
    return groupRuns(list.runs, group, names);
  }, [group, list.runs, experiments.data]);
  const inOrder = useMemo(() => groups?.flatMap((each) => each.runs) ?? list.runs, [groups, list.runs]);

  const setQuery = useCallback((text: string) => changeQuery({ q: text }), []);
  const setSort = useCallback((key: string | null) => changeQuery({ sort: key === DEFAULT_SORT ? null : key }), []);
  const setSelected = useCallback((ids: ReadonlySet<string>) => changeQuery({ selected: [...ids].join() }), []);
  const compare = () => {
    const ids = [...selected];
    if (ids.length < 2 || ids.length > MOST_COMPARED) return;
    // In the order of the rows on screen, so that the address does not depend on the order of clicks.
    const place = new Map(inOrder.map((run, index) => [run.id, index]));
    ids.sort((a, b) => (place.get(a) ?? 0) - (place.get(b) ?? 0));
    navigate(compareHref(ids));
  };
  const move = (by: number) => {
    const at = inOrder.findIndex((run) => run.id === cursor);
    const next = inOrder[at < 0 ? 0 : Math.min(Math.max(at + by, 0), inOrder.length - 1)];
    if (next) setCursor(next.id);
  };

  useShortcuts({
    "/": () => filterInput.current?.focus(),
    j: () => move(1),
    k: () => move(-1),
    x: () => {
      if (cursor === null) return;
      const next = new Set(selected);
      if (!next.delete(cursor)) next.add(cursor);
      setSelected(next);
    },
    c: compare,
    Enter: () => {
      if (cursor !== null) navigate(runHref(cursor));
    },
    Escape: () => {
      if (selected.size > 0) setSelected(new Set());
      else setCursor(null);
    },
  });

  const setSegment = (value: string) => {
    const cleared = withoutSegment(query);
    setQuery(value === "" ? cleared : withToken(cleared, value.split(":")[0] as string, value));
  };
  const toggleColumn = (id: string) => {
    const next = new Set(visible);
    if (!next.delete(id)) next.add(id);
    changeQuery({ cols: writeColumns(next) });
  };
  const problem = list.error !== null && list.error.problem.field === "q" ? list.error : null;
  const selectedRuns = list.runs.filter((run) => selected.has(run.id));

  return (
    <main className="page runs-page" id="main" tabIndex={-1}>
      <div className="row wrap-row">
        <h1 className="h1">Runs</h1>
        <span className="ink-3 num beside-h1">{list.isLoading ? "" : countText(list.runs.length, list.hasMore, totalOf(query, counts))}</span>
        <span className="grow" />
        <Segments
          label="Which runs"
          options={SEGMENTS.map(({ value, label }) => ({
            value,
            label: counts === undefined ? label : `${label} ${formatInteger(countOf(value, counts))}`,
          }))}
          value={segmentOf(query)}
          onChange={setSegment}
        />
      </div>
      <div className="row wrap-row tools">
        <FilterField
          query={query}
          problem={problem === null ? null : [problem.message, problem.problem.remedy].filter(Boolean).join("; ")}
          inputRef={filterInput}
          onChange={setQuery}
        />
        <div className="row">
          <Menu
            label={
              <>
                Group <span className="ink-3">{group || "none"}</span>
              </>
            }
          >
            {(close) =>
              GROUPINGS.map(([value, label]) => (
                <button
                  key={value}
                  type="button"
                  aria-pressed={value === group}
                  onClick={() => {
                    changeQuery({ group: value });
                    close();
                  }}
                >
                  {label}
                  {value === group && <span className="hint">now</span>}
                </button>
              ))
            }
          </Menu>
          <span className="wide-only">
            <Menu
              label={
                <>
                  Columns{" "}
                  <span className="ink-3 num">
                    {visible.size}/{COLUMNS.length}
                  </span>
                </>
              }
            >
              {() => (
                <>
                  {COLUMNS.filter(({ id }) => id !== "name").map(({ id, label }) => (
                    <label key={id}>
                      <input
                        type="checkbox"
                        className="checkbox"
                        checked={visible.has(id)}
                        onChange={() => toggleColumn(id)}
                      />
                      {id === "curve" ? "Loss curve" : label}
                    </label>
                  ))}
                  <button type="button" onClick={() => changeQuery({ cols: writeColumns(new Set(DEFAULT_COLUMNS)) })}>
                    Default columns
                  </button>
                </>
              )}
            </Menu>
          </span>
          <SavedViews />
          <button
            type="button"
            className="btn wide-only"
            onClick={() => void copyText(window.location.href, "Link copied.")}
          >
            Copy link
          </button>
        </div>
      </div>
      <RunsBody list={list} hasFilter={query !== ""}>
        <RunTable
          runs={list.runs}
          groups={groups}
          visible={visible}
          sort={sort}
          onSort={setSort}
          selected={selected}
          onSelect={setSelected}
          cursor={cursor}
          hasMore={list.hasMore}
          onNeedMore={list.loadMore}
          footer={list.hasMore ? <p className="list-end">Loading more …</p> : null}
        />
      </RunsBody>
      <SelectionBar ids={selected} runs={selectedRuns} onCompare={compare} onClear={() => setSelected(new Set())} />
    </main>
  );
}

function countText(loaded: number, hasMore: boolean, total: number | null): string {
  if (total !== null) return plural(total, "run");
  return hasMore ? `the first ${formatInteger(loaded)}` : plural(loaded, "run");
}

function RunsBody(props: { list: ReturnType<typeof useRunList>; hasFilter: boolean; children: React.ReactNode }) {
  const { list } = props;
  if (list.isLoading) return <LoadingState what="runs" />;
  if (list.error !== null && list.runs.length === 0 && list.error.problem.field !== "q") {
    return <ErrorState error={list.error} onRetry={list.reload} />;
  }
  if (list.runs.length > 0) return props.children;
  if (props.hasFilter) {
    return (
      <EmptyState title="No run matches">
        <p>
          Take a condition away, or <Link to={withQuery("/ui/runs", {})}>show all runs</Link>.
        </p>
      </EmptyState>
    );
  }
  return (
    <EmptyState title="No runs yet">
      <p>Submit one here, or run the published experiment from a shell:</p>
      <pre>muonscope experiment run thirty-step</pre>
      <Link to={href("/submit")} className="btn primary">
        Submit a run <Key>N</Key>
      </Link>
    </EmptyState>
  );
}
