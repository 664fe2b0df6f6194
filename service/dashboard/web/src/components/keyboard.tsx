/** Single-key shortcuts, silent while the reader types, and the sheet that lists them. */

import { useEffect, useRef } from "react";

export type Shortcuts = Record<string, () => void>;

function isTyping(target: EventTarget | null): boolean {
  if (!(target instanceof HTMLElement)) return false;
  if (target instanceof HTMLInputElement) return !["checkbox", "radio", "button", "range"].includes(target.type);
  return target.isContentEditable || target instanceof HTMLTextAreaElement || target instanceof HTMLSelectElement;
}

/** Bind keys (as `KeyboardEvent.key` spells them) for as long as the component is mounted. */
export function useShortcuts(shortcuts: Shortcuts): void {
  const latest = useRef(shortcuts);
  latest.current = shortcuts;
  useEffect(() => {
    const onKey = (event: KeyboardEvent) => {
      if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
      if (document.querySelector("dialog[open]")) return;
      const action = latest.current[event.key];
      if (!action) return;
      // A focused link or button keeps Enter and Space for itself.
      if (event.key === "Enter" && (event.target as HTMLElement).closest("a, button, input")) return;
      event.preventDefault();
      action();
    };
    document.addEventListener("keydown", onKey);
    return () => document.removeEventListener("keydown", onKey);
  }, []);
}

const KEYS: readonly (readonly [string, readonly (readonly [string, string])[]])[] = [
  [
    "Everywhere",
    [
      ["n", "Submit a run"],
      ["t", "Light or dark"],
      ["?", "This list"],
    ],
  ],
  [
    "Runs",
    [
      ["/", "Filter"],
      ["j", "Next run"],
      ["k", "Previous run"],
      ["x", "Select"],
      ["Enter", "Open"],
      ["c", "Compare selected"],
      ["Esc", "Clear selection"],
    ],
  ],
  [
    "Run and compare",
    [
      ["D", "Zoom to the divergence"],
      ["J", "Next overflow"],
      ["K", "Previous overflow"],
      ["L", "Lock the readout"],
      ["← →", "Move the locked step"],
      ["Esc", "Unlock, then whole run"],
    ],
  ],
];

export function KeySheet({ isOpen, onClose }: { isOpen: boolean; onClose: () => void }) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    if (isOpen) dialog.current?.showModal();
    else dialog.current?.close();
  }, [isOpen]);
  return (
    <dialog className="sheet" ref={dialog} onClose={onClose} aria-labelledby="keys-title">
      <header>
        <h2 className="h2" id="keys-title">
          Keyboard
        </h2>
        <span className="grow" />
        <button type="button" className="btn plain" onClick={onClose}>
          Close
        </button>
      </header>
      <div className="keys">
        {KEYS.map(([title, entries]) => [
          <h3 key={title}>{title}</h3>,
          ...entries.map(([key, meaning]) => (
            <div key={title + key}>
              <span>{meaning}</span>
              <kbd className="kbd">{key}</kbd>
            </div>
          )),
        ])}
      </div>
    </dialog>
  );
}
