/** One run: what became of it and why, step by step, and everything that is on record about it. */

import { lazy, Suspense, type ReactNode } from "react";

import type { Run } from "../../api/types.ts";
import { ErrorState, LoadingState } from "../../components/states.tsx";
import { useTitle } from "../../components/title.ts";
import { href, Link, usePlace } from "../../routing/router.tsx";
import { RunHeader } from "./RunHeader.tsx";
import { StepsView } from "./StepsView.tsx";
import { useRun } from "./useRun.ts";

const ParametersView = lazy(() => import("./ParametersView.tsx"));
const ConfigView = lazy(() => import("./ConfigView.tsx"));
const AttemptsView = lazy(() => import("./AttemptsView.tsx"));
const LogsView = lazy(() => import("./LogsView.tsx"));

const VIEWS: readonly (readonly [string, string, (run: Run) => ReactNode])[] = [
  ["steps", "Steps", (run) => <StepsView run={run} />],
  ["parameters", "Parameters", (run) => <ParametersView run={run} />],
  ["config", "Config", (run) => <ConfigView run={run} />],
  ["attempts", "Attempts", (run) => <AttemptsView run={run} />],
  ["logs", "Logs", (run) => <LogsView run={run} />],
];

const ALL_RUNS = { to: href("/runs"), label: "All runs" };

export default function RunPage({ id }: { id: string }) {
  const run = useRun(id);
  const { path, query } = usePlace();
  useTitle(run.data?.name ?? "Run");

  if (run.data === undefined) {
    return (
      <main className="page" id="main" tabIndex={-1}>
        {run.error ? <ErrorState error={run.error} onRetry={run.refresh} elsewhere={ALL_RUNS} /> : <LoadingState what="the run" />}
      </main>
    );
  }
  const current = query.get("view") ?? "steps";
  const view = VIEWS.find(([key]) => key === current) ?? VIEWS[0];
  return (
    <main className="page" id="main" tabIndex={-1}>
      <RunHeader run={run.data} onChanged={run.refresh} />
      <nav className="tabs" aria-label="Parts of the run">
        {VIEWS.map(([key, label]) => (
          <Link
            key={key}
            to={`/ui${path}${key === "steps" ? "" : `?view=${key}`}`}
            aria-current={key === view?.[0] ? "page" : undefined}
          >
            {label}
          </Link>
        ))}
      </nav>
      <Suspense fallback={<LoadingState what="this part of the run" />}>{view?.[2](run.data)}</Suspense>
    </main>
  );
}
