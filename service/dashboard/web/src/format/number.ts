/**
 * Numbers as text. Four things stay distinct everywhere: a finite value, nan, an infinity, and "not measured" (null).
 */

import type { WireNumber } from "../api/types.ts";

export const NOT_MEASURED = "—";
const MINUS = "−";

/** Read a JSON number: the strings NaN, Infinity and -Infinity are numbers, null and undefined are "not measured". */
export function toNumber(value: WireNumber | null | undefined): number | null {
  if (value === null || value === undefined) return null;
  return typeof value === "number" ? value : Number(value);
}

export function nonfiniteWord(value: number): string {
  if (Number.isNaN(value)) return "nan";
  return value > 0 ? "+inf" : `${MINUS}inf`;
}

const integers = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export function formatInteger(value: number | null | undefined): string {
  if (value === null || value === undefined) return NOT_MEASURED;
  return Number.isFinite(value) ? integers.format(value).replace("-", MINUS) : nonfiniteWord(value);
}

/** Four significant digits where they fit in a column, else an exponent. */
export function formatScalar(value: number | null | undefined, digits = 4): string {
  if (value === null || value === undefined) return NOT_MEASURED;
  if (!Number.isFinite(value)) return nonfiniteWord(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  let text: string;
  if (size >= 1e6 || size < 1e-3) {
    const [mantissa, exponent] = value.toExponential(Math.max(digits - 2, 0)).split("e") as [string, string];
    text = `${mantissa}e${Number(exponent)}`;
  } else {
    const whole = Math.floor(Math.log10(size)) + 1;
    text = value.toFixed(Math.max(0, Math.min(6, size < 1 ? digits - 1 - whole : digits - whole)));
    if (size >= 10_000) text = integers.format(Number(text));
  }
  return text.replaceAll("-", MINUS);
}

export function formatLoss(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return formatScalar(value);
  const size = Math.abs(value);
  return size >= 1e-3 && size < 1000 ? value.toFixed(size < 0.1 ? 4 : 3).replace("-", MINUS) : formatScalar(value);
}

/** Write numbers that stand beside each other with the digits that tell those apart that differ. */
export function apart(values: readonly (number | null)[]): string[] {
  const distinct = new Set(values.filter((value) => value !== null)).size;
  for (let digits = 4; digits < 17; digits += 1) {
    const texts = values.map((value) => formatScalar(value, digits));
    const written = new Set(texts.filter((_, index) => values[index] !== null)).size;
    if (written === distinct) return texts;
  }
  return values.map((value) => (value === null ? NOT_MEASURED : String(value)));
}

export function formatDelta(value: number | null): string {
  if (value === null) return NOT_MEASURED;
  if (!Number.isFinite(value)) return nonfiniteWord(value);
  if (value === 0) return "0";
  // Few digits: a difference stands beside the two values that it is of.
  const text = formatScalar(value, 3);
  return value > 0 ? `+${text}` : text;
}

export function formatShape(shape: readonly number[]): string {
  return shape.length === 0 ? "scalar" : shape.map(String).join(" × ");
}

export function formatBytes(bytes: number | null | undefined): string {
  if (bytes === null || bytes === undefined) return NOT_MEASURED;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let index = 0;
  let value = bytes;
  while (value >= 1024 && index < units.length - 1) {
    value /= 1024;
    index += 1;
  }
  return `${index === 0 ? value : value.toFixed(value < 10 ? 1 : 0)} ${units[index]}`;
}

export function plural(count: number, word: string, many = `${word}s`): string {
  return `${formatInteger(count)} ${count === 1 ? word : many}`;
}
