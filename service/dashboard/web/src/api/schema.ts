/** The RunSpec's JSON schema, as `/openapi.json` carries it: fields, defaults and limits for the form and the config view. */

import { requestJson } from "./client.ts";

export interface Schema {
  $ref?: string;
  type?: string;
  title?: string;
  description?: string;
  default?: unknown;
  enum?: unknown[];
  const?: unknown;
  anyOf?: Schema[];
  oneOf?: Schema[];
  allOf?: Schema[];
  properties?: Record<string, Schema>;
  required?: string[];
  items?: Schema;
  minimum?: number;
  maximum?: number;
  exclusiveMinimum?: number;
  exclusiveMaximum?: number;
  minLength?: number;
  maxLength?: number;
  pattern?: string;
}

interface OpenApi {
  components?: { schemas?: Record<string, Schema> };
}

export interface SpecSchema {
  root: Schema;
  resolve: (schema: Schema) => Schema;
}

/** Pydantic names a model that is read and written differently `RunSpec-Input`; either is the form's. */
export function findSpecSchema(document: OpenApi): SpecSchema | null {
  const schemas = document.components?.schemas ?? {};
  const root = schemas["RunSpec-Input"] ?? schemas.RunSpec;
  if (!root) return null;
  const resolve = (schema: Schema): Schema => {
    const { $ref: reference, allOf, ...rest } = schema;
    if (reference !== undefined) {
      const target = schemas[reference.split("/").at(-1) ?? ""];
      return target ? { ...resolve(target), ...rest } : rest;
    }
    if (allOf?.length === 1) return { ...resolve(allOf[0] as Schema), ...rest };
    return schema;
  };
  return { root, resolve };
}

export async function loadSpecSchema(path: string, signal: AbortSignal): Promise<SpecSchema> {
  const schema = findSpecSchema(await requestJson<OpenApi>(path, { signal }));
  if (schema === null) throw new Error("The service's OpenAPI document describes no RunSpec.");
  return schema;
}

/** The value a field has when nobody sets it; undefined where there is none. */
export function defaultOf(schema: Schema, resolve: SpecSchema["resolve"]): unknown {
  const resolved = resolve(schema);
  const own = resolved.default;
  if (resolved.properties && (own === undefined || isPlainObject(own))) {
    const fields = Object.entries(resolved.properties).map(([key, field]): [string, unknown] => [
      key,
      isPlainObject(own) && key in own ? own[key] : defaultOf(field, resolve),
    ]);
    return Object.fromEntries(fields.filter(([, value]) => value !== undefined));
  }
  if (own !== undefined) return own;
  return resolved.const;
}

export function isPlainObject(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** The variant of a union that fits a value: by its `const` name where there is one, else the first. */
export function variantFor(variants: readonly Schema[], value: unknown, resolve: SpecSchema["resolve"]): Schema | null {
  const name = isPlainObject(value) ? value.name : undefined;
  const resolved = variants.map(resolve);
  return (
    resolved.find((variant) => variant.properties?.name && resolve(variant.properties.name).const === name) ??
    resolved.find((variant) => variant.properties?.name?.pattern !== undefined) ??
    resolved[0] ??
    null
  );
}

/** Strip `null` from `T | null`; says whether null was there. */
export function withoutNull(schema: Schema, resolve: SpecSchema["resolve"]): { schema: Schema; isNullable: boolean } {
  const resolved = resolve(schema);
  const options = resolved.anyOf;
  if (!options?.some((option) => option.type === "null")) return { schema: resolved, isNullable: false };
  const rest = options.filter((option) => option.type !== "null");
  const { anyOf: _anyOf, ...shared } = resolved;
  if (rest.length === 1) return { schema: { ...resolve(rest[0] as Schema), ...shared }, isNullable: true };
  return { schema: { ...shared, anyOf: rest }, isNullable: true };
}
