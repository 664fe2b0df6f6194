/** One field of the form, drawn from its schema: groups, unions, choices, numbers, text, and JSON for the rest. */

import { useEffect, useId, useState } from "react";

import { defaultOf, isPlainObject, variantFor, withoutNull, type Schema, type SpecSchema } from "../../api/schema.ts";
import { Power } from "../../components/marks.tsx";
import { Prose } from "../../components/Prose.tsx";
import { isPower } from "../../format/spec.ts";
import { checkValue, placeholderFor, readNumber, readPath, variantName, type Path, type Spec } from "./fields.ts";

export interface FormContext {
  spec: Spec;
  resolve: SpecSchema["resolve"];
  /** What the service has said against a field, by dotted path. */
  problems: ReadonlyMap<string, string>;
  onChange: (path: Path, value: unknown) => void;
}

interface Props {
  name: string;
  path: Path;
  schema: Schema;
  context: FormContext;
}

export function SchemaField({ name, path, schema: field, context }: Props) {
  const { schema, isNullable } = withoutNull(field, context.resolve);
  const variants = schema.oneOf ?? schema.anyOf;
  if (variants?.some((variant) => context.resolve(variant).properties)) {
    return <UnionField name={name} path={path} schema={schema} variants={variants} context={context} />;
  }
  if (schema.properties) {
    return (
      <fieldset className="form-group">
        <legend>{name}</legend>
        {isNullable && <p className="ink-3 about">Left empty, it is not used.</p>}
        <Fields schema={schema} path={path} context={context} />
      </fieldset>
    );
  }
  return <ScalarField name={name} path={path} schema={schema} field={field} isNullable={isNullable} context={context} />;
}

export function Fields({ schema, path, context, skip }: { schema: Schema; path: Path; context: FormContext; skip?: string }) {
  return Object.entries(schema.properties ?? {})
    .filter(([key]) => key !== skip)
    .map(([key, field]) => <SchemaField key={key} name={key} path={[...path, key]} schema={field} context={context} />);
}

function UnionField({ name, path, schema, variants, context }: Props & { variants: readonly Schema[] }) {
  const id = useId();
  const { resolve } = context;
  const value = readPath(context.spec, path) ?? defaultOf(schema, resolve);
  const variant = variantFor(variants, value, resolve);
  const names = variants.map((each) => variantName(resolve(each), resolve));
  const current = isPlainObject(value) && typeof value.name === "string" ? value.name : "";
  const isNamed = names.includes(current);
  return (
    <fieldset className="form-group">
      <legend>{name}</legend>
      <div className="form-field">
        <label htmlFor={id}>name</label>
        <select
          id={id}
          className="field"
          value={isNamed ? current : ""}
          onChange={(event) => context.onChange(path, { name: event.target.value })}
        >
          {names.map((each) => (
            <option key={each ?? ""} value={each ?? ""}>
              {each ?? "module:function"}
            </option>
          ))}
        </select>
        <Problem path={[...path, "name"]} context={context} own={null} />
      </div>
      {variant && <Fields schema={variant} path={path} context={context} skip={isNamed ? "name" : undefined} />}
    </fieldset>
  );
}

type ScalarProps = Props & { field: Schema; isNullable: boolean };

function ScalarField({ name, path, schema, field, isNullable, context }: ScalarProps) {
  const id = useId();
  const value = readPath(context.spec, path);
  const set = (next: unknown) => context.onChange(path, next);
  const own = value === undefined || value === null ? null : checkValue(schema, value);
  const problem = own ?? context.problems.get(path.join(".")) ?? null;
  const shared = {
    id,
    className: "field",
    "aria-invalid": problem !== null,
    "aria-describedby": `${id}-note`,
  };
  const placeholder = placeholderFor(field, context.resolve) || (isNullable ? "not set" : "");
  return (
    <div className="form-field">
      <label htmlFor={id} className={value === undefined ? undefined : "is-set"}>
        {name}
      </label>
      <Control {...{ schema, value, set, shared, placeholder }} />
      <p className="about" id={`${id}-note`}>
        {problem !== null ? (
          <span className="problem" role="alert">
            <Prose text={problem} />
          </span>
        ) : (
          <>
            {isPower(path.join(".")) && typeof value === "number" && Number.isInteger(value) && value <= 1024 && (
              <>
                <Power exponent={value} />.{" "}
              </>
            )}
            <span className="ink-3">
              <Prose text={firstSentence(field.description ?? schema.description)} />
            </span>
          </>
        )}
      </p>
    </div>
  );
}

