/**
 * The connection to `GET /events`, which tells of each run that changes.
 *
 * Reconnects by itself with a growing pause. Knows no document: it runs in a worker that tabs share, or in a page.
 */

export type State = { kind: "open" } | { kind: "lost"; since: number };
export type Said = State | { kind: "run"; data: string };

const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 5_000;

export class Changes {
  /** For whoever comes later; null while it connects for the first time, and when it is closed. */
  state: State | null = null;

  private source: EventSource | null = null;
  private pause = FIRST_PAUSE_MS;
  private timer: ReturnType<typeof setTimeout> | undefined;

  constructor(private readonly say: (said: Said) => void) {}

  /** Connect now, unless it is connected or on its way; a pause after a loss is cut short. */
  open(): void {
    if (this.source !== null && this.state?.kind !== "lost") return;
    this.pause = FIRST_PAUSE_MS;
    this.connect();
  }

  close(): void {
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
    this.state = null;
  }

  private connect(): void {
    clearTimeout(this.timer);
    this.source?.close();
    const source = new EventSource("/events");
    this.source = source;
    source.onopen = () => {
      this.pause = FIRST_PAUSE_MS;
      this.tell({ kind: "open" });
    };
    source.onerror = () => this.onError();
    source.addEventListener("run", (event) => this.say({ kind: "run", data: (event as MessageEvent<string>).data }));
  }

  private onError(): void {
    this.source?.close();
    this.source = null;
    if (this.state?.kind !== "lost") this.tell({ kind: "lost", since: Date.now() });
    this.timer = setTimeout(() => this.connect(), this.pause);
    this.pause = Math.min(this.pause * 2, LONGEST_PAUSE_MS);
  }

  private tell(state: State): void {
    this.state = state;
    this.say(state);
  }
}
