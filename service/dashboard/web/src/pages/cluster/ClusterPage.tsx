/** The cluster: nodes and their GPUs, which runs hold them, and the queue with what each run waits for. */

import { useEffect } from "react";

import { withQuery } from "../../api/client.ts";
import { live } from "../../api/live.ts";
import { useResource } from "../../api/resource.ts";
import type { Cluster, RunPage } from "../../api/types.ts";
import { Box, left, TableHead } from "../../components/Box.tsx";
import { InitialScale, OrderingMark, StatusMark } from "../../components/marks.tsx";
import { EmptyState, ErrorState, LoadingState } from "../../components/states.tsx";
import { Ago } from "../../components/time.tsx";
import { useTitle } from "../../components/title.ts";
import { formatBytes, plural } from "../../format/number.ts";
import { capitalised } from "../../format/words.ts";
import { RunLink } from "../../components/RunLink.tsx";

const POLL_MS = 5000;
const REREAD_MS = 500;
const QUEUE = withQuery("/runs", { q: "status:queued", sort: "-priority", limit: 200 });

export default function ClusterPage() {
  useTitle("Cluster");
  const cluster = useResource<Cluster>("/cluster");
  const queue = useResource<RunPage>(QUEUE);
  const { refresh } = cluster;
  const { refresh: refreshQueue } = queue;

  useEffect(() => {
    const timer = setInterval(refresh, POLL_MS);
    let soon: ReturnType<typeof setTimeout> | undefined;
    const stop = live.onRun((run) => {
      if (run.status === "running" && (run.summary?.steps ?? 0) > 1) return; // steps move no GPU
      soon ??= setTimeout(() => {
        soon = undefined;
        refresh();
        refreshQueue();
      }, REREAD_MS);
    });
    return () => {
      clearInterval(timer);
      clearTimeout(soon);
      stop();
    };
  }, [refresh, refreshQueue]);

  if (cluster.data === undefined) {
    return (
      <main className="page narrow" id="main" tabIndex={-1}>
        {cluster.error ? <ErrorState error={cluster.error} onRetry={refresh} /> : <LoadingState what="the cluster" />}
      </main>
    );
  }
  const { data } = cluster;
  return (
    <main className="page narrow" id="main" tabIndex={-1}>
      <div className="row wrap-row">
        <h1 className="h1">Cluster</h1>
        <code className="ink-3 beside-h1">{data.address}</code>
        <span className="grow" />
        <GpuMeter held={data.gpus_held} total={data.gpus} word={gpuWord(data)} />
      </div>
      {!data.reachable && (
        <div className="finding" role="alert">
          <p>
            <b>Ray does not answer.</b> <span className="ink-2">{data.problem ?? "Runs stay queued until it does."}</span>
          </p>
        </div>
      )}
      <div className="cluster-grid">
        <Nodes cluster={data} />
        <Holders cluster={data} />
      </div>
      <Queue page={queue.data} total={data.queued} />
    </main>
  );
}

/** A place for a rank on a machine that has no GPU is a logical one; of somebody else's Ray nobody says. */
function gpuWord({ gpus_are_logical: areLogical }: Cluster): string {
  return areLogical === true ? "logical GPU" : "GPU";
}

/** GPUs come in fractions: 2, 2.5, 0.33. */
function gpuCount(gpus: number): string {
  return String(Math.round(gpus * 100) / 100);
}

/** One box a GPU, filled as far as runs hold it. */
function GpuMeter({ held, total, word }: { held: number; total: number; word: string }) {
  const boxes = Math.min(Math.ceil(total), 64);
  return (
    <span className="row num">
      <span className="gpus" aria-hidden="true">
        {Array.from({ length: boxes }, (_, index) => (
          <i key={index}>
            <b style={{ height: `${Math.min(Math.max(held - index, 0), 1) * 100}%` }} />
          </i>
        ))}
      </span>
      {gpuCount(held)} of {plural(total, word)} held
    </span>
  );
}

function Nodes({ cluster }: { cluster: Cluster }) {
  return (
    <Box title="Nodes" aside={cluster.nodes.length}>
      <table className="grid-table">
        <TableHead cells={["Address", `${capitalised(gpuWord(cluster))}s in use`, "CPUs", "Memory Ray gives out"]} />
        <tbody>
          {cluster.nodes.map((node) => (
            <tr key={node.id}>
              <td className="mono">{node.address}</td>
              <td>
                {node.gpus_used === null ? "—" : gpuCount(node.gpus_used)} / {node.gpus}
              </td>
              <td>{node.cpus}</td>
              <td>{formatBytes(node.memory_bytes)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </Box>
  );
}

function Holders({ cluster }: { cluster: Cluster }) {
  return (
    <Box title={`Holding ${gpuWord(cluster)}s`} aside={cluster.holders.length}>
      {cluster.holders.length === 0 ? (
        <p className="body ink-3">All {gpuWord(cluster)}s are free.</p>
      ) : (
        <table className="grid-table">
          <TableHead cells={["Run", left("Status"), "GPUs"]} />
          <tbody>
            {cluster.holders.map((holder) => (
              <tr key={holder.attempt}>
                <td>
                  <RunLink id={holder.run_id} name={holder.name} />
                </td>
                <td className="left">
                  <StatusMark status={holder.status} share={0.5} />
                </td>
                <td>{gpuCount(holder.gpus)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </Box>
  );
}

function Queue({ page, total }: { page: RunPage | undefined; total: number }) {
  const runs = [...(page?.runs ?? [])].sort((a, b) => (a.queue_position ?? 1e9) - (b.queue_position ?? 1e9));
  return (
    <Box title="Queue" aside={total} className="queue">
      {runs.length === 0 ? (
        <EmptyState title="The queue is empty" />
      ) : (
        <table className="grid-table">
          <TableHead cells={["Place", left("Run"), left("Ordering"), "Ranks", "Init scale", "Priority", "Waiting", left("For")]} />
          <tbody>
            {runs.map((run) => (
              <tr key={run.id}>
                <td>{run.queue_position ?? "—"}</td>
                <td className="left">
                  <RunLink id={run.id} name={run.name} />
                </td>
                <td className="left">
                  <OrderingMark ordering={run.spec.step_ordering} />
                </td>
                <td>{run.spec.world_size}</td>
                <td>
                  <InitialScale run={run} />
                </td>
                <td>{String(run.spec.priority ?? 0)}</td>
                <td>
                  <Ago at={run.created_at} />
                </td>
                <td className="left wrap ink-2">{run.waiting_reason ?? "its turn"}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </Box>
  );
}
