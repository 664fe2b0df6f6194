/** The attempts of a run, newest first: ranks and their GPUs, start-up, environment, and why each ended. */

import type { Attempt, Run } from "../../api/types.ts";
import { Box, left, TableHead } from "../../components/Box.tsx";
import { FailureText } from "../../components/FailureText.tsx";
import { StatusMark } from "../../components/marks.tsx";
import { EmptyState } from "../../components/states.tsx";
import { Ago, Elapsed } from "../../components/time.tsx";
import { formatInteger } from "../../format/number.ts";
import { flatten, formatSpecValue } from "../../format/spec.ts";
import { words } from "../../format/words.ts";
import { PhaseTimeline } from "./PhaseTimeline.tsx";

export default function AttemptsView({ run }: { run: Run }) {
  const attempts = [...(run.attempts ?? [])].reverse();
  if (attempts.length === 0) {
    return (
      <EmptyState title="Not attempted yet">
        <p>{run.waiting_reason ?? "The run waits for its turn."}</p>
      </EmptyState>
    );
  }
  return attempts.map((attempt) => <AttemptCard key={attempt.id} attempt={attempt} />);
}

function AttemptCard({ attempt }: { attempt: Attempt }) {
  const environment = [...flatten(attempt.environment)];
  return (
    <section className="attempt" aria-label={`Attempt ${attempt.number}`}>
      <div className="row wrap-row">
        <h2 className="h2">Attempt {attempt.number}</h2>
        <StatusMark status={attempt.status} />
        {attempt.ray_job === null ? <span className="ink-3">recorded</span> : <code className="ink-3">{attempt.ray_job}</code>}
        <span className="grow" />
        <span className="ink-3 num">
          <Ago at={attempt.created_at} /> · <Elapsed started={attempt.started_at} finished={attempt.finished_at} />
        </span>
      </div>
      {attempt.failure && (
        <div className="failure">
          <b>{words(attempt.failure.kind)}</b>
          {attempt.failure.rank !== null && ` on rank ${attempt.failure.rank}`}
          {attempt.failure.step !== null && `, step ${formatInteger(attempt.failure.step)}`}
          {attempt.failure.message && <FailureText message={attempt.failure.message} />}
        </div>
      )}
      <div className="attempt-grid">
        <Box title="Ranks" level={3} aside={attempt.ranks.length}>
          <table className="grid-table">
            <TableHead cells={["Rank", left("Device"), "GPU", "Node", "pid"]} />
            <tbody>
              {attempt.ranks.map((rank) => (
                <tr key={rank.rank}>
                  <td>{rank.rank}</td>
                  <td className="left">{rank.device}</td>
                  <td>{rank.device_id ?? "—"}</td>
                  <td className="mono">{rank.node}</td>
                  <td>{rank.pid}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </Box>
        <PhaseTimeline attempt={attempt} />
        <Box title="Record" level={3}>
          <dl className="kv body record">
            <dt>First step</dt>
            <dd>{formatInteger(attempt.first_step)}</dd>
            <dt>Steps declared</dt>
            <dd>{formatInteger(attempt.declared_steps)}</dd>
            <dt>Steps stored</dt>
            <dd>{formatInteger(attempt.stored_steps)}</dd>
            {environment.map(([key, value]) => (
              <Entry key={key} name={key} value={value} />
            ))}
          </dl>
        </Box>
      </div>
    </section>
  );
}

function Entry({ name, value }: { name: string; value: unknown }) {
  return (
    <>
      <dt>{name}</dt>
      <dd>{formatSpecValue(value)}</dd>
    </>
  );
}
