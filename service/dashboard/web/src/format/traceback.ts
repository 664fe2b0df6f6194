/** What of a failure's message one reads first: the error, and where one's own code raised it. Pure. */

const BEGIN = "Traceback (most recent call last):";
/** Paths of what one has not written, as `muonscope run` tells them. */
const NOT_OWN = ["/site-packages/", "/lib/python", "/workers/", "/muon_core/", "<frozen "];
const MOST_LINES = 8;

export interface FailureParts {
  /** The error itself; of one without a traceback all that is short enough, else its first line. */
  error: string;
  /** The end of what follows, from the last frame of one's own on; empty where `error` is all. */
  end: string;
  /** How many lines the message has, where not all of them are shown so. */
  numLines: number | null;
}

export function failureParts(message: string): FailureParts {
  const lines = message.trimEnd().split("\n");
  const begin = lines.indexOf(BEGIN);
  if (begin < 0 && lines.length <= MOST_LINES) return { error: lines.join("\n"), end: "", numLines: null };
  const error = begin > 0 ? lines.slice(0, begin).join("\n") : (lines[0] ?? "");
  const frames = lines.flatMap((line, place) => (line.startsWith('  File "') ? [place] : []));
  const end = begin < 0 || frames.length === 0 ? lines.slice(-MOST_LINES) : lastFrames(lines, frames);
  return { error, end: end.join("\n"), numLines: lines.length };
}

/** From the last frame of one's own; those between it and the last two are left out. */
function lastFrames(lines: readonly string[], frames: readonly number[]): string[] {
  const tail = frames.at(-2) ?? frames[0] ?? 0;
  const own = frames.findLastIndex((place) => NOT_OWN.every((part) => !lines[place]?.split(",")[0]?.includes(part)));
  const at = frames[own];
  if (at === undefined || at >= tail) return lines.slice(tail);
  const after = frames[own + 1] ?? lines.length;
  return [...lines.slice(at, after), ...(after < tail ? ["  …"] : []), ...lines.slice(tail)];
}
