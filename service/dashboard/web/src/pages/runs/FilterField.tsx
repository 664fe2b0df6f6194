/** The filter: finished conditions as chips, the one being typed as text, with completion. */

import { useEffect, useId, useRef, useState, type KeyboardEvent, type RefObject } from "react";

import { Key } from "../../components/controls.tsx";
import { completions, isComplete, joinQuery, splitQuery, tokenField } from "./query.ts";

const PAUSE_MS = 60;

interface Props {
  query: string;
  problem: string | null;
  inputRef: RefObject<HTMLInputElement | null>;
  onChange: (query: string) => void;
}

export function FilterField({ query, problem, inputRef, onChange }: Props) {
  const [chips, setChips] = useState(() => splitQuery(query));
  const [draft, setDraft] = useState("");
  const [isOpen, setIsOpen] = useState(false);
  const [active, setActive] = useState(0);
  const sent = useRef(query);
  const listId = useId();

  // The address or a segment changed the filter: show that one.
  useEffect(() => {
    if (query === sent.current) return;
    sent.current = query;
    setChips(splitQuery(query));
    setDraft("");
  }, [query]);

  useEffect(() => {
    const text = joinQuery(draft !== "" && isComplete(draft) ? [...chips, draft] : chips);
    if (text === sent.current) return;
    const timer = setTimeout(() => {
      sent.current = text;
      onChange(text);
    }, PAUSE_MS);
    return () => clearTimeout(timer);
  }, [chips, draft, onChange]);

  const options = isOpen ? completions(draft).slice(0, 9) : [];

  const commit = (token: string) => {
    if (isComplete(token) && tokenField(token) !== null) {
      setChips([...chips, token]);
      setDraft("");
    } else {
      setDraft(token);
    }
    setActive(0);
  };

  const onKeyDown = (event: KeyboardEvent<HTMLInputElement>) => {
    const option = options[active];
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      setIsOpen(true);
      const count = Math.max(options.length, 1);
      setActive((active + (event.key === "ArrowDown" ? 1 : count - 1)) % count);
    } else if ((event.key === "Tab" || event.key === "Enter") && isOpen && option && draft !== "") {
      event.preventDefault();
      commit(option.text);
    } else if (event.key === "Enter") {
      event.preventDefault();
      if (draft !== "" && isComplete(draft)) {
        setChips([...chips, ...splitQuery(draft)]);
        setDraft("");
      }
      setIsOpen(false);
    } else if (event.key === "Backspace" && draft === "" && chips.length > 0) {
      event.preventDefault();
      setDraft(chips.at(-1) ?? "");
      setChips(chips.slice(0, -1));
    } else if (event.key === "Escape") {
      event.currentTarget.blur();
    }
  };

  const onText = (text: string) => {
    setIsOpen(true);
    setActive(0);
    const parts = splitQuery(text);
    const isFinished = /\s$/.test(text) && parts.length > 0 && parts.every(isComplete);
    if (isFinished || parts.length > 1) {
      const rest = isFinished ? [] : parts.slice(-1);
      setChips([...chips, ...parts.slice(0, parts.length - rest.length)]);
      setDraft(rest[0] ?? "");
    } else {
      setDraft(text);
    }
  };

  return (
    <div className="filter-anchor">
      <div className="filter" onClick={() => inputRef.current?.focus()}>
        <svg width="14" height="14" fill="none" stroke="currentColor" strokeWidth="1.5" aria-hidden="true">
          <circle cx="6" cy="6" r="4.2" />
          <path d="M9.3 9.3 13 13" />
        </svg>
        {chips.map((chip, index) => (
          <Chip key={`${index} ${chip}`} token={chip} onRemove={() => setChips(chips.filter((_, at) => at !== index))} />
        ))}
        <input
          ref={inputRef}
          type="text"
          value={draft}
          placeholder={chips.length > 0 ? "add a filter" : "status:running, scale:>=2^16, or a name"}
          aria-label="Filter runs"
          aria-invalid={problem !== null}
          aria-describedby={problem === null ? undefined : `${listId}-problem`}
          role="combobox"
          aria-expanded={options.length > 0}
          aria-controls={options.length > 0 ? listId : undefined}
          aria-activedescendant={options[active] ? `${listId}-${active}` : undefined}
          autoComplete="off"
          spellCheck={false}
          maxLength={1000}
          onChange={(event) => onText(event.target.value)}
          onFocus={() => setIsOpen(true)}
          onBlur={() => setIsOpen(false)}
          onKeyDown={onKeyDown}
        />
        <Key>/</Key>
      </div>
      {options.length > 0 && (
        <ul className="menu completions" id={listId} role="listbox" aria-label="Completions">
          {options.map((option, index) => (
            <li
              key={option.text}
              id={`${listId}-${index}`}
              role="option"
              aria-selected={index === active}
              onPointerDown={(event) => {
                event.preventDefault();
                commit(option.text);
              }}
            >
              <span className="mono">{option.text}</span>
              <span className="hint">{option.hint}</span>
            </li>
          ))}
        </ul>
      )}
      {problem !== null && (
        <p className="filter-problem" id={`${listId}-problem`} role="alert">
          {problem}
        </p>
      )}
    </div>
  );
}

function Chip({ token, onRemove }: { token: string; onRemove: () => void }) {
  const field = tokenField(token);
  const split = field === null ? 0 : field.length + 1;
  return (
    <button type="button" className="token" onClick={onRemove} aria-label={`Remove filter ${token}`} title="Remove">
      <span>{token.slice(0, split)}</span>
      {token.slice(split)}
    </button>
  );
}
