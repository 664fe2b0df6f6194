/** A new run, or a pair of them: a form drawn from the RunSpec's own schema, checked as one types. */

import { lazy, Suspense, useEffect, useMemo, useRef, useState } from "react";

import { ApiError, requestJson, runPath } from "../../api/client.ts";
import { asApiError, useResource } from "../../api/resource.ts";
import { loadSpecSchema, type Schema, type SpecSchema } from "../../api/schema.ts";
import type { Experiment, Run } from "../../api/types.ts";
import { Segments } from "../../components/controls.tsx";
import { OrderingGlyph, Sentence } from "../../components/marks.tsx";
import { Prose } from "../../components/Prose.tsx";
import { ErrorState, LoadingState } from "../../components/states.tsx";
import { useTitle } from "../../components/title.ts";
import { navigate, runHref, useQuery } from "../../routing/router.tsx";
import { compareHref } from "../runs/links.ts";
import { checkSpec, PRESETS, writePath, type Path, type Spec } from "./fields.ts";
import { SchemaField, type FormContext } from "./SchemaField.tsx";
import { useValidation } from "./useValidation.ts";

const YamlEditor = lazy(() => import("./YamlEditor.tsx"));

const PAIR = ["master", "ordered"] as const;
const SECTIONS: readonly { title: string; fields: readonly string[] }[] = [
  { title: "Run", fields: ["name", "step_ordering", "implementation", "zero_stage", "world_size", "steps", "seed", "task"] },
  { title: "Arithmetic", fields: ["precision", "micro_batch_size", "gradient_accumulation_steps", "gradient_clipping", "clip_scope", "loss_scale"] },
  { title: "Optimizer", fields: ["optimizer"] },
];

export default function SubmitPage() {
  useTitle("Submit");
  const [from] = useQuery("from");
  const schema = useResource("/openapi.json", loadSpecSchema);
  const origin = useResource<Run>(from === null ? null : runPath(from));
  const isWaiting = schema.isLoading || (from !== null && origin.isLoading);
  const error = schema.error ?? origin.error;
  return (
    <main className="page narrow" id="main" tabIndex={-1}>
      <h1 className="h1">Submit a run</h1>
      {isWaiting ? (
        <LoadingState what="the form" />
      ) : schema.data === undefined ? (
        error && <ErrorState error={error} onRetry={schema.refresh} />
      ) : (
        <SubmitForm key={from ?? ""} schema={schema.data} start={origin.data?.spec ?? null} />
      )}
    </main>
  );
}

