/**
 * What this page hears of changes: `GET /events`, a `run` event with a Run on each.
 *
 * The connection is one that all tabs share; where a browser has no shared workers it is the page's own. When it is
 * there, the first time as after a loss, `onResync` listeners read their resources again, because whatever changed
 * since they were read was not seen. A page that has been hidden for a while stops listening, and reads again when it
 * is looked at.
 */

import { useSyncExternalStore } from "react";

import { Changes, type Said } from "./changes.ts";
import type { Run } from "./types.ts";

export type Connection = { state: "connecting" } | { state: "open" } | { state: "lost"; since: number };

/** Where changes are heard; `listen` also cuts a pause between two attempts short. */
interface Source {
  listen(): void;
  leave(): void;
}

const HIDDEN_LIMIT_MS = 30_000;

class LiveStream {
  private source: Source | null = null;
  private isListening = false;
  private connection: Connection = { state: "connecting" };
  private hiddenTimer: ReturnType<typeof setTimeout> | undefined;
  private lastEventAt: number | null = null;
  private readonly runListeners = new Set<(run: Run) => void>();
  private readonly resyncListeners = new Set<() => void>();
  private readonly stateListeners = new Set<() => void>();

  start(): void {
    this.source = sharedSource(this.hear, () => this.useOwnSource());
    document.addEventListener("visibilitychange", () => this.onVisibility());
    window.addEventListener("online", () => this.retryNow());
    // A page that the browser keeps for the way back is not there meanwhile.
    window.addEventListener("pagehide", () => this.leave());
    window.addEventListener("pageshow", (event) => event.persisted && this.listen());
    if (this.source === null) this.useOwnSource();
    else this.listen();
    this.onVisibility();
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
    if (this.connection.state !== "open") this.listen();
  }

  private listen(): void {
    this.isListening = true;
    this.source?.listen();
  }

  private leave(): void {
    if (!this.isListening) return;
    this.isListening = false;
    this.source?.leave();
    this.setConnection({ state: "connecting" });
  }

  private useOwnSource(): void {
    const changes = new Changes(this.hear);
    this.isListening = false;
    this.source = { listen: () => changes.open(), leave: () => changes.close() };
    // Six tabs that were opened unseen would otherwise leave no connection to the seventh.
    if (document.visibilityState === "visible") this.listen();
  }

  private hear = (said: Said): void => {
    if (!this.isListening) return;
    if (said.kind === "run") {
      this.lastEventAt = Date.now();
      const run = JSON.parse(said.data) as Run;
      for (const listener of [...this.runListeners]) listener(run);
    } else if (said.kind === "lost") {
      this.setConnection({ state: "lost", since: said.since });
    } else if (this.connection.state !== "open") {
      this.onOpen();
    }
  };

  private onOpen(): void {
    this.lastEventAt = Date.now();
    this.setConnection({ state: "open" });
    for (const listener of [...this.resyncListeners]) listener();
  }

  private onVisibility(): void {
    clearTimeout(this.hiddenTimer);
    if (document.visibilityState === "hidden") this.hiddenTimer = setTimeout(() => this.leave(), HIDDEN_LIMIT_MS);
    else if (!this.isListening) this.listen();
  }

  private setConnection(connection: Connection): void {
    this.connection = connection;
    for (const listener of [...this.stateListeners]) listener();
  }
}

/** Return the connection that tabs share, or null where a browser has no such thing. */
function sharedSource(hear: (said: Said) => void, onFailure: () => void): Source | null {
  const script = document.querySelector<HTMLMetaElement>('meta[name="shared-changes"]')?.content;
  if (script === undefined || typeof SharedWorker === "undefined") return null;
  try {
    const worker = new SharedWorker(script, { type: "module", name: "muonscope-changes" });
    worker.onerror = () => {
      worker.port.close();
      onFailure();
    };
    worker.port.onmessage = (event: MessageEvent<Said>) => hear(event.data);
    return {
      listen: () => worker.port.postMessage("listen"),
      leave: () => worker.port.postMessage("leave"),
    };
  } catch {
    // A browser whose settings forbid workers throws.
    return null;
  }
}

export const live = new LiveStream();

export function useConnection(): Connection {
  return useSyncExternalStore(live.subscribe, live.getConnection);
}
