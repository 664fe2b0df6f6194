/** A run's name as a link to it. */

import { Link, runHref } from "../routing/router.tsx";

/** What a run table's narrowest cell shows whole. */
const SHORT = 24;
/** An experiment's runs begin alike and end in what tells them apart: that much of the end stays where a name is cut. */
const TAIL = 12;

export function RunLink({ id, name }: { id: string; name: string }) {
  const at = name.length > SHORT ? name.length - TAIL : name.length;
  return (
    <Link to={runHref(id)} className="mono run-link" title={name} aria-label={name}>
      <span className="run-link-head">{name.slice(0, at)}</span>
      {at < name.length && <span className="run-link-tail">{name.slice(at)}</span>}
    </Link>
  );
}
