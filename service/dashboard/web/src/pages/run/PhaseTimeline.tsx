/** The stations of an attempt from submission to its first step and its end, each with the time it took. */

import type { Attempt } from "../../api/types.ts";
import { formatSeconds } from "../../format/time.ts";
import { words } from "../../format/words.ts";
import { phaseBars } from "./phases.ts";

export function PhaseTimeline({ attempt }: { attempt: Attempt | undefined }) {
  const bars = phaseBars(attempt?.phases ?? {});
  if (bars.length === 0) return null;
  const firstStep = bars.find(({ name }) => name === "first_step");
  const startup = bars.filter(({ name }) => name !== "last_step" && name !== "finished");
  const total = startup.reduce((end, bar) => Math.max(end, bar.from + bar.took), 0) || 1;
  return (
    <section className="box">
      <header>
        <h2 className="h2">Start-up</h2>
        <span className="aside">
          {firstStep ? `first step after ${formatSeconds(firstStep.from + firstStep.took)}` : attempt?.finished_at ? "ended before its first step" : "not at its first step yet"}
        </span>
      </header>
      <ol className="phases">
        {startup.map((bar) => (
          <li key={bar.name}>
            <span>{words(bar.name)}</span>
            <span className="bar" aria-hidden="true">
              <i style={{ marginLeft: `${(bar.from / total) * 100}%`, width: `${Math.max((bar.took / total) * 100, 1)}%` }} />
            </span>
            <span className="num">{formatSeconds(bar.took)}</span>
          </li>
        ))}
      </ol>
    </section>
  );
}
