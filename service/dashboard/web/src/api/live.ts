/**
 * The one server-sent stream of this page: `GET /events`, a `run` event with a Run on each change.
 *
 * Reconnects by itself with a growing pause. When a stream is back after a loss, `onResync` listeners read their
 * resources again, because whatever changed in between was not seen. A page that has been hidden for a while lets
 * go of its stream: browsers allow six connections per host, and ten open tabs must not starve each other.
 */

import { useSyncExternalStore } from "react";

import type { Run } from "./types.ts";

export type Connection = { state: "connecting" } | { state: "open" } | { state: "lost"; since: number };

const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 5_000;
const HIDDEN_LIMIT_MS = 30_000;

class LiveStream {
  private source: EventSource | null = null;
  private connection: Connection = { state: "connecting" };
  private pause = FIRST_PAUSE_MS;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private hiddenTimer: ReturnType<typeof setTimeout> | undefined;
  private hasBeenOpen = false;
  private lastEventAt: number | null = null;
  private readonly runListeners = new Set<(run: Run) => void>();
  private readonly resyncListeners = new Set<() => void>();
  private readonly stateListeners = new Set<() => void>();

  start(): void {
    document.addEventListener("visibilitychange", () => this.onVisibility());
    window.addEventListener("online", () => this.retryNow());
    this.open();
  }

  onRun(listener: (run: Run) => void): () => void {
    this.runListeners.add(listener);
    return () => this.runListeners.delete(listener);
  }

  onResync(listener: () => void): () => void {
    this.resyncListeners.add(listener);
    return () => this.resyncListeners.delete(listener);
  }

  subscribe = (listener: () => void): (() => void) => {
    this.stateListeners.add(listener);
    return () => this.stateListeners.delete(listener);
  };

  getConnection = (): Connection => this.connection;

  getLastEventAt = (): number | null => this.lastEventAt;

  retryNow(): void {
    if (this.connection.state === "open") return;
    clearTimeout(this.timer);
    this.pause = FIRST_PAUSE_MS;
    this.open();
  }

  private open(): void {
    this.source?.close();
    const source = new EventSource("/events");
    this.source = source;
    source.onopen = () => this.onOpen();
    source.onerror = () => this.onError();
    source.addEventListener("run", (event) => this.onRunEvent(event as MessageEvent<string>));
  }

  private onOpen(): void {
    this.pause = FIRST_PAUSE_MS;
    this.lastEventAt = Date.now();
    const isReturn = this.hasBeenOpen || this.connection.state === "lost";
    this.hasBeenOpen = true;
    this.setConnection({ state: "open" });
    if (isReturn) for (const listener of [...this.resyncListeners]) listener();
  }

  private onError(): void {
    this.source?.close();
    this.source = null;
    if (this.connection.state !== "lost") this.setConnection({ state: "lost", since: Date.now() });
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.open(), this.pause);
    this.pause = Math.min(this.pause * 2, LONGEST_PAUSE_MS);
  }

  private onRunEvent(event: MessageEvent<string>): void {
    this.lastEventAt = Date.now();
    const run = JSON.parse(event.data) as Run;
    for (const listener of [...this.runListeners]) listener(run);
  }

  private onVisibility(): void {
    clearTimeout(this.hiddenTimer);
    if (document.visibilityState === "hidden") {
      this.hiddenTimer = setTimeout(() => {
        clearTimeout(this.timer);
        this.source?.close();
        this.source = null;
        this.setConnection({ state: "connecting" });
      }, HIDDEN_LIMIT_MS);
    } else if (this.source === null) {
      this.retryNow();
    }
  }

  private setConnection(connection: Connection): void {
    this.connection = connection;
    for (const listener of [...this.stateListeners]) listener();
  }
}

export const live = new LiveStream();

export function useConnection(): Connection {
  return useSyncExternalStore(live.subscribe, live.getConnection);
}
