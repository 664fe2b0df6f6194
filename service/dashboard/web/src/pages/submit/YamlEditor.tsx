/** The spec as YAML, both ways: what is typed here is the form's, and the other way round. */

import { useState } from "react";
import { parse, stringify } from "yaml";

import { isPlainObject } from "../../api/schema.ts";
import type { Spec } from "./fields.ts";

interface Props {
  spec: Spec;
  onChange: (spec: Spec) => void;
  /** Whether what stands here can be read: while it cannot, the spec is still the last one that could. */
  onReadable: (isReadable: boolean) => void;
}

function readYaml(text: string): Spec | string {
  try {
    const value: unknown = parse(text) ?? {};
    return isPlainObject(value) ? value : "A spec is a group of fields, such as `steps: 30`.";
  } catch (error) {
    return error instanceof Error ? error.message : String(error);
  }
}

export default function YamlEditor({ spec, onChange, onReadable }: Props) {
  const [text, setText] = useState(() => (Object.keys(spec).length === 0 ? "" : stringify(spec)));
  const [problem, setProblem] = useState<string | null>(null);
  return (
    <div className="yaml">
      <label className="visually-hidden" htmlFor="yaml">
        Spec as YAML
      </label>
      <textarea
        id="yaml"
        className="field mono"
        rows={Math.max(18, text.split("\n").length + 1)}
        value={text}
        spellCheck={false}
        aria-invalid={problem !== null}
        onChange={(event) => {
          setText(event.target.value);
          const read = readYaml(event.target.value);
          onReadable(typeof read !== "string");
          if (typeof read === "string") setProblem(read);
          else {
            setProblem(null);
            onChange(read);
          }
        }}
      />
      {problem !== null && (
        <pre className="problem" role="alert">
          {problem}
        </pre>
      )}
    </div>
  );
}
