/** What the service has against a spec, asked as one types: fields that do not go together, and what cannot run here. */

import { useEffect, useState } from "react";

import { ApiError, requestJson } from "../../api/client.ts";
import { asApiError } from "../../api/resource.ts";
import type { Spec } from "./fields.ts";

const PAUSE_MS = 300;

/** The refusal of this spec, null while there is none or it is not known yet. */
export function useValidation(spec: Spec, isWorthAsking: boolean): ApiError | null {
  const [found, setFound] = useState<{ spec: Spec; error: ApiError | null } | null>(null);
  useEffect(() => {
    if (!isWorthAsking) return;
    const controller = new AbortController();
    const timer = setTimeout(() => {
      requestJson("/runs/validate", { method: "POST", body: spec, signal: controller.signal }).then(
        () => setFound({ spec, error: null }),
        (reason: unknown) => {
          if (controller.signal.aborted) return;
          const error = asApiError(reason);
          // Only what is said of the spec: whether the service is there at all, the banner says.
          setFound({ spec, error: error.problem.status === 422 ? error : null });
        },
      );
    }, PAUSE_MS);
    return () => {
      clearTimeout(timer);
      controller.abort();
    };
  }, [spec, isWorthAsking]);
  // The last answer stands until the next one: a sentence that blinks at every key would not be read.
  return isWorthAsking ? (found?.error ?? null) : null;
}
