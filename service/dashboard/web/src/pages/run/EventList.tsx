/** What happened to a run: every change of status and every alarm, with who and why. */

import { useEffect } from "react";

import { useResource } from "../../api/resource.ts";
import type { RunEvent } from "../../api/types.ts";
import { formatClock, formatExact } from "../../format/time.ts";
import { words } from "../../format/words.ts";

const MOST = 50;

/** Of a failure that prints a traceback its first line; all of it stands with the verdict. `mark` is any text that changes when there may be new events. */
export function EventList({ path, mark }: { path: string; mark: string }) {
  const events = useResource<{ events: RunEvent[] }>(path);
  const { refresh } = events;
  useEffect(refresh, [mark, refresh]);
  const shown = [...(events.data?.events ?? [])].reverse();
  if (shown.length === 0) return null;
  return (
    <section className="box">
      <header>
        <h2 className="h2">Events</h2>
        <span className="aside num">{shown.length}</span>
      </header>
      <ol className="events">
        {shown.slice(0, MOST).map((event) => (
          <li key={event.id}>
            <time dateTime={event.at} title={formatExact(event.at)}>
              {formatClock(event.at)}
            </time>
            <span>
              <b>{headline(event)}</b>{" "}
              <span className="ink-2" title={event.who ?? undefined}>
                {firstLine(event.why ?? "")}
              </span>
            </span>
          </li>
        ))}
        {shown.length > MOST && (
          <li className="ink-3">
            <span /> <span>and {shown.length - MOST} earlier ones</span>
          </li>
        )}
      </ol>
    </section>
  );
}

function firstLine(why: string): string {
  const [first = "", ...rest] = why.split("\n");
  return rest.length > 0 ? `${first} …` : first;
}

function headline(event: RunEvent): string {
  const attempt = event.attempt && event.kind === "attempt_status" ? `attempt ${event.attempt} ` : "";
  if (event.to_status) return attempt + event.to_status;
  return words(event.kind);
}
