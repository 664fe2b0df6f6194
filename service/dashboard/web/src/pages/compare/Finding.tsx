/** The comparison in a sentence, as the service words it, with what each run's own record adds. */

import type { Resource } from "../../api/resource.ts";
import type { Comparison, Run } from "../../api/types.ts";
import { Key } from "../../components/controls.tsx";
import { OrderingMark, Sentence } from "../../components/marks.tsx";
import { formatInteger } from "../../format/number.ts";
import { words } from "../../format/words.ts";
import { poisonedSince } from "../runs/columns.tsx";

interface Props {
  comparison: Resource<Comparison>;
  runs: readonly Run[];
  labels: readonly string[];
  onZoom: (() => void) | null;
}

export function headline({ first_divergence: divergence, bit_equal_until: until }: Comparison): string {
  if (divergence) return `First divergence at step ${formatInteger(divergence.step)}.`;
  if (until === null) return "Nothing to compare yet.";
  return `Bit-equal until step ${formatInteger(until)}.`;
}

export function Finding({ comparison, runs, labels, onZoom }: Props) {
  const { data, error } = comparison;
  const isPoisoned = runs.some((run) => poisonedSince(run) !== null);
  if (data === undefined) {
    return (
      <div className="finding">
        <p className="ink-2">{error ? error.message : "Comparing …"}</p>
      </div>
    );
  }
  const divergence = data.first_divergence;
  return (
    <div className={isPoisoned ? "finding nonfinite-edge" : "finding"}>
      <div>
        <p>
          <b>{headline(data)}</b> <span className="ink-2">{data.explanation}</span>
          {divergence?.parameter && (
            <span className="ink-2">
              {" "}
              Most of all in <code>{divergence.parameter}</code>.
            </span>
          )}
        </p>
        {runs.map((run, index) =>
          run.verdict === null ? null : (
            <p key={run.id} className="ink-2">
              <OrderingMark ordering={run.spec.step_ordering} label={labels[index]} />{" "}
              <span className="strong">{words(run.verdict.name)}.</span> <Sentence text={run.verdict.evidence ?? ""} />
            </p>
          ),
        )}
        <SharedProof comparison={data} />
      </div>
      {onZoom && (
        <button type="button" className="btn" onClick={onZoom}>
          Zoom here <Key>D</Key>
        </button>
      )}
    </div>
  );
}

/** Equal data and equal starts are proven by hash; where one is not, the comparison must not be trusted blindly. */
function SharedProof({ comparison }: { comparison: Comparison }) {
  const { data, initial_parameters: start } = comparison.shared;
  const parts = [
    data === null ? null : data ? "same data" : "different data",
    start === null ? null : start ? "same initial parameters" : "different initial parameters",
  ].filter((part) => part !== null);
  if (parts.length === 0) return null;
  return <p className="ink-3">Proven by hash: {parts.join(", ")}.</p>;
}
