/**
 * The service's JSON, by the names the pages use. All of it comes from the OpenAPI document (`npm run types`);
 * what the document leaves open, the spec that a run echoes, is the RunSpec of its own schema.
 */

import type { components } from "./openapi.d.ts";

type Schemas = components["schemas"];

/** A number; non-finite ones arrive as strings: see `format/number.ts`. */
export type WireNumber = number | string;

export type RunStatus = Schemas["RunStatus"];
export type AttemptStatus = Schemas["AttemptStatus"];
export type StepOrdering = Schemas["StepOrdering"];

/** A spec as the service echoes it: every field set, defaults included. */
export type RunSpec = Schemas["RunSpec"] & { [field: string]: unknown };

/** A verdict, or a lesser finding of the same shape. */
export type Verdict = Omit<Schemas["VerdictOut"], "name" | "evidence"> & { name: string; evidence?: string | null };
export type RunSummary = Schemas["SummaryOut"];
export type Attempt = Schemas["AttemptOut"];
export type Run = Omit<Schemas["RunOut"], "spec"> & { spec: RunSpec };
export type RunPage = { runs: Run[]; next_cursor: string | null };
export type LoadSample = Schemas["LoadOut"];
export type LoadPage = Schemas["LoadsOut"];
export type RunCounts = Schemas["RunCountsOut"];
export type RunEvent = Schemas["EventOut"];

export type Step = Schemas["StepOut"];
export type StepPage = Schemas["StepsOut"];
export type NonfiniteRun = Schemas["NonfiniteRunOut"];
export type StepSeries = Omit<Schemas["SeriesOut"], "series"> & {
  series: { step: number[] } & Record<string, (WireNumber | null)[]>;
};
export type Parameter = Schemas["ParameterOut"];
export type ParameterSteps = Schemas["ParameterStepsOut"];

export type Comparison = Schemas["CompareOut"];
export type Experiment = Omit<Schemas["ExperimentOut"], "runs"> & { runs: Run[] };
export type Cluster = Schemas["ClusterOut"];

type Refused = Pick<Schemas["Problem"], "detail" | "field" | "remedy">;

/** RFC 9457, as far as an answer carries it: a proxy's has a status alone. Several things wrong with a body are `errors`. */
export type Problem = Partial<Schemas["Problem"]> & Pick<Schemas["Problem"], "title" | "status"> & { errors?: Refused[] };