function firstSentence(text: string | undefined): string {
  return (text ?? "").split("\n")[0] ?? "";
}

interface ControlProps {
  schema: Schema;
  value: unknown;
  set: (value: unknown) => void;
  shared: { id: string; className: string; "aria-invalid": boolean; "aria-describedby": string };
  placeholder: string;
}

function Control({ schema, value, set, shared, placeholder }: ControlProps) {
  if (schema.enum) {
    return (
      <select {...shared} value={String(value ?? "")} onChange={(event) => set(event.target.value || undefined)}>
        <option value="">{placeholder ? `${placeholder} (default)` : "default"}</option>
        {schema.enum.map((option) => (
          <option key={String(option)} value={String(option)}>
            {String(option)}
          </option>
        ))}
      </select>
    );
  }
  if (schema.type === "boolean") {
    const read = (text: string) => (text === "" ? undefined : text === "true");
    return (
      <select {...shared} value={value === undefined ? "" : String(value)} onChange={(event) => set(read(event.target.value))}>
        <option value="">{placeholder} (default)</option>
        <option value="true">true</option>
        <option value="false">false</option>
      </select>
    );
  }
  if (schema.type === "integer" || schema.type === "number") {
    return <NumberInput shared={shared} value={value} set={set} placeholder={placeholder} />;
  }
  if (schema.type === "string") {
    return (
      <input
        {...shared}
        type="text"
        value={typeof value === "string" ? value : ""}
        placeholder={placeholder}
        spellCheck={false}
        onChange={(event) => set(event.target.value === "" ? undefined : event.target.value)}
      />
    );
  }
  if (schema.type === "array" && schema.items?.type === "string") {
    return <ListInput shared={shared} value={value} set={set} />;
  }
  return <JsonInput shared={shared} value={value} set={set} placeholder={placeholder} />;
}

type InputProps = Omit<ControlProps, "schema" | "placeholder"> & { placeholder?: string };

/** Keeps what is typed ("1e-", "0.") until it is a number. */
function NumberInput({ shared, value, set, placeholder }: InputProps) {
  const [text, setText] = useState(value === undefined || value === null ? "" : String(value));
  useEffect(() => {
    setText((before) => (readNumber(before) === (value ?? undefined) ? before : value === undefined || value === null ? "" : String(value)));
  }, [value]);
  return (
    <input
      {...shared}
      type="text"
      inputMode="decimal"
      className="field num"
      value={text}
      placeholder={placeholder}
      onChange={(event) => {
        setText(event.target.value);
        set(readNumber(event.target.value));
      }}
    />
  );
}

function ListInput({ shared, value, set }: InputProps) {
  const [text, setText] = useState(Array.isArray(value) ? value.join(", ") : "");
  return (
    <input
      {...shared}
      type="text"
      value={text}
      placeholder="with commas between"
      onChange={(event) => {
        setText(event.target.value);
        const items = event.target.value.split(",").map((item) => item.trim()).filter(Boolean);
        set(items.length > 0 ? items : undefined);
      }}
    />
  );
}

function JsonInput({ shared, value, set, placeholder }: InputProps) {
  const [text, setText] = useState(value === undefined ? "" : JSON.stringify(value, null, 1));
  const [isBroken, setIsBroken] = useState(false);
  return (
    <>
      <textarea
        {...shared}
        className="field mono"
        rows={2}
        aria-invalid={isBroken || shared["aria-invalid"]}
        value={text}
        placeholder={placeholder || "JSON"}
        spellCheck={false}
        onChange={(event) => {
          setText(event.target.value);
          if (event.target.value.trim() === "") {
            setIsBroken(false);
            set(undefined);
            return;
          }
          try {
            set(JSON.parse(event.target.value));
            setIsBroken(false);
          } catch {
            setIsBroken(true);
          }
        }}
      />
      {isBroken && (
        <p className="about problem" role="alert">
          is not JSON yet; the last readable value stands
        </p>
      )}
    </>
  );
}

function Problem({ path, context, own }: { path: Path; context: FormContext; own: string | null }) {
  const text = own ?? context.problems.get(path.join("."));
  return text ? (
    <p className="about problem" role="alert">
      <Prose text={text} />
    </p>
  ) : null;
}
