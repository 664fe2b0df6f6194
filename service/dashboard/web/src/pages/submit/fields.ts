/** Reading, writing and checking a spec by its schema. Pure: the form only draws what these say. */

import { defaultOf, isPlainObject, variantFor, withoutNull, type Schema, type SpecSchema } from "../../api/schema.ts";

export type Spec = Record<string, unknown>;
export type Path = readonly string[];

export function readPath(spec: unknown, path: Path): unknown {
  return path.reduce<unknown>((value, key) => (isPlainObject(value) ? value[key] : undefined), spec);
}

/** A copy of the spec with this field set, or (undefined) taken out; parts left empty go too. */
export function writePath(spec: Spec, path: Path, value: unknown): Spec {
  const [key, ...rest] = path;
  if (key === undefined) return spec;
  const copy: Spec = { ...spec };
  if (rest.length === 0) {
    if (value === undefined) delete copy[key];
    else copy[key] = value;
    return copy;
  }
  const inner = writePath(isPlainObject(copy[key]) ? copy[key] : {}, rest, value);
  if (Object.keys(inner).length === 0) delete copy[key];
  else copy[key] = inner;
  return copy;
}

/** What a field must be, in the words of the schema's limits; null where the value satisfies it. */
export function checkValue(schema: Schema, value: unknown): string | null {
  if (typeof value === "string" && (schema.type === "integer" || schema.type === "number")) {
    return schema.type === "integer" ? "must be a whole number" : "must be a number";
  }
  if (typeof value === "number") {
    if (schema.type === "integer" && !Number.isInteger(value)) return "must be a whole number";
    if (schema.minimum !== undefined && value < schema.minimum) return `must be ${schema.minimum} or more`;
    if (schema.maximum !== undefined && value > schema.maximum) return `must be ${schema.maximum} or less`;
    if (schema.exclusiveMinimum !== undefined && value <= schema.exclusiveMinimum) {
      return `must be more than ${schema.exclusiveMinimum}`;
    }
    if (schema.exclusiveMaximum !== undefined && value >= schema.exclusiveMaximum) {
      return `must be less than ${schema.exclusiveMaximum}`;
    }
  }
  if (typeof value === "string") {
    if (schema.maxLength !== undefined && value.length > schema.maxLength) return `must be ${schema.maxLength} characters or fewer`;
    if (schema.minLength !== undefined && value.length < schema.minLength) return "must not be empty";
    if (schema.pattern !== undefined && !new RegExp(schema.pattern, "u").test(value)) return "must read module:function";
  }
  if (schema.enum && value !== undefined && !schema.enum.includes(value)) return `must be one of ${schema.enum.join(", ")}`;
  return null;
}

/** What was typed into a number field: a number where it is one, the text where it is not yet, undefined where nothing. */
export function readNumber(text: string): number | string | undefined {
  const trimmed = text.trim();
  if (trimmed === "") return undefined;
  const number = Number(trimmed);
  return Number.isNaN(number) ? trimmed : number;
}

export interface Issue {
  path: string;
  message: string;
}

/** Everything the schema has against a spec; what only the service can tell comes with its answer. */
export function checkSpec(spec: Spec, { root, resolve }: SpecSchema): Issue[] {
  return checkFields(root, spec, [], resolve);
}

function checkFields(schema: Schema, value: Spec, path: Path, resolve: SpecSchema["resolve"]): Issue[] {
  const issues: Issue[] = [];
  for (const key of Object.keys(value)) {
    const field = schema.properties?.[key];
    const at = [...path, key];
    if (field) issues.push(...checkField(field, value[key], at, resolve));
    else if (schema.properties) issues.push({ path: at.join("."), message: "is not a field here" });
  }
  return issues;
}

function checkField(field: Schema, value: unknown, path: Path, resolve: SpecSchema["resolve"]): Issue[] {
  const { schema, isNullable } = withoutNull(field, resolve);
  if (value === null) return isNullable ? [] : [{ path: path.join("."), message: "must not be null" }];
  const variants = schema.oneOf ?? schema.anyOf;
  if (variants && isPlainObject(value)) {
    const variant = variantFor(variants, value, resolve);
    return variant ? checkFields(variant, value, path, resolve) : [];
  }
  if (schema.properties) {
    if (!isPlainObject(value)) return [{ path: path.join("."), message: "must be a group of fields" }];
    return checkFields(schema, value, path, resolve);
  }
  const message = checkValue(schema, value);
  return message === null ? [] : [{ path: path.join("."), message }];
}

export function variantName(variant: Schema, resolve: SpecSchema["resolve"]): string | null {
  const name = variant.properties?.name;
  const value = name ? resolve(name).const : undefined;
  return typeof value === "string" ? value : null;
}

export function placeholderFor(schema: Schema, resolve: SpecSchema["resolve"]): string {
  const standard = defaultOf(schema, resolve);
  if (standard === null || standard === undefined) return "";
  return typeof standard === "object" ? JSON.stringify(standard) : String(standard);
}

export const PRESETS: readonly { key: string; label: string; about: string; spec: Spec }[] = [
  {
    key: "thirty-step",
    label: "Thirty steps",
    about: "Five linears on one fixed batch, initial scale 2^16: master dies, ordered trains.",
    spec: {
      name: "thirty-step",
      task: { name: "simple_model" },
      world_size: 2,
      loss_scale: { initial_power: 16 },
      optimizer: { lr: 0.05 },
      steps: 30,
    },
  },
  {
    key: "calm-boom",
    label: "Calm and boom",
    about: "Two matrices; one overflows at step 1, the other stays finite.",
    spec: {
      name: "calm-boom",
      task: { name: "calm_boom" },
      loss_scale: { initial_power: 4 },
      optimizer: { momentum: 0.9 },
      steps: 4,
    },
  },
  {
    key: "byte-gpt",
    label: "Byte GPT",
    about: "A small GPT on real text, initial scale 2^24, high enough to overflow at once.",
    spec: {
      name: "byte-gpt",
      task: { name: "byte_gpt" },
      world_size: 2,
      loss_scale: { initial_power: 24 },
      steps: 60,
    },
  },
];
