/** A run by its name, as a way to its page. */

import { Link, runHref } from "../routing/router.tsx";

export function RunLink({ id, name }: { id: string; name: string }) {
  return (
    <Link to={runHref(id)} className="mono" title={name}>
      {name}
    </Link>
  );
}
