/** Specs as flat paths, for showing them and for showing where two of them differ. */

import type { Run, RunSpec } from "../api/types.ts";

export type FlatSpec = Map<string, unknown>;

/** Every leaf under its dotted path; empty objects and lists are leaves. */
export function flatten(value: unknown, prefix = "", into: FlatSpec = new Map()): FlatSpec {
  if (value !== null && typeof value === "object") {
    const entries = Object.entries(value);
    if (entries.length > 0) {
      for (const [key, item] of entries) {
        flatten(item, Array.isArray(value) ? `${prefix}[${key}]` : prefix === "" ? key : `${prefix}.${key}`, into);
      }
      return into;
    }
  }
  into.set(prefix, value);
  return into;
}

export interface SpecDifference {
  path: string;
  values: unknown[];
}

/** The paths at which these specs are not all the same. */
export function differences(specs: readonly unknown[]): SpecDifference[] {
  const flat = specs.map((spec) => flatten(spec));
  const paths = new Set(flat.flatMap((each) => [...each.keys()]));
  const found: SpecDifference[] = [];
  for (const path of paths) {
    const values = flat.map((each) => each.get(path));
    const [first, ...rest] = values.map((value) => JSON.stringify(value));
    if (rest.some((value) => value !== first)) found.push({ path, values });
  }
  return found;
}

export function formatSpecValue(value: unknown): string {
  if (value === undefined) return "—";
  if (value === null) return "null";
  if (Array.isArray(value) && value.length === 0) return "none";
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** Where the value is the exponent of a power of two. */
export function isPower(path: string): boolean {
  return path === "loss_scale.initial_power";
}

/** What does not change the numbers, and so says nothing about a difference between runs. */
const LABELS: ReadonlySet<string> = new Set(["name", "notes", "priority"]);

export function isLabel(path: string): boolean {
  return LABELS.has(path) || path === "tags" || path.startsWith("tags[");
}

/** One line on what a run is, with powers written `2^16`: `byte gpt · ZeRO 2 · 2 × fp16 · initial scale 2^16 · seed 7`. */
export function describeSpec(spec: RunSpec): string {
  return describedParts(spec).join(" · ");
}

/** Whether a script of somebody's own was recorded: nobody but that script starts, stops or retries it. */
export function isRecording({ task }: RunSpec): boolean {
  return task?.name === "external";
}

/** As the service has it: a failed or stopped run that it started itself. */
export function canRetry({ status, spec }: Run): boolean {
  return (status === "failed" || status === "stopped") && !isRecording(spec);
}

/** How a run's steps are ordered; a recorded script's other optimizer has no such order, and is named itself. */
export function orderingWords({ task, step_ordering: ordering }: RunSpec): string {
  const { name, optimizer } = (task ?? {}) as { name?: string; optimizer?: string | null };
  if (name !== "external" || optimizer?.toLowerCase().includes("muon")) return ordering as string;
  return optimizer ?? "another optimizer";
}

/** The same line of what several runs have in common; what sets them apart is left out. */
export function describeShared(specs: readonly RunSpec[]): string {
  const [first = [], ...rest] = specs.map(describedParts);
  return first.filter((part) => rest.every((parts) => parts.includes(part))).join(" · ");
}

/** A built-in task's name in words; one that names somebody's own code, `module:function`, as it is. */
export function taskWords(name: string): string {
  return name.includes(":") ? name : name.replaceAll("_", " ");
}

function describedParts(spec: RunSpec): string[] {
  const parts = [taskWords(spec.task.name), `ZeRO ${spec.zero_stage}`, `${spec.world_size} × ${spec.precision}`];
  if (spec.precision === "fp16") {
    const fixed = spec.loss_scale.static;
    parts.push(fixed ? `static scale ${fixed}` : `initial scale 2^${spec.loss_scale.initial_power}`);
  }
  parts.push(`seed ${spec.seed}`);
  if (spec.implementation !== "muon_core") parts.push(spec.implementation);
  return parts;
}

interface Shared {
  key: string;
  title: string;
}

// Writing out a spec costs what drawing a row does; a table of thousands asks again at every change of one of them.
const shared = new WeakMap<Run, Shared>();

/** What the two runs of a pair have in common: everything but the ordering and the labels. */
export function sharedWithPair(run: Run): Shared {
  const known = shared.get(run) ?? readShared(run);
  shared.set(run, known);
  return known;
}

function readShared(run: Run): Shared {
  const { step_ordering: _ordering, name: _name, notes: _notes, tags: _tags, priority: _priority, ...rest } = run.spec;
  return { key: JSON.stringify(rest), title: describeSpec(run.spec) };
}
