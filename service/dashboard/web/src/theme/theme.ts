/** The colour theme: the system's until the reader chooses another, then remembered in this browser. */

import { useSyncExternalStore } from "react";

export type Theme = "light" | "dark";

const KEY = "muonscope.theme";
const listeners = new Set<() => void>();

function current(): Theme {
  return document.documentElement.dataset.theme === "dark" ? "dark" : "light";
}

function apply(theme: Theme): void {
  document.documentElement.dataset.theme = theme;
  for (const listener of listeners) listener();
}

export function toggleTheme(): void {
  const next: Theme = current() === "dark" ? "light" : "dark";
  try {
    localStorage.setItem(KEY, next);
  } catch {
    // Storage is switched off: the choice lasts for this page only.
  }
  apply(next);
}

export function followSystemTheme(): void {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => {
    if (localStorage.getItem(KEY) === null) apply(event.matches ? "dark" : "light");
  });
}

export function useTheme(): Theme {
  return useSyncExternalStore((listener) => {
    listeners.add(listener);
    return () => listeners.delete(listener);
  }, current);
}
