/** What stands where content should: nothing yet, nothing at all, or something went wrong. */

import type { ReactNode } from "react";

import type { ApiError } from "../api/client.ts";
import { Link } from "../routing/router.tsx";
import { Prose } from "./Prose.tsx";

export function EmptyState({ title, children }: { title: string; children?: ReactNode }) {
  return (
    <div className="state-page">
      <h2>{title}</h2>
      {children}
    </div>
  );
}

interface ErrorProps {
  error: ApiError;
  onRetry?: () => void;
  /** Where there is what was asked for and is not there; the service's own remedy is a request, for who asks by hand. */
  elsewhere?: { to: string; label: string };
}

export function ErrorState({ error, onRetry, elsewhere }: ErrorProps) {
  const { title, detail, remedy, status } = error.problem;
  if (status === 404 && elsewhere !== undefined) {
    return (
      <div className="state-page" role="alert">
        <h2>{title}</h2>
        {detail && <p>{detail}</p>}
        <Link to={elsewhere.to} className="btn primary">
          {elsewhere.label}
        </Link>
      </div>
    );
  }
  return (
    <div className="state-page" role="alert">
      <h2>{title}</h2>
      {detail && (
        <p>
          <Prose text={detail} />
        </p>
      )}
      {remedy && (
        <p>
          <Prose text={remedy} />
        </p>
      )}
      {onRetry && (
        <button type="button" className="btn" onClick={onRetry}>
          Try again
        </button>
      )}
    </div>
  );
}

export function LoadingState({ what }: { what: string }) {
  return (
    <div className="state-page" role="status">
      <span className="visually-hidden">Loading {what}</span>
      <span className="skeleton" style={{ width: 220 }} />
      <span className="skeleton" style={{ width: 160 }} />
    </div>
  );
}
