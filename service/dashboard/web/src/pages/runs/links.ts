import { href } from "../../routing/router.tsx";

/** The compare page for these runs, in this order: `?a=…&b=…`. */
export function compareHref(ids: readonly string[]): string {
  return href("/compare", Object.fromEntries(ids.map((id, index) => [String.fromCharCode(97 + index), id])));
}
