/** An experiment's runs as a grid: one row a combination of the other fields, one group of columns an ordering. Pure. */

import type { Experiment, Run } from "../../api/types.ts";
import { flatten } from "../../format/spec.ts";

export type Check = Experiment["table"]["published"][number];

/** What the checks hold the runs against, in words: figures that are published, or what is expected. */
export function knownFigures({ check_label }: { check_label: string }): string {
  return check_label === "published" ? "the published figures" : `what is ${check_label}`;
}

/** What of a run is held against them, as the service says it; nothing where it is each row's own figure. */
export function heldFigures({ checked }: { checked: string }): string {
  return checked === "" ? "" : `: ${checked}`;
}

export interface MatrixCell {
  run: Run;
  published: Check;
}

export interface MatrixRow {
  key: string;
  values: unknown[];
  /** By ordering; null where the experiment has no such run. */
  cells: (MatrixCell | null)[];
}

export interface Matrix {
  /** The fields that tell the rows apart, by dotted name. */
  fields: string[];
  orderings: string[];
  rows: MatrixRow[];
  /** Whether somebody has put it together, and not taken one that is built in. */
  isOwn: boolean;
  /** What the checks hold the runs against, in words. */
  known: string;
}

const ORDERING = "step_ordering";
const LABELS = /^(name|notes|tags|priority)/;

function varyingFields(runs: readonly Run[]): string[] {
  const flat = runs.map((run) => flatten(run.spec));
  const paths = [...new Set(flat.flatMap((spec) => [...spec.keys()]))];
  return paths.filter((path) => {
    if (path === ORDERING || LABELS.test(path)) return false;
    return new Set(flat.map((spec) => JSON.stringify(spec.get(path)))).size > 1;
  });
}

export function buildMatrix(experiment: Experiment): Matrix {
  const { runs, table } = experiment;
  const declared = Object.keys(experiment.matrix).filter((field) => field !== ORDERING);
  const fields = declared.length > 0 ? declared : varyingFields(runs);
  const orderings = [...new Set(runs.map((run) => run.spec.step_ordering as string))];
  const checks = new Map(table.run_ids.map((id, index) => [id, table.published[index] ?? null]));
  const rows = new Map<string, MatrixRow>();
  for (const run of runs) {
    const flat = flatten(run.spec);
    const values = fields.map((field) => flat.get(field));
    let key = JSON.stringify(values);
    const column = orderings.indexOf(run.spec.step_ordering);
    // The same combination twice (another seed in the name alone, say) gets a row of its own.
    while (rows.get(key)?.cells[column]) key += "'";
    const row = rows.get(key) ?? { key, values, cells: orderings.map(() => null) };
    row.cells[column] = { run, published: checks.get(run.id) ?? null };
    rows.set(key, row);
  }
  const isOwn = experiment.builtin === null;
  return { fields, orderings, rows: [...rows.values()], isOwn, known: knownFigures(table) };
}

const SHORT: Record<string, string> = {
  zero_stage: "ZeRO",
  "loss_scale.initial_power": "Initial scale",
  implementation: "Implementation",
  world_size: "Ranks",
  gradient_accumulation_steps: "Accumulation",
  micro_batch_size: "Micro-batch",
};

export function fieldLabel(field: string): string {
  return SHORT[field] ?? field;
}

export interface Tally {
  ordering: string;
  died: number;
  trained: number;
  stopped: number;
  ended: number;
  total: number;
}

/** How many runs of each ordering ended, and how. */
export function tally(experiment: Experiment): Tally[] {
  const { orderings } = buildMatrix(experiment);
  return orderings.map((ordering) => {
    const runs = experiment.runs.filter((run) => run.spec.step_ordering === ordering);
    return {
      ordering,
      died: runs.filter((run) => run.verdict?.name === "dies").length,
      trained: runs.filter((run) => run.verdict?.name === "trains").length,
      stopped: runs.filter((run) => run.status === "stopped").length,
      ended: runs.filter((run) => run.finished_at !== null).length,
      total: runs.length,
    };
  });
}
