/** Loss scales are powers of two; they are written as such. */

/** Return n where value is 2 to the n exactly, else null. */
export function exponentOfTwo(value: number | null): number | null {
  if (value === null || !Number.isFinite(value) || value <= 0) return null;
  const exponent = Math.round(Math.log2(value));
  return 2 ** exponent === value ? exponent : null;
}

export interface TextPart {
  text: string;
  /** Present where the part is a power of two: `text` is then `2^n`. */
  exponent: number | null;
}

/** Split a sentence at the powers of two in it, written `2^16`, so that they can be drawn well. */
export function splitPowers(sentence: string): TextPart[] {
  return sentence
    .split(/\b(2\^-?\d{1,4})\b/)
    .filter((text) => text !== "")
    .map((text) => ({ text, exponent: /^2\^-?\d{1,4}$/.test(text) ? Number(text.slice(2)) : null }));
}
