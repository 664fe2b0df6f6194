/** What stands where content should: nothing yet, nothing at all, or something went wrong. */

import type { ReactNode } from "react";

import type { ApiError } from "../api/client.ts";

export function EmptyState({ title, children }: { title: string; children?: ReactNode }) {
  return (
    <div className="state-page">
      <h2>{title}</h2>
      {children}
    </div>
  );
}

export function ErrorState({ error, onRetry }: { error: ApiError; onRetry?: () => void }) {
  const { title, detail, remedy } = error.problem;
  return (
    <div className="state-page" role="alert">
      <h2>{title}</h2>
      {detail && <p>{detail}</p>}
      {remedy && <p>{remedy}</p>}
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
