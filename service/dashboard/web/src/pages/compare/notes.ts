/** What a reader of two records has to know beside where they part, a sentence each; the service says what of. */

import type { Comparison, Run } from "../../api/types.ts";
import type { Unlike } from "../../charts/Readout.tsx";
import { formatInteger } from "../../format/number.ts";
import { TERMINAL } from "../../format/words.ts";

const CLIPPED: Record<string, string> = { muon_exempt: "gradient of what AdamW takes" };

/** Which recorded quantities are not the same one in both, each with the two that they are. */
export function unlike({ not_compared: all }: Comparison, a: string, b: string): Unlike[] {
  return all.map((each) => ({
    quantity: each.quantity,
    why: `${quantityWords(each.quantity)} is ${each.a} in ${a} and ${each.b} in ${b}: not compared.`,
  }));
}

/**
 * What each run recorded under the names that are not one quantity in all of them: the first one's, then those that were
 * compared with it. What is not compared yet counts as the first one's.
 */
export function quantities(each: readonly (Comparison | undefined)[]): Record<string, string>[] {
  const found = each.map((comparison) => comparison?.not_compared ?? []);
  const first = Object.fromEntries(found.flat().map(({ quantity, a }) => [quantity, a]));
  return [first, ...found.map((all) => ({ ...first, ...Object.fromEntries(all.map(({ quantity, b }) => [quantity, b])) }))];
}

const TAKEN: Record<string, string> = { muon: "Muon's", adamw: "AdamW's", frozen: "frozen" };
const MOST_NAMED = 3;

/** Which parameters not the same optimizer takes, as `muonscope compare` says it: what differs then is not the ordering's alone. */
function routeNotes({ routes }: Comparison, a: string, b: string): string[] {
  if (routes === null) return [];
  const groups = new Map<string, string[]>();
  for (const each of routes.differing) {
    const how = `${taken(each.a)} in ${a} and ${taken(each.b)} in ${b}.`;
    groups.set(how, [...(groups.get(how) ?? []), each.parameter]);
  }
  const sentences = [...groups].map(([how, names]) => {
    const few = names.length <= MOST_NAMED + 1 ? names : [...names.slice(0, MOST_NAMED), `${names.length - MOST_NAMED} more`];
    const listed = few.length === 1 ? few.join() : `${few.slice(0, -1).join(", ")} and ${few.at(-1)}`;
    return `${listed} ${names.length === 1 ? "is" : "are"} ${how}`;
  });
  const isCut = routes.num_differing > routes.differing.length;
  return isCut ? [...sentences, `${formatInteger(routes.num_differing)} parameters are not the same optimizer's in both.`] : sentences;
}

function taken(route: string): string {
  return TAKEN[route] ?? "another optimizer's";
}

/** Which recorded quantities are not the same one in both, which parameters go elsewhere, and how often clipping acted. */
export function notes(comparison: Comparison, a: string, b: string): string[] {
  const { clipping } = comparison;
  return [
    ...unlike(comparison, a, b).map(({ why }) => why),
    ...routeNotes(comparison, a, b),
    ...(["a", "b"] as const).flatMap((side) => {
      const found = clipping[side];
      if (found === null) return [];
      const what = CLIPPED[found.scope] ?? found.scope;
      const acted = found.acted === null ? "an unrecorded number" : formatInteger(found.acted);
      return `In ${side === "a" ? a : b} the ${what} was clipped to ${found.limit} in ${acted} of ${formatInteger(found.applied)} applied steps.`;
    }),
  ];
}

function quantityWords(name: string): string {
  const text = name.replace("grad_", "gradient_").replaceAll("_", " ");
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** Whose loss stays below the other's to the end; null where neither's does. */
export function lowerLoss({ learning: { lower, caveat } }: Comparison, a: string, b: string): string | null {
  if (lower === null) return null;
  const [below, above] = lower.side === "a" ? [a, b] : [b, a];
  const until = `${below} stays below ${above} from step ${formatInteger(lower.from_step)} on, to step ${formatInteger(lower.until_step)}.`;
  return caveat === null ? until : `${until} ${caveat}`;
}

/** Which of these runs have no step yet and may still record one; null where each has one, or one will never have. */
export function stillToBegin(runs: readonly Run[], labels: readonly string[]): string | null {
  const without = runs.flatMap((run, index) => ((run.summary?.steps ?? 0) > 0 ? [] : [{ run, label: labels[index] ?? run.name }]));
  if (without.length === 0 || without.some(({ run }) => TERMINAL.has(run.status))) return null;
  const names = without.map(({ label }) => label);
  if (names.length === runs.length) return `${runs.length === 2 ? "Neither run" : "None of the runs"} has recorded a step yet`;
  const listed = names.length === 1 ? names.join() : `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`;
  return `${listed} ${names.length === 1 ? "has" : "have"} not recorded a step yet`;
}
