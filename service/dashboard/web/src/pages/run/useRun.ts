/** One run, read once and then kept current by the live stream. */

import { useEffect, useState } from "react";

import { runPath } from "../../api/client.ts";
import { live } from "../../api/live.ts";
import { useResource, type Resource } from "../../api/resource.ts";
import type { Run } from "../../api/types.ts";

export function useRun(id: string | null): Resource<Run> {
  const resource = useResource<Run>(id === null ? null : runPath(id));
  const [newer, setNewer] = useState<Run | null>(null);

  useEffect(() => {
    setNewer(null);
    return live.onRun((run) => {
      if (run.id === id) setNewer(run);
    });
  }, [id]);

  // A reply that was read after the last event is as new as that event: prefer whichever has more of the record.
  const { data } = resource;
  const isNewer = newer !== null && data !== undefined && newer.id === data.id && !isOlder(newer, data);
  return { ...resource, data: isNewer ? { ...data, ...newer, attempts: newer.attempts ?? data.attempts } : data };
}

function isOlder(event: Run, reply: Run): boolean {
  if (event.finished_at === null && reply.finished_at !== null) return true;
  return (event.summary?.steps ?? 0) < (reply.summary?.steps ?? 0) && event.status === reply.status;
}
