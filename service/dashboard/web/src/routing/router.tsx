/** A small router over the History API: paths choose the page, query parameters hold the state a colleague should see. */

import { useCallback, useMemo, useSyncExternalStore, type AnchorHTMLAttributes, type MouseEvent } from "react";

export const BASE = "/ui";

const listeners = new Set<() => void>();

function emit(): void {
  for (const listener of [...listeners]) listener();
}

window.addEventListener("popstate", emit);

function subscribe(listener: () => void): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function currentUrl(): string {
  return window.location.pathname + window.location.search;
}

export function navigate(to: string, options: { replace?: boolean } = {}): void {
  if (to === currentUrl()) return;
  const isNewPage = to.split("?")[0] !== window.location.pathname;
  if (options.replace) window.history.replaceState(null, "", to);
  else window.history.pushState(null, "", to);
  if (isNewPage && !options.replace) window.scrollTo(0, 0);
  emit();
}

export interface Place {
  /** Path below the base, without a trailing slash: `/runs/abc`. */
  path: string;
  query: URLSearchParams;
}

export function usePlace(): Place {
  const url = useSyncExternalStore(subscribe, currentUrl);
  return useMemo(() => {
    const [pathname = "", search = ""] = url.split("?");
    const path = pathname.startsWith(BASE) ? pathname.slice(BASE.length) : pathname;
    return { path: path.replace(/\/+$/, "") || "/", query: new URLSearchParams(search) };
  }, [url]);
}

export type QueryChange = Record<string, string | null>;

/** Set or (null) remove query parameters of this page; replaces the history entry unless told to push one. */
export function changeQuery(change: QueryChange, options: { push?: boolean } = {}): void {
  const query = new URLSearchParams(window.location.search);
  for (const [key, value] of Object.entries(change)) {
    if (value === null || value === "") query.delete(key);
    else query.set(key, value);
  }
  const text = query.toString();
  navigate(window.location.pathname + (text ? `?${text}` : ""), { replace: !options.push });
}

export function useQuery(name: string): [string | null, (value: string | null) => void] {
  const { query } = usePlace();
  const set = useCallback((value: string | null) => changeQuery({ [name]: value }), [name]);
  return [query.get(name), set];
}

export function href(path: string, query: Record<string, string | null | undefined> = {}): string {
  const search = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) if (value) search.set(key, value);
  const text = search.toString();
  return BASE + path + (text ? `?${text}` : "");
}

export function runHref(id: string): string {
  return href(`/runs/${encodeURIComponent(id)}`);
}

function isPlainClick(event: MouseEvent): boolean {
  return event.button === 0 && !event.metaKey && !event.ctrlKey && !event.shiftKey && !event.altKey;
}

export function Link({ to, onClick, ...rest }: AnchorHTMLAttributes<HTMLAnchorElement> & { to: string }) {
  return (
    <a
      {...rest}
      href={to}
      onClick={(event) => {
        onClick?.(event);
        if (event.defaultPrevented || !isPlainClick(event)) return;
        event.preventDefault();
        navigate(to);
      }}
    />
  );
}
