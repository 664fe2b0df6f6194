/** Why an attempt failed: the error and the end of its traceback; all of it on demand. */

import { failureParts } from "../format/traceback.ts";

export function FailureText({ message }: { message: string }) {
  const { error, end, numLines } = failureParts(message);
  return (
    <>
      <code>{error}</code>
      {end !== "" && <code className="ink-2">{end}</code>}
      {numLines !== null && (
        <details>
          <summary className="ink-2">The whole message, {numLines} lines</summary>
          <code tabIndex={0}>{message}</code>
        </details>
      )}
    </>
  );
}
