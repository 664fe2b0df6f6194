/** Requests to the service that served this page. Every failure becomes an ApiError with a sentence to show. */

import { noteUnauthorized } from "./session.ts";
import type { Problem } from "./types.ts";

export class ApiError extends Error {
  readonly problem: Problem;

  constructor(problem: Problem) {
    super(problem.detail || problem.title);
    this.name = "ApiError";
    this.problem = problem;
  }

  /** No reply at all: the controller is down or out of reach. */
  get isUnreachable(): boolean {
    return this.problem.status === 0;
  }
}

export interface RequestOptions {
  method?: "GET" | "POST" | "PATCH" | "DELETE";
  body?: unknown;
  signal?: AbortSignal;
  headers?: Record<string, string>;
}

async function send(path: string, accept: string, options: RequestOptions): Promise<Response> {
  const headers: Record<string, string> = { Accept: accept, ...options.headers };
  let body: string | undefined;
  if (options.body !== undefined) {
    headers["Content-Type"] = "application/json";
    body = JSON.stringify(options.body);
  }
  let response: Response;
  try {
    response = await fetch(path, { method: options.method ?? "GET", headers, body, signal: options.signal });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new ApiError({ status: 0, title: "The controller does not answer.", remedy: "Check that `muonscope up` runs." });
  }
  // A refused sign-in is the form's to tell.
  if (response.status === 401 && path !== "/session") noteUnauthorized();
  if (!response.ok) throw new ApiError(await readProblem(response));
  return response;
}

async function readProblem(response: Response): Promise<Problem> {
  try {
    const body = (await response.json()) as Partial<Problem>;
    if (typeof body.title === "string") return { ...body, title: body.title, status: response.status };
  } catch {
    // Not a problem document: a proxy answered, or the connection broke. The status alone has to do.
  }
  return { status: response.status, title: `The service answered ${response.status} ${response.statusText}`.trim() };
}

export async function requestJson<T>(path: string, options: RequestOptions = {}): Promise<T> {
  const response = await send(path, "application/json", options);
  return (await response.json()) as T;
}

export async function requestText(path: string, options: RequestOptions = {}): Promise<string> {
  const response = await send(path, "text/plain", options);
  return response.text();
}

export function runPath(id: string, ...rest: (string | number)[]): string {
  return ["/runs", encodeURIComponent(id), ...rest.map((part) => encodeURIComponent(String(part)))].join("/");
}

export function withQuery(path: string, query: Record<string, string | number | null | undefined>): string {
  const search = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") search.set(key, String(value));
  }
  const text = search.toString();
  return text ? `${path}?${text}` : path;
}
