/** The filter as text and as tokens. The language itself is the service's; here it is only split and completed. */

/** Split at spaces, except inside quotes. */
export function splitQuery(text: string): string[] {
  return text.match(/(?:[^\s"]|"[^"]*"?)+/g) ?? [];
}

export function joinQuery(tokens: readonly string[]): string {
  return tokens.filter(Boolean).join(" ");
}

/** The field of a `field:value` token, else null: free text matches names. */
export function tokenField(token: string): string | null {
  return /^([a-z_]+)[:~]/.exec(token)?.[1] ?? null;
}

/** Whether a token has been typed far enough to be asked for: `stage:` and `tag:"night` have not. */
export function isComplete(token: string): boolean {
  if (/^[a-z_]+[:~](>=|<=|>|<|=)?$/.test(token)) return false;
  return (token.match(/"/g)?.length ?? 0) % 2 === 0;
}

/** Replace the token of the same field, or drop it where `token` is null. */
export function withToken(query: string, field: string, token: string | null): string {
  const others = splitQuery(query).filter((each) => tokenField(each) !== field);
  return joinQuery(token === null ? others : [...others, token]);
}

const WORDS: Record<string, readonly string[]> = {
  status: ["queued", "pending", "running", "succeeded", "failed", "stopped"],
  verdict: ["dies", "poisoned", "diverged", "stalled", "absorbed", "inconclusive", "trains"],
  ordering: ["ordered", "master", "per_tensor", "inverted", "precheck", "deferred"],
  impl: ["muon_core", "deepspeed"],
  task: ["simple_model", "calm_boom", "byte_gpt"],
  stage: ["1", "2", "3"],
  scale: ["2^16", ">=2^20", "1"],
  failure: ["loss_scale_exhausted", "worker_died", "worker_stalled", "out_of_memory", "task_error"],
};

const FIELDS: readonly (readonly [string, string])[] = [
  ["status", "queued, running, failed …"],
  ["verdict", "dies, trains …"],
  ["ordering", "master, ordered …"],
  ["stage", "ZeRO stage"],
  ["scale", "initial loss scale, >=2^16"],
  ["overflows", ">0"],
  ["discarded", ">=10"],
  ["steps", "<100"],
  ["world", "ranks"],
  ["task", "simple_model …"],
  ["impl", "muon_core, deepspeed"],
  ["failure", "worker_died …"],
  ["tag", 'tag:"night run"'],
  ["name", "name~gpt"],
  ["experiment", "an experiment's id"],
  ["priority", "number"],
  ["fingerprint", "first digits"],
  ["id", "a run's id"],
];

export interface Completion {
  /** What the token becomes. */
  text: string;
  hint: string;
}

/** What the token being typed could become: fields first, then the field's words. */
export function completions(token: string): Completion[] {
  const field = tokenField(token);
  if (field === null) {
    return FIELDS.filter(([name]) => name.startsWith(token.toLowerCase())).map(([name, hint]) => ({
      text: `${name}:`,
      hint,
    }));
  }
  const typed = token.slice(field.length + 1);
  const parts = typed.split(",");
  const last = parts.pop() ?? "";
  const before = parts.length > 0 ? `${parts.join(",")},` : "";
  return (WORDS[field] ?? [])
    .filter((word) => word.startsWith(last) && word !== last && !parts.includes(word))
    .map((word) => ({ text: `${field}:${before}${word}`, hint: "" }));
}
