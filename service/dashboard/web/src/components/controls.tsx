/** Buttons, segments and menus, with the manners a keyboard expects of them. */

import { useEffect, useId, useRef, useState, type ReactNode } from "react";

export function Key({ children }: { children: string }) {
  return (
    <kbd className="kbd" aria-hidden="true">
      {children}
    </kbd>
  );
}

export interface SegmentOption {
  value: string;
  label: ReactNode;
}

export function Segments(props: {
  label: string;
  options: readonly SegmentOption[];
  value: string;
  onChange: (value: string) => void;
}) {
  return (
    <div className="seg" role="group" aria-label={props.label}>
      {props.options.map((option) => (
        <button
          key={option.value}
          type="button"
          aria-pressed={option.value === props.value}
          onClick={() => props.onChange(option.value)}
        >
          {option.label}
        </button>
      ))}
    </div>
  );
}

/** A button with a panel below it; closes on Escape, on a click elsewhere, and when focus leaves. */
export function Menu({ label, children }: { label: ReactNode; children: (close: () => void) => ReactNode }) {
  const [isOpen, setIsOpen] = useState(false);
  const anchor = useRef<HTMLDivElement>(null);
  const button = useRef<HTMLButtonElement>(null);
  const id = useId();

  useEffect(() => {
    if (!isOpen) return;
    const onPointer = (event: PointerEvent) => {
      if (!anchor.current?.contains(event.target as Node)) setIsOpen(false);
    };
    document.addEventListener("pointerdown", onPointer);
    return () => document.removeEventListener("pointerdown", onPointer);
  }, [isOpen]);

  const close = () => {
    setIsOpen(false);
    button.current?.focus();
  };

  return (
    <div
      className="menu-anchor"
      ref={anchor}
      onKeyDown={(event) => {
        if (event.key === "Escape" && isOpen) {
          event.stopPropagation();
          close();
        }
      }}
      onBlur={(event) => {
        if (event.relatedTarget && !anchor.current?.contains(event.relatedTarget as Node)) setIsOpen(false);
      }}
    >
      <button
        type="button"
        className="btn"
        ref={button}
        aria-expanded={isOpen}
        aria-controls={isOpen ? id : undefined}
        onClick={() => setIsOpen((value) => !value)}
      >
        {label}
      </button>
      {isOpen && (
        <div className="menu" id={id}>
          {children(close)}
        </div>
      )}
    </div>
  );
}

const ARMED_MS = 3000;

/** A button for what cannot be undone: the first press arms it, the second does it. */
export function ConfirmButton(props: { label: string; confirm: string; disabled?: boolean; onConfirm: () => void }) {
  const [isArmed, setIsArmed] = useState(false);
  useEffect(() => {
    if (!isArmed) return;
    const timer = setTimeout(() => setIsArmed(false), ARMED_MS);
    return () => clearTimeout(timer);
  }, [isArmed]);
  return (
    <button
      type="button"
      className={isArmed ? "btn armed" : "btn"}
      disabled={props.disabled}
      onClick={() => {
        if (isArmed) props.onConfirm();
        setIsArmed(!isArmed);
      }}
    >
      {isArmed ? props.confirm : props.label}
    </button>
  );
}
