/** A sentence of the service's, or of the spec's schema, with what stands between backticks as code. */

export function Prose({ text }: { text: string }) {
  const parts = text.split("`");
  // Without its partner a backtick is one of the sentence's own.
  if (parts.length % 2 === 0) return text;
  return parts.map((part, index) => (index % 2 === 1 ? <code key={index}>{part}</code> : part));
}
