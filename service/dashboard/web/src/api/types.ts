/** The service's JSON, by the names it uses. Non-finite numbers arrive as strings: see `format/number.ts`. */

export type WireNumber = number | "NaN" | "Infinity" | "-Infinity" | string;

export type RunStatus = "queued" | "pending" | "running" | "succeeded" | "failed" | "stopped";
export type AttemptStatus = "pending" | "running" | "succeeded" | "failed" | "stopped" | "lost";
export type StepOrdering = "master" | "per_tensor" | "inverted" | "precheck" | "deferred" | "ordered";
export type VerdictName = "dies" | "poisoned" | "diverged" | "stalled" | "absorbed" | "inconclusive" | "trains";

/** A spec as the service echoes it: every field set, defaults included. */
export interface RunSpec {
  name: string;
  task: { name: string; [option: string]: unknown };
  step_ordering: StepOrdering;
  implementation: string;
  zero_stage: number;
  world_size: number;
  precision: string;
  loss_scale: { initial_power: number; window: number; hysteresis: number; minimum: number; static: number | null };
  optimizer: { lr: number; momentum: number; ns_method: string; ns_steps: number; [key: string]: unknown };
  steps: number;
  seed: number;
  tags: string[];
  notes: string;
  [key: string]: unknown;
}

export interface Verdict {
  name: VerdictName | string;
  step: number | null;
  parameter: string | null;
  evidence: string | null;
}

export interface Failure {
  kind: string;
  rank: number | null;
  step: number | null;
  message: string;
}

export interface RunSummary {
  steps: number | null;
  applied: number | null;
  discarded: number | null;
  overflows: number | null;
  final_loss_scale: WireNumber | null;
  parameters_moved: number | null;
  parameters_total: number | null;
  momentum_finite: boolean | null;
  max_weight_motion: WireNumber | null;
  last_loss: WireNumber | null;
  last_momentum_norm: WireNumber | null;
}

export interface RankFact {
  rank: number;
  node: string;
  pid: number;
  device: string;
  device_id: string | null;
  local_rank: number;
}

export interface Attempt {
  id: string;
  number: number;
  status: AttemptStatus;
  failure: Failure | null;
  /** Unix seconds at which each phase ended. */
  phases: Record<string, number>;
  ranks: RankFact[];
  environment: Record<string, unknown>;
  resolved_ds_config?: Record<string, unknown> | null;
  created_at: string | null;
  started_at: string | null;
  finished_at: string | null;
  first_step: number | null;
  declared_steps: number | null;
  stored_steps: number | null;
}

export interface Run {
  id: string;
  name: string;
  spec: RunSpec;
  fingerprint: string;
  status: RunStatus;
  waiting_reason: string | null;
  queue_position: number | null;
  failure: Failure | null;
  verdict: Verdict | null;
  findings: Verdict[];
  attempts?: Attempt[];
  summary: RunSummary | null;
  experiment_id: string | null;
  tags: string[];
  created_at: string;
  started_at: string | null;
  finished_at: string | null;
}

export interface RunPage {
  runs: Run[];
  next_cursor: string | null;
  /** How many runs match the filter, and how many there are in all, where the service counts them. */
  total?: number | null;
}

export interface Step {
  step: number;
  attempt: number;
  overflow: boolean;
  discarded: boolean;
  loss_scale_before: WireNumber | null;
  loss_scale_after: WireNumber | null;
  loss: WireNumber | null;
  lr: WireNumber | null;
  grad_norm: WireNumber | null;
  update_norm: WireNumber | null;
  momentum_norm: WireNumber | null;
  nonfinite_parameters: number | null;
  ns_calls: number | null;
  step_time_s: WireNumber | null;
  largest_parameter: number | null;
  tokens: number | null;
}

export interface StepPage {
  steps: Step[];
  next_start: number | null;
}

export interface NonfiniteRun {
  first: number;
  last: number;
  value: WireNumber;
}

export interface StepSeries {
  series: { step: number[] } & Record<string, (WireNumber | null)[]>;
  overflow_runs: [number, number][];
  discarded_runs: [number, number][];
  nonfinite_runs: Record<string, NonfiniteRun[]>;
  exact: boolean;
}

export interface Parameter {
  index: number;
  name: string;
  shape: number[];
  route: "muon" | "adamw" | "frozen";
  reason: string;
}

export interface RunEvent {
  id: number;
  at: string;
  kind: string;
  attempt: number | null;
  from_status: string | null;
  to_status: string | null;
  who: string | null;
  why: string | null;
  detail: Record<string, unknown> | null;
}

export interface Problem {
  type?: string;
  title: string;
  status: number;
  detail?: string | null;
  field?: string | null;
  value?: unknown;
  remedy?: string | null;
}

export interface Comparison {
  a: string;
  b: string;
  spec_difference: { field: string; a: unknown; b: unknown }[];
  is_pair: boolean;
  shared: { data: boolean | null; initial_parameters: boolean | null };
  bit_equal_until: number | null;
  first_divergence: { step: number; scalar: string; scalars: string[]; parameter: string | null } | null;
  explanation: string;
  cost: Record<"step_time_s" | "peak_memory_bytes" | "ns_calls", { a: number | null; b: number | null; ratio: number | null }>;
}

export interface Experiment {
  id: string;
  name: string;
  builtin: string | null;
  status: string;
  created_at: string;
  matrix: Record<string, unknown[]>;
  runs: Run[];
  table: {
    columns: string[];
    rows: (string | number | boolean | null)[][];
    run_ids: string[];
    published: ({ matches: boolean; differences: string[] } | null)[];
  };
}

export interface Cluster {
  address: string;
  reachable: boolean;
  problem: string | null;
  gpus: number;
  gpus_held: number;
  nodes: { id: string; address: string; gpus: number; gpus_used: number | null; cpus: number; memory_bytes: number }[];
  holders: { run_id: string; name: string; attempt: string; status: RunStatus; gpus: number }[];
  queued: number;
}
