/** What a reader of two records has to know beside where they part, a sentence each; the service says what of. */

import type { Comparison } from "../../api/types.ts";
import type { Unlike } from "../../charts/Readout.tsx";
import { formatInteger } from "../../format/number.ts";

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

/** Which recorded quantities are not the same one in both, and how often clipping acted. */
export function notes(comparison: Comparison, a: string, b: string): string[] {
  const { clipping } = comparison;
  return [
    ...unlike(comparison, a, b).map(({ why }) => why),
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
