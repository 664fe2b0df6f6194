/** Tags of the selected runs: those they carry, each with a way off, and a field for another. */

import { useMemo, useState } from "react";

import type { Run } from "../../api/types.ts";
import { Menu } from "../../components/controls.tsx";
import { formatInteger } from "../../format/number.ts";

export interface TagChange {
  add_tags?: string[];
  remove_tags?: string[];
}

/** The tags that any of these runs carries, with how many do, the most carried first. */
export function carriedTags(runs: readonly Run[]): [string, number][] {
  const counts = new Map<string, number>();
  for (const run of runs) for (const tag of run.tags) counts.set(tag, (counts.get(tag) ?? 0) + 1);
  return [...counts].sort(([a, m], [b, n]) => n - m || a.localeCompare(b));
}

export function TagMenu({ runs, onChange }: { runs: readonly Run[]; onChange: (change: TagChange) => void }) {
  const [text, setText] = useState("");
  const carried = useMemo(() => carriedTags(runs), [runs]);
  const tag = text.trim();
  return (
    <Menu label="Tag">
      {() => (
        <>
          <form
            className="row save-view"
            onSubmit={(event) => {
              event.preventDefault();
              if (tag !== "") onChange({ add_tags: [tag] });
              setText("");
            }}
          >
            <input
              className="field"
              value={text}
              onChange={(event) => setText(event.target.value)}
              placeholder="New tag"
              aria-label="Tag for the selected runs"
              maxLength={200}
            />
            <button type="submit" className="btn" disabled={tag === ""}>
              Add
            </button>
          </form>
          {carried.length === 0 && <p>None of them carries a tag.</p>}
          {carried.map(([each, count]) => (
            <div className="row" key={each}>
              <button type="button" title="Put it on all selected runs" onClick={() => onChange({ add_tags: [each] })}>
                <span className="clip-label">{each}</span>
                <span className="hint num">
                  {formatInteger(count)} of {formatInteger(runs.length)}
                </span>
              </button>
              <button
                type="button"
                className="remove"
                aria-label={`Take tag ${each} off`}
                onClick={() => onChange({ remove_tags: [each] })}
              >
                ×
              </button>
            </div>
          ))}
        </>
      )}
    </Menu>
  );
}
