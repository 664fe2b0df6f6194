export default function Page(_: Record<string, unknown>) { return null; }
