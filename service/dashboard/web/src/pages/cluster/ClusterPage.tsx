/** The cluster: nodes and their GPUs, which runs hold them, and the queue with what each run waits for. */

import { useEffect } from "react";

import { withQuery } from "../../api/client.ts";
import { live } from "../../api/live.ts";
import { useResource } from "../../api/resource.ts";
import type { Cluster, RunPage } from "../../api/types.ts";
import { InitialScale, OrderingMark, StatusMark } from "../../components/marks.tsx";
import { EmptyState, ErrorState, LoadingState } from "../../components/states.tsx";
import { Ago } from "../../components/time.tsx";
import { useTitle } from "../../components/title.ts";
import { formatBytes, plural } from "../../format/number.ts";
import { Link, runHref } from "../../routing/router.tsx";

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
        <GpuMeter held={data.gpus_held} total={data.gpus} />
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

/** GPUs come in fractions: 2, 2.5, 0.33. */
function gpuCount(gpus: number): string {
  return String(Math.round(gpus * 100) / 100);
}

/** One box a GPU, filled as far as runs hold it. */
function GpuMeter({ held, total }: { held: number; total: number }) {
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
      {gpuCount(held)} of {plural(total, "GPU")} held
    </span>
  );
}

function Nodes({ cluster }: { cluster: Cluster }) {
  return (
    <section className="box scroll-x">
      <header>
        <h2 className="h2">Nodes</h2>
        <span className="aside num">{cluster.nodes.length}</span>
      </header>
      <table className="grid-table">
        <thead>
          <tr>
            <th scope="col">Address</th>
            <th scope="col">GPUs in use</th>
            <th scope="col">CPUs</th>
            <th scope="col">Memory</th>
          </tr>
        </thead>
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
    </section>
  );
}

function Holders({ cluster }: { cluster: Cluster }) {
  return (
    <section className="box scroll-x">
      <header>
        <h2 className="h2">Holding GPUs</h2>
        <span className="aside num">{cluster.holders.length}</span>
      </header>
      {cluster.holders.length === 0 ? (
        <p className="body ink-3">All GPUs are free.</p>
      ) : (
        <table className="grid-table">
          <thead>
            <tr>
              <th scope="col">Run</th>
              <th scope="col" className="left">
                Status
              </th>
              <th scope="col">GPUs</th>
            </tr>
          </thead>
          <tbody>
            {cluster.holders.map((holder) => (
              <tr key={holder.attempt}>
                <td>
                  <Link to={runHref(holder.run_id)} className="mono">
                    {holder.name}
                  </Link>
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
    </section>
  );
}

function Queue({ page, total }: { page: RunPage | undefined; total: number }) {
  const runs = [...(page?.runs ?? [])].sort((a, b) => (a.queue_position ?? 1e9) - (b.queue_position ?? 1e9));
  return (
    <section className="box scroll-x queue">
      <header>
        <h2 className="h2">Queue</h2>
        <span className="aside num">{total}</span>
      </header>
      {runs.length === 0 ? (
        <EmptyState title="The queue is empty" />
      ) : (
        <table className="grid-table">
          <thead>
            <tr>
              <th scope="col">Place</th>
              <th scope="col" className="left">
                Run
              </th>
              <th scope="col" className="left">
                Ordering
              </th>
              <th scope="col">Ranks</th>
              <th scope="col">Init scale</th>
              <th scope="col">Priority</th>
              <th scope="col">Waiting</th>
              <th scope="col" className="left">
                For
              </th>
            </tr>
          </thead>
          <tbody>
            {runs.map((run) => (
              <tr key={run.id}>
                <td>{run.queue_position ?? "—"}</td>
                <td className="left">
                  <Link to={runHref(run.id)} className="mono">
                    {run.name}
                  </Link>
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
    </section>
  );
}
