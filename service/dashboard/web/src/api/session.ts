/** Whether the service asks for a token that this browser has not shown. Known from its first 401. */

import { useSyncExternalStore } from "react";

let isSignInNeeded = false;
const listeners = new Set<() => void>();

export function noteUnauthorized(): void {
  isSignInNeeded = true;
  for (const listener of [...listeners]) listener();
}

function subscribe(listener: () => void): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function useIsSignInNeeded(): boolean {
  return useSyncExternalStore(subscribe, () => isSignInNeeded);
}
