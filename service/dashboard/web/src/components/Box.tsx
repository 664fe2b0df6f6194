/** A titled box beside or below the charts, and the head of the tables in it. */

import type { ReactNode } from "react";

interface BoxProps {
  title: string;
  /** What stands on the right of the title. */
  aside?: ReactNode;
  /** Named as a region where the title alone does not say what it is of. */
  label?: string;
  className?: string;
  level?: 2 | 3;
  children: ReactNode;
}

export function Box({ title, aside, label, className, level = 2, children }: BoxProps) {
  const Heading = level === 2 ? "h2" : "h3";
  return (
    <section className={["box scroll-x", className].filter(Boolean).join(" ")} aria-label={label}>
      <header>
        <Heading className="h2">{title}</Heading>
        {aside !== undefined && <span className="aside num">{aside}</span>}
      </header>
      {children}
    </section>
  );
}

export interface HeadCell {
  key?: string;
  label: ReactNode;
  isLeft?: boolean;
}

/** Numbers stand right under their heading; words, marked `isLeft`, left. */
export function TableHead({ cells }: { cells: readonly (string | HeadCell)[] }) {
  return (
    <thead>
      <tr>
        {cells.map((cell) => {
          const { key, label, isLeft = false } = typeof cell === "string" ? { key: cell, label: cell } : cell;
          return (
            <th scope="col" className={isLeft ? "left" : undefined} key={key ?? String(label)}>
              {label}
            </th>
          );
        })}
      </tr>
    </thead>
  );
}

export function left(label: string): HeadCell {
  return { label, isLeft: true };
}
