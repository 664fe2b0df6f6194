/** The run's spec, field by field, beside its defaults. A stored spec is whole: who set a value that equals its default, it does not say. */

import { useState } from "react";

import { useResource } from "../../api/resource.ts";
import { defaultOf, isPlainObject, loadSpecSchema, variantFor, type SpecSchema } from "../../api/schema.ts";
import type { Run } from "../../api/types.ts";
import { left, TableHead } from "../../components/Box.tsx";
import { Segments } from "../../components/controls.tsx";
import { SpecRow } from "../../components/SpecRow.tsx";
import { copyText } from "../../components/toast.tsx";
import { flatten } from "../../format/spec.ts";

/** The defaults that stand behind this spec; a union's are those of the variant the spec chose. */
export function defaultsFor(spec: Record<string, unknown>, schema: SpecSchema): Map<string, unknown> {
  const fields = Object.entries(schema.root.properties ?? {}).map(([key, field]): [string, unknown] => {
    const resolved = schema.resolve(field);
    const variants = resolved.oneOf ?? resolved.anyOf;
    if (variants && isPlainObject(spec[key])) {
      const variant = variantFor(variants, spec[key], schema.resolve);
      return [key, variant === null ? undefined : defaultOf({ ...variant, default: undefined }, schema.resolve)];
    }
    const item = resolved.items && schema.resolve(resolved.items);
    const values = spec[key];
    if (item?.properties && Array.isArray(values) && values.length > 0) {
      return [key, values.map(() => defaultOf(item, schema.resolve))];
    }
    return [key, defaultOf(field, schema.resolve)];
  });
  return flatten(Object.fromEntries(fields));
}

/** The OpenAPI document leaves out defaults that are null or made empty: no default is the same as either there. */
function differs(value: unknown, standard: unknown): boolean {
  if (standard === undefined && isEmpty(value)) return false;
  return JSON.stringify(value ?? null) !== JSON.stringify(standard ?? null);
}

function isEmpty(value: unknown): boolean {
  return value !== null && typeof value === "object" && Object.keys(value).length === 0;
}

export default function ConfigView({ run }: { run: Run }) {
  const [shows, setShows] = useState("set");
  const schema = useResource("/openapi.json", loadSpecSchema);
  const defaults = schema.data ? defaultsFor(run.spec, schema.data) : null;
  const resolved = run.attempts?.at(-1)?.resolved_ds_config;
  const rows = [...flatten(run.spec)].map(([path, value]) => {
    const standard = defaults?.get(path);
    return { path, value, standard, isSet: defaults !== null && differs(value, standard) };
  });
  const shown = shows === "set" && defaults !== null ? rows.filter((row) => row.isSet) : rows;
  return (
    <>
      <div className="tool">
        <Segments
          label="Which fields"
          value={shows}
          options={[
            { value: "set", label: `Differs from default ${defaults === null ? "" : rows.filter((row) => row.isSet).length}` },
            { value: "all", label: `All ${rows.length}` },
          ]}
          onChange={setShows}
        />
        <span className="grow" />
        <span className="label">
          fingerprint <code title={run.fingerprint}>{run.fingerprint.slice(0, 16)}</code>
        </span>
        <button
          type="button"
          className="btn"
          onClick={() => void copyText(JSON.stringify(run.spec, null, 2), "Spec copied as JSON.")}
        >
          Copy as JSON
        </button>
      </div>
      <div className="box scroll-x">
        <table className="grid-table config">
          <TableHead cells={["Field", left("Value"), left("Default"), "As default"]} />
          <tbody>
            {shown.map(({ path, value, standard, isSet }) => (
              <SpecRow
                key={path}
                path={path}
                isSet={isSet}
                cells={[
                  { key: "value", value, className: "left wrap" },
                  { key: "default", value: standard, className: "left ink-3", isBlank: defaults === null },
                ]}
              >
                <td className="ink-3">{defaults === null ? "" : isSet ? "no" : "yes"}</td>
              </SpecRow>
            ))}
          </tbody>
        </table>
      </div>
      {resolved && (
        <div className="box config-resolved">
          <header>
            <h2 className="h2">DeepSpeed's resolved configuration</h2>
          </header>
          <pre>{JSON.stringify(resolved, null, 2)}</pre>
        </div>
      )}
    </>
  );
}
