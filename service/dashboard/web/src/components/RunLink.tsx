/** A run's name as a link to it. */

import { cutName } from "../format/name.ts";
import { Link, runHref } from "../routing/router.tsx";

interface Props {
  id: string;
  name: string;
  /** In a list, where the fields that an experiment varies have columns or marks of their own. */
  isBrief?: boolean;
}

export function RunLink({ id, name, isBrief = false }: Props) {
  return (
    <Link to={runHref(id)} className="mono run-link" title={name}>
      <MiddleCut text={name} isBrief={isBrief} />
    </Link>
  );
}

/** A name that gives way, where there is no room for it, first in what says least. The row around it lays it out. */
export function MiddleCut({ text, isBrief = false }: { text: string; isBrief?: boolean }) {
  const all = cutName(text);
  const parts = isBrief ? all.filter(({ gives }) => gives !== "first") : all;
  if (all.length === 1) return <span className="cut-end">{text}</span>;
  return (
    <span className="cut-name">
      {/* Parts beside each other would be read as words of their own. */}
      <span className="visually-hidden">{text}</span>
      <span className="parts" aria-hidden="true">
        {parts.map(({ text: part, gives }, index) => (
          <span key={index} className={gives === "no" ? "stays" : gives === "first" ? "gives-first" : "gives"}>
            {part}
          </span>
        ))}
      </span>
    </span>
  );
}
