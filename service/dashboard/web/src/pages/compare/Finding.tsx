/** The comparison in a sentence, as the service words it, with what each run's own record adds. */

import type { Comparison, Run } from "../../api/types.ts";
import { Key } from "../../components/controls.tsx";
import { OrderingMark, Sentence } from "../../components/marks.tsx";
import { formatInteger } from "../../format/number.ts";
import { orderingWords } from "../../format/spec.ts";
import { words } from "../../format/words.ts";
import { poisonedSince } from "../runs/columns.tsx";
import { notes, stillToBegin } from "./notes.ts";
import type { Comparisons } from "./useComparisons.ts";

interface Props {
  comparisons: Comparisons;
  runs: readonly Run[];
  labels: readonly string[];
  dashes: readonly (number[] | undefined)[];
  onZoom: (() => void) | null;
}

export function headline({ first_divergence: divergence, bit_equal_until: until }: Comparison): string {
  if (divergence) return `First divergence at step ${formatInteger(divergence.step)}.`;
  // Equal until step 0 is never equal: the one record begins after the other, and the explanation says so.
  if (!until) return "Nothing to compare.";
  return `Bit-equal until step ${formatInteger(until)}.`;
}

export function Finding({ comparisons, runs, labels, dashes, onZoom }: Props) {
  const { each, error } = comparisons;
  // Of more than two runs those that have begun are compared meanwhile: only where none has is there nothing to say.
  const begun = runs.filter((run) => (run.summary?.steps ?? 0) > 0).length;
  const waiting = begun < 2 || each.length === 1 ? stillToBegin(runs, labels) : null;
  const isPoisoned = runs.some((run) => poisonedSince(run) !== null);
  if (each.every((comparison) => comparison === undefined)) {
    return (
      <div className="finding">
        <p className="ink-2">{error ? error.message : "Comparing …"}</p>
      </div>
    );
  }
  return (
    <div className={isPoisoned ? "finding nonfinite-edge" : "finding"}>
      <div>
        {waiting !== null ? (
          <p>
            <b>{waiting}.</b> <span className="ink-2">This page follows the runs, and compares them from the first step they share.</span>
          </p>
        ) : each.length === 1 ? (
          <One comparison={each[0]} />
        ) : (
          <Several each={each} runs={runs} labels={labels} dashes={dashes} />
        )}
        {runs.map((run, index) =>
          run.verdict === null ? null : (
            <p key={run.id} className="ink-2">
              <OrderingMark ordering={orderingWords(run.spec)} dash={dashes[index]} label={labels[index]} />{" "}
              <span className="strong">{words(run.verdict.name)}.</span> <Sentence text={run.verdict.evidence ?? ""} />
            </p>
          ),
        )}
        {noted(each, labels).map((note) => (
          <p key={note} className="ink-2">
            {note}
          </p>
        ))}
        <SharedProof each={each} />
      </div>
      {onZoom && (
        <button type="button" className="btn" onClick={onZoom}>
          Zoom here <Key>D</Key>
        </button>
      )}
    </div>
  );
}

/** The notes on all the pairs; what is said of the first run is said once. */
function noted(each: Comparisons["each"], labels: readonly string[]): string[] {
  const all = each.flatMap((comparison, index) =>
    comparison === undefined ? [] : notes(comparison, labels[0] ?? "A", labels[index + 1] ?? "B"),
  );
  return [...new Set(all)];
}

function One({ comparison }: { comparison: Comparison | undefined }) {
  if (comparison === undefined) return null;
  return (
    <p>
      <b>{headline(comparison)}</b> <span className="ink-2"><Sentence text={comparison.explanation} /></span>
      {comparison.first_divergence?.parameter && (
        <span className="ink-2">
          {" "}
          Most of all in the momentum of <code>{comparison.first_divergence.parameter}</code>.
        </span>
      )}
    </p>
  );
}

/** Of more than two runs each is held against the first: a sentence a run. */
function Several({ each, runs, labels, dashes }: Pick<Props, "runs" | "labels" | "dashes"> & Pick<Comparisons, "each">) {
  const [first] = runs;
  return (
    <>
      <p className="ink-2">
        Against {first && <OrderingMark ordering={orderingWords(first.spec)} dash={dashes[0]} label={labels[0]} />}:
      </p>
      <ul className="against">
        {each.map((comparison, index) => {
          const run = runs[index + 1];
          if (run === undefined) return null;
          return (
            <li key={run.id}>
              <OrderingMark ordering={orderingWords(run.spec)} dash={dashes[index + 1]} label={labels[index + 1]} />{" "}
              {comparison === undefined ? (
                <span className="ink-3">Comparing …</span>
              ) : first && stillToBegin([first, run], []) !== null ? (
                <span className="ink-2">No step of both yet.</span>
              ) : (
                <>
                  <b>{headline(comparison)}</b> <span className="ink-2"><Sentence text={comparison.explanation} /></span>
                </>
              )}
            </li>
          );
        })}
      </ul>
    </>
  );
}

/** Equal only where all are, different where one is, and not said where one has no hash. */
function allEqual(values: readonly (boolean | null)[]): boolean | null {
  if (values.includes(false)) return false;
  return values.includes(null) || values.length === 0 ? null : true;
}

/** Equal data and equal starts are proven by hash; where one is not, the comparison must not be trusted blindly. */
function SharedProof({ each }: { each: Comparisons["each"] }) {
  const shared = each.flatMap((comparison) => comparison?.shared ?? []);
  if (shared.length < each.length) return null;
  const data = allEqual(shared.map((one) => one.data));
  const start = allEqual(shared.map((one) => one.initial_parameters));
  const parts = [
    data === null ? null : data ? "same data" : "different data",
    start === null ? null : start ? "same initial parameters" : "different initial parameters",
  ].filter((part) => part !== null);
  if (parts.length === 0) return null;
  return <p className="ink-3">Proven by hash: {parts.join(", ")}.</p>;
}
