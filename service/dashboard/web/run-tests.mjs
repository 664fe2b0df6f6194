// Bundles each test file (TypeScript to JavaScript) into a temporary folder and runs Node's own test runner on them.

import { build } from "esbuild";
import { spawnSync } from "node:child_process";
import { mkdtemp, readdir, rm } from "node:fs/promises";
import os from "node:os";
import path from "node:path";
import { fileURLToPath } from "node:url";

const HERE = path.dirname(fileURLToPath(import.meta.url));
const out = await mkdtemp(path.join(os.tmpdir(), "muonscope-web-tests-"));
try {
  const sources = (await readdir(path.join(HERE, "test"))).filter((name) => name.endsWith(".test.ts"));
  await build({
    absWorkingDir: HERE,
    entryPoints: sources.map((name) => path.join("test", name)),
    outdir: out,
    outExtension: { ".js": ".mjs" },
    bundle: true,
    platform: "node",
    format: "esm",
    target: "node20",
    jsx: "automatic",
    // React's renderer to text is CommonJS and asks for Node's own modules.
    banner: { js: 'import { createRequire } from "node:module"; const require = createRequire(import.meta.url);' },
    sourcemap: "inline",
    logLevel: "warning",
  });
  const files = (await readdir(out)).map((name) => path.join(out, name));
  const run = spawnSync(process.execPath, ["--enable-source-maps", "--test", ...files], { stdio: "inherit" });
  process.exitCode = run.status ?? 1;
} finally {
  await rm(out, { recursive: true, force: true });
}
