/** Whether the window is as narrow as a phone's. */

import { useEffect, useState } from "react";

const NARROW = "(max-width: 720px)";

export function useIsNarrow(): boolean {
  const [isNarrow, setIsNarrow] = useState(() => matchMedia(NARROW).matches);
  useEffect(() => {
    const media = matchMedia(NARROW);
    const onChange = () => setIsNarrow(media.matches);
    media.addEventListener("change", onChange);
    return () => media.removeEventListener("change", onChange);
  }, []);
  return isNarrow;
}
