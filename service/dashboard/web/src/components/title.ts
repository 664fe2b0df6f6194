import { useEffect } from "react";

/** Name the browser tab after what the page shows. */
export function useTitle(title: string): void {
  useEffect(() => {
    document.title = `${title} · Muonscope`;
  }, [title]);
}
