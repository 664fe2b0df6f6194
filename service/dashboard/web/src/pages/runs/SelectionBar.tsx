/** What can be done with the selected runs, and what sets them apart. */

import { requestJson, runPath, type RequestOptions } from "../../api/client.ts";
import type { Run } from "../../api/types.ts";
import { ConfirmButton, Key } from "../../components/controls.tsx";
import { showError, showToast } from "../../components/toast.tsx";
import { plural } from "../../format/number.ts";
import { canRetry, differences, isLabel, isRecording } from "../../format/spec.ts";
import { TERMINAL } from "../../format/words.ts";
import { TagMenu, type TagChange } from "./TagMenu.tsx";

export const MOST_COMPARED = 8;

function describe(runs: readonly Run[]): string {
  if (runs.length < 2) return "select another to compare";
  const paths = differences(runs.map((run) => run.spec))
    .map(({ path }) => path)
    .filter((path) => !isLabel(path));
  if (paths.length === 0) return "same spec";
  const seed = paths.includes("seed") ? "" : "same seed · ";
  if (paths.length === 1) return `${seed}differ in ${paths[0]} only`;
  return `${seed}differ in ${paths.length <= 3 ? paths.join(", ") : `${paths.length} fields`}`;
}

async function askEach(runs: readonly Run[], verb: string | null, options: RequestOptions, notice: string): Promise<void> {
  const results = await Promise.allSettled(
    runs.map((run) => requestJson(verb === null ? runPath(run.id) : runPath(run.id, verb), options)),
  );
  const failed = results.filter((result) => result.status === "rejected");
  if (failed[0]) showError(failed[0].reason);
  else showToast(`${notice} ${plural(runs.length, "run")}.`);
}

function commandEach(runs: readonly Run[], verb: "stop" | "retry"): void {
  void askEach(runs, verb, { method: "POST" }, verb === "stop" ? "Stopping" : "Retrying");
}

function tagEach(runs: readonly Run[], change: TagChange): void {
  const [added] = change.add_tags ?? [];
  const notice = added === undefined ? `Took ${change.remove_tags?.[0]} off` : `Put ${added} on`;
  void askEach(runs, null, { method: "PATCH", body: change }, notice);
}

interface Props {
  ids: ReadonlySet<string>;
  runs: readonly Run[];
  onCompare: () => void;
  onClear: () => void;
}

export function SelectionBar({ ids, runs, onCompare, onClear }: Props) {
  if (ids.size === 0) return null;
  const live = runs.filter((run) => !TERMINAL.has(run.status) && !isRecording(run.spec));
  const ended = runs.filter(canRetry);
  return (
    <div className="selection-bar" role="region" aria-label="Selected runs">
      <b>{ids.size} selected</b>
      <span className="about">{describe(runs)}</span>
      <button
        type="button"
        className="btn primary"
        disabled={ids.size < 2 || ids.size > MOST_COMPARED}
        onClick={onCompare}
      >
        Compare <Key>C</Key>
      </button>
      {live.length > 0 && (
        <ConfirmButton
          label={`Stop ${live.length}`}
          confirm={`Stop ${live.length} now?`}
          onConfirm={() => commandEach(live, "stop")}
        />
      )}
      {ended.length > 0 && (
        <button type="button" className="btn" onClick={() => commandEach(ended, "retry")}>
          Retry {ended.length}
        </button>
      )}
      <TagMenu runs={runs} onChange={(change) => tagEach(runs, change)} />
      <button type="button" className="btn" onClick={onClear}>
        Clear <Key>Esc</Key>
      </button>
    </div>
  );
}
