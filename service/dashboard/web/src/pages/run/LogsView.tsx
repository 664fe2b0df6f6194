/** The logs of the newest attempt: followed while the run lives, searched, and filtered by rank. */

import { useVirtualizer } from "@tanstack/react-virtual";
import { useCallback, useEffect, useMemo, useRef, useState } from "react";

import { requestText, runPath } from "../../api/client.ts";
import { useResource } from "../../api/resource.ts";
import type { Run } from "../../api/types.ts";
import { Segments } from "../../components/controls.tsx";
import { EmptyState, ErrorState, LoadingState } from "../../components/states.tsx";
import { plural } from "../../format/number.ts";
import { isRecording } from "../../format/spec.ts";
import { TERMINAL } from "../../format/words.ts";
import { filterLines, ranksOf, readLines } from "./logText.ts";

const FOLLOW_MS = 2000;
const LINE = 18;

function loadText(path: string, signal: AbortSignal): Promise<string> {
  return requestText(path, { signal });
}

export default function LogsView({ run }: { run: Run }) {
  const logs = useResource(runPath(run.id, "logs"), loadText);
  const [search, setSearch] = useState("");
  const [rank, setRank] = useState("");
  const [isFollowing, setIsFollowing] = useState(true);
  const scroller = useRef<HTMLDivElement>(null);
  const { refresh } = logs;

  const isLive = !TERMINAL.has(run.status);
  useEffect(() => {
    if (!isLive) return;
    const timer = setInterval(refresh, FOLLOW_MS);
    return () => {
      clearInterval(timer);
      refresh(); // the last lines come with the end
    };
  }, [isLive, refresh]);

  const isRecorded = isRecording(run.spec);
  const lines = useMemo(() => readLines(logs.data ?? ""), [logs.data]);
  const ranks = useMemo(() => ranksOf(lines), [lines]);
  const shown = useMemo(() => filterLines(lines, search, rank === "" ? null : Number(rank)), [lines, search, rank]);
  const virtual = useVirtualizer({
    count: shown.length,
    getScrollElement: () => scroller.current,
    estimateSize: () => LINE,
    overscan: 20,
  });
  useEffect(() => {
    if (isFollowing && shown.length > 0) virtual.scrollToIndex(shown.length - 1);
  }, [isFollowing, shown.length, virtual]);
  const onScroll = useCallback(() => {
    const element = scroller.current;
    if (!element) return;
    setIsFollowing(element.scrollTop + element.clientHeight >= element.scrollHeight - 2 * LINE);
  }, []);

  if (logs.data === undefined) {
    return logs.error ? <ErrorState error={logs.error} onRetry={refresh} /> : <LoadingState what="the logs" />;
  }
  return (
    <>
      <div className="tool">
        <input
          type="search"
          className="field log-search"
          placeholder="Search"
          aria-label="Search the logs"
          value={search}
          onChange={(event) => setSearch(event.target.value)}
        />
        {ranks.length > 0 && (
          <Segments
            label="Rank"
            value={rank}
            options={[{ value: "", label: "All ranks" }, ...ranks.map((each) => ({ value: String(each), label: String(each) }))]}
            onChange={setRank}
          />
        )}
        <span className="grow" />
        <span className="label">{plural(shown.length, "line")}</span>
        <button
          type="button"
          className="btn"
          aria-pressed={isFollowing}
          onClick={() => setIsFollowing(!isFollowing)}
        >
          {isFollowing ? "Following" : "Follow"}
        </button>
      </div>
      {lines.length === 0 ? (
        <EmptyState title={isLive && !isRecorded ? "No logs yet" : "No logs"}>
          {isRecorded && <p>The script that was recorded writes where it was started.</p>}
        </EmptyState>
      ) : (
        <div
          className="card logs"
          ref={scroller}
          onScroll={onScroll}
          tabIndex={0}
          role="log"
          aria-live="off"
          aria-label="Logs of the newest attempt"
        >
          <div style={{ height: virtual.getTotalSize(), position: "relative" }}>
            {virtual.getVirtualItems().map(({ index, start }) => {
              const line = shown[index];
              return line ? (
                <div className="log-line" key={line.number} style={{ transform: `translateY(${start}px)` }}>
                  <span>{line.number}</span>
                  {line.text}
                </div>
              ) : null;
            })}
          </div>
        </div>
      )}
    </>
  );
}
