/** The bar on top of every page: where one is, whether the page is live, and the way to a new run. */

import { useSyncExternalStore } from "react";

import { live, useConnection } from "../api/live.ts";
import { formatAgo, formatClock } from "../format/time.ts";
import { href, Link, usePlace } from "../routing/router.tsx";
import { toggleTheme, useTheme } from "../theme/theme.ts";
import { Key } from "./controls.tsx";
import { useNow } from "./time.tsx";

const PAGES = [
  ["/runs", "Runs"],
  ["/experiments", "Experiments"],
  ["/compare", "Compare"],
  ["/cluster", "Cluster"],
] as const;

export function TopBar({ onHelp }: { onHelp: () => void }) {
  const { path } = usePlace();
  const theme = useTheme();
  return (
    <header className="top">
      <Link to={href("/runs")} className="brand" aria-label="Muonscope, all runs">
        <svg width="18" height="14" aria-hidden="true">
          <path d="M1 3h4v3h4v3h4v3h4" stroke="currentColor" strokeWidth="1.8" fill="none" />
        </svg>
        <span className="brand-name">Muonscope</span>
      </Link>
      <nav aria-label="Pages">
        {PAGES.map(([target, label]) => (
          <Link
            key={target}
            to={href(target)}
            aria-current={path === target || path.startsWith(`${target}/`) ? "page" : undefined}
          >
            {label}
          </Link>
        ))}
      </nav>
      <span className="grow" />
      <LiveMark />
      <div className="top-actions">
        <button
          type="button"
          className="btn icon plain"
          onClick={toggleTheme}
          aria-label={theme === "dark" ? "Use light colours" : "Use dark colours"}
        >
          <svg width="14" height="14" viewBox="0 0 14 14" aria-hidden="true">
            <circle cx="7" cy="7" r="5.4" fill="none" stroke="currentColor" strokeWidth="1.4" />
            <path d="M7 1.6a5.4 5.4 0 0 1 0 10.8Z" fill="currentColor" />
          </svg>
        </button>
        <button type="button" className="btn icon plain wide-only" onClick={onHelp} aria-label="Keyboard shortcuts">
          ?
        </button>
        <Link to={href("/submit")} className="btn">
          <span>
            Submit<span className="wide-only"> run</span>
          </span>
          <Key>N</Key>
        </Link>
      </div>
    </header>
  );
}

function LiveMark() {
  const connection = useConnection();
  const now = useNow();
  const lastEventAt = useSyncExternalStore(live.subscribe, live.getLastEventAt);
  if (connection.state !== "open") {
    return (
      <span className="live lost">
        <i />
        {connection.state === "lost" ? "disconnected" : "connecting"}
      </span>
    );
  }
  return (
    <span className="live">
      <i />
      Live{lastEventAt === null ? "" : ` · updated ${formatAgo(live.getLastEventAt(), now)}`}
    </span>
  );
}

/** Says that what is on screen has stopped changing, and why; gone as soon as the stream is back. */
export function ConnectionBanner() {
  const connection = useConnection();
  if (connection.state !== "lost") return null;
  return (
    <div className="banner" role="alert">
      <span>
        Disconnected from the controller since {formatClock(connection.since)}. Figures are the last received; the page
        goes on by itself when the controller is back.
      </span>
      <button type="button" className="btn" onClick={() => live.retryNow()}>
        Try now
      </button>
    </div>
  );
}