function SubmitForm({ schema, start }: { schema: SpecSchema; start: Spec | null }) {
  const [spec, setSpec] = useState<Spec>(() => start ?? PRESETS[0]?.spec ?? {});
  const [edition, setEdition] = useState(0);
  const [shape, setShape] = useQuery("as");
  const [refusal, setRefusal] = useState<ApiError | null>(null);
  const [isBusy, setIsBusy] = useState(false);
  const issues = useMemo(() => checkSpec(spec, schema), [spec, schema]);
  const [isReadable, setIsReadable] = useState(true);
  const validation = useValidation(spec, issues.length === 0 && isReadable && refusal === null);
  // One key a form: a second press, or a repeat after a lost answer, makes no second run.
  const idempotencyKey = useRef(crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`);

  const change = (next: Spec) => {
    setSpec(next);
    setRefusal(null);
    idempotencyKey.current = crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;
  };
  const replace = (next: Spec) => {
    change(next);
    setIsReadable(true);
    setEdition(edition + 1); // fields keep what is typed in them; a new spec needs new fields
  };
  const send = async (work: () => Promise<string>) => {
    setIsBusy(true);
    try {
      navigate(await work());
    } catch (error) {
      setRefusal(asApiError(error));
      setIsBusy(false);
    }
  };
  const submitRun = async () => {
    const headers = { "Idempotency-Key": idempotencyKey.current };
    const run = await requestJson<Run>("/runs", { method: "POST", body: spec, headers });
    return runHref(run.id);
  };
  const submitPair = async () => {
    const { step_ordering: _ordering, name, ...base } = spec;
    const body = { name: typeof name === "string" ? name : "pair", base, matrix: { step_ordering: PAIR } };
    const made = await requestJson<Experiment>("/experiments", { method: "POST", body });
    return compareHref(made.runs.map((run) => run.id));
  };

  const shownRefusal = refusal ?? validation;
  const problems = problemsByField(shownRefusal);
  const context: FormContext = {
    spec,
    resolve: schema.resolve,
    problems,
    onChange: (path: Path, value: unknown) => change(writePath(spec, path, value)),
  };
  const isYaml = shape === "yaml";
  return (
    <div className="submit-grid">
      <form
        onSubmit={(event) => {
          event.preventDefault();
          void send(submitRun);
        }}
      >
        <div className="tool">
          <Segments
            label="Shape"
            value={isYaml ? "yaml" : "form"}
            options={[
              { value: "form", label: "Form" },
              { value: "yaml", label: "YAML" },
            ]}
            onChange={(value) => {
              setShape(value === "yaml" ? value : null);
              setIsReadable(true);
              setEdition(edition + 1);
            }}
          />
        </div>
        {isYaml ? (
          <Suspense fallback={<LoadingState what="the editor" />}>
            <YamlEditor key={edition} spec={spec} onChange={change} onReadable={setIsReadable} />
          </Suspense>
        ) : (
          <FormFields key={edition} schema={schema} context={context} />
        )}
        <Refusal error={shownRefusal} isAnswer={refusal !== null} issues={issues} />
        <div className="row wrap-row submit-actions">
          <button type="submit" className="btn primary" disabled={isBusy || !isReadable || issues.length > 0}>
            Submit run
          </button>
          <button
            type="button"
            className="btn"
            disabled={isBusy || !isReadable || issues.length > 0}
            onClick={() => void send(submitPair)}
            title="Two runs that differ in step_ordering only, compared live"
          >
            Submit as pair
            <OrderingGlyph ordering={PAIR[0]} />
            <OrderingGlyph ordering={PAIR[1]} />
          </button>
          <Hindrance isReadable={isReadable} isBusy={isBusy} issues={issues} />
        </div>
      </form>
      <aside aria-label="Presets">
        <section className="side-box">
          <h2 className="h2">Presets</h2>
          <ul className="presets">
            {PRESETS.map((preset) => (
              <li key={preset.key}>
                <button type="button" className="link strong" onClick={() => replace(preset.spec)}>
                  {preset.label}
                </button>
                <p className="ink-2">
                  <Sentence text={preset.about} />
                </p>
              </li>
            ))}
          </ul>
        </section>
        <section className="side-box">
          <h2 className="h2">As pair</h2>
          <p className="ink-2">
            Queues the spec twice, once with <b>master</b> and once with <b>ordered</b>; data and seeds are shared. The
            comparison opens and fills as both run.
          </p>
        </section>
        <section className="side-box">
          <h2 className="h2">The same from a shell</h2>
          <Command spec={spec} />
        </section>
      </aside>
    </div>
  );
}

function problemText({ problem }: ApiError): string {
  return [problem.detail ?? problem.title, problem.remedy].filter(Boolean).join("; ");
}

/** Everything the service has against the spec, by field; it lists all where it is more than one thing. */
function problemsByField(error: ApiError | null): Map<string, string> {
  if (error === null) return new Map();
  const said = [...(error.problem.errors ?? []), error.problem];
  return new Map(
    said.flatMap(({ field, detail, remedy }) => (field ? [[field, [detail, remedy].filter(Boolean).join("; ")] as const] : [])),
  );
}

function FormFields({ schema, context }: { schema: SpecSchema; context: FormContext }) {
  const properties = schema.root.properties ?? {};
  const placed = new Set(SECTIONS.flatMap(({ fields }) => fields));
  const rest = Object.keys(properties).filter((field) => !placed.has(field));
  const draw = (field: string) => {
    const own: Schema | undefined = properties[field];
    return own ? <SchemaField key={field} name={field} path={[field]} schema={own} context={context} /> : null;
  };
  return (
    <>
      {SECTIONS.map(({ title, fields }) => (
        <section className="form-section" key={title}>
          <h2 className="h2">{title}</h2>
          <div className="form-grid">{fields.map(draw)}</div>
        </section>
      ))}
      <details className="form-section" open={rest.some((field) => field in context.spec && !["tags", "notes"].includes(field))}>
        <summary className="h2">Everything else</summary>
        <div className="form-grid">{rest.map(draw)}</div>
      </details>
    </>
  );
}

interface RefusalProps {
  error: ApiError | null;
  /** Whether it answers a submission: then the reader is led to it. While one types the page must not move. */
  isAnswer: boolean;
  issues: readonly { path: string; message: string }[];
}

function Refusal({ error, isAnswer, issues }: RefusalProps) {
  const box = useRef<HTMLDivElement>(null);
  useEffect(() => {
    if (isAnswer) box.current?.scrollIntoView({ block: "nearest" });
  }, [isAnswer, error]);
  if (error === null && issues.length === 0) return null;
  return (
    <div className="finding" role="alert" ref={box}>
      <div>
        {error !== null && (
          <p>
            <b>{error.problem.title}.</b>{" "}
            {error.problem.field && <code>{error.problem.field}</code>} <span className="ink-2">
              <Prose text={problemText(error)} />
            </span>
          </p>
        )}
        {issues.map(({ path, message }) => (
          <p key={path}>
            <code>{path}</code> {message}
          </p>
        ))}
      </div>
    </div>
  );
}

/** Why nothing can be submitted now, beside the buttons that say so: what is wrong may be out of view. */
function Hindrance({ isReadable, isBusy, issues }: { isReadable: boolean; isBusy: boolean; issues: RefusalProps["issues"] }) {
  const [first, ...rest] = issues;
  return (
    <p className="hindrance" role="status">
      {isBusy ? (
        <span className="ink-2">Submitting …</span>
      ) : !isReadable ? (
        "The YAML cannot be read yet."
      ) : first !== undefined ? (
        <>
          <code>{first.path}</code> {first.message}
          {rest.length > 0 && `, and ${rest.length} more`}
        </>
      ) : null}
    </p>
  );
}

function Command({ spec }: { spec: Spec }) {
  const body = JSON.stringify(spec).replaceAll("'", "'\\''");
  return (
    <pre className="command">
      curl -X POST {window.location.origin}/runs -H 'Content-Type: application/json' -d '{body}'
    </pre>
  );
}
