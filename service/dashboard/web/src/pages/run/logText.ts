/** Logs as lines: which rank wrote each, and which of them a reader asks for. Pure. */

export interface LogLine {
  number: number;
  text: string;
  /** The rank that wrote it, where the line says so: `[rank 1] …`, `rank=1` or `(rank 1)`. */
  rank: number | null;
}

const RANK = /(?:\[rank[ =]?(\d+)\]|\brank[=:](\d+)|\(rank (\d+)\))/i;

// Escape sequences that terminals read as colours; a page shows text.
const ESCAPES = /\u001b\[[0-9;?]*[A-Za-z]/g;

export function readLines(text: string): LogLine[] {
  const lines = text.replace(ESCAPES, "").split(/\r?\n/);
  if (lines.at(-1) === "") lines.pop();
  return lines.map((line, index) => {
    const matched = RANK.exec(line);
    const rank = matched?.slice(1).find((group) => group !== undefined);
    return { number: index + 1, text: line, rank: rank === undefined ? null : Number(rank) };
  });
}

export function ranksOf(lines: readonly LogLine[]): number[] {
  return [...new Set(lines.flatMap(({ rank }) => (rank === null ? [] : [rank])))].sort((a, b) => a - b);
}

export function filterLines(lines: readonly LogLine[], search: string, rank: number | null): LogLine[] {
  const wanted = search.trim().toLowerCase();
  return lines.filter(
    (line) => (rank === null || line.rank === rank) && (wanted === "" || line.text.toLowerCase().includes(wanted)),
  );
}
