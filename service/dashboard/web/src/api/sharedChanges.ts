/**
 * The script of a shared worker: one connection for all tabs of a browser, which allows six to a host.
 *
 * A page says `listen`, and `leave` when it is hidden or goes; whoever listens is told all that is said from then on.
 */

import { Changes } from "./changes.ts";

const listeners = new Set<MessagePort>();
const changes = new Changes((said) => {
  for (const port of listeners) port.postMessage(said);
});

self.addEventListener("connect", (event) => {
  const port = (event as MessageEvent).ports[0] as MessagePort;
  port.onmessage = ({ data }: MessageEvent<"listen" | "leave">) => {
    if (data === "leave") {
      listeners.delete(port);
      if (listeners.size === 0) changes.close();
      return;
    }
    listeners.add(port);
    if (changes.state !== null) port.postMessage(changes.state);
    changes.open();
  };
});
