/** Times: relative in the page, exact on hover. */

const SECOND = 1000;
const MINUTE = 60 * SECOND;
const HOUR = 60 * MINUTE;
const DAY = 24 * HOUR;

export function formatAgo(at: string | number | null, now: number): string {
  if (at === null) return "—";
  const passed = now - (typeof at === "number" ? at : Date.parse(at));
  if (passed < 5 * SECOND) return "just now";
  if (passed < MINUTE) return `${Math.floor(passed / SECOND)} s ago`;
  if (passed < HOUR) return `${Math.floor(passed / MINUTE)} m ago`;
  if (passed < DAY) return `${Math.floor(passed / HOUR)} h ago`;
  return `${Math.floor(passed / DAY)} d ago`;
}

const exact = new Intl.DateTimeFormat("en-GB", {
  year: "numeric",
  month: "short",
  day: "numeric",
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
  timeZoneName: "short",
});

export function formatExact(at: string | number): string {
  return exact.format(new Date(at));
}

const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

export function formatClock(at: string | number): string {
  return clock.format(new Date(at));
}

/** h:mm:ss, the way a stopwatch shows it; below a second tenths of it. */
export function formatDuration(milliseconds: number | null): string {
  if (milliseconds === null || !Number.isFinite(milliseconds)) return "—";
  if (milliseconds < SECOND) return milliseconds < 100 ? "< 0.1 s" : `${(Math.floor(milliseconds / 100) / 10).toFixed(1)} s`;
  const seconds = Math.floor(milliseconds / SECOND);
  const parts = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, seconds % 60];
  return parts.map((part, index) => (index === 0 ? String(part) : String(part).padStart(2, "0"))).join(":");
}

/** Seconds with the precision that matters at their size. */
export function formatSeconds(seconds: number | null): string {
  if (seconds === null) return "—";
  if (!Number.isFinite(seconds)) return "—";
  if (seconds < 0.1) return `${(seconds * 1000).toFixed(seconds < 0.01 ? 2 : 1)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  return formatDuration(seconds * SECOND);
}

export function elapsed(started: string | null, finished: string | null, now: number): number | null {
  if (started === null) return null;
  return (finished === null ? now : Date.parse(finished)) - Date.parse(started);
}
