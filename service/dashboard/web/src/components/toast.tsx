/** Short notices in the corner, read out to screen readers: "Link copied", or why a command was refused. */

import { useEffect, useSyncExternalStore } from "react";

import { asApiError } from "../api/resource.ts";

const SHOWN_MS = 5000;
let message: string | null = null;
const listeners = new Set<() => void>();

export function showToast(text: string | null): void {
  message = text;
  for (const listener of [...listeners]) listener();
}

export function showError(error: unknown): void {
  const { problem } = asApiError(error);
  showToast([problem.detail ?? problem.title, problem.remedy].filter(Boolean).join(" "));
}

export async function copyText(text: string, notice: string): Promise<void> {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copyThroughSelection(text); // no clipboard without a secure context: plain http on another host
  }
  showToast(notice);
}

function copyThroughSelection(text: string): void {
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "visually-hidden";
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

export function ToastRegion() {
  const text = useSyncExternalStore(
    (listener) => {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
    () => message,
  );
  useEffect(() => {
    if (text === null) return;
    const timer = setTimeout(() => showToast(null), SHOWN_MS);
    return () => clearTimeout(timer);
  }, [text]);
  return (
    <div aria-live="polite" role="status">
      {text !== null && <div className="toast">{text}</div>}
    </div>
  );
}
