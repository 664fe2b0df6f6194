// Bundles the dashboard into ../static: content-hashed files, index.html, and a .gz beside each text file.
//
//   node build.mjs [--out DIR]
//
// The bundle is written beside its destination and moved into place, so a half-built one is never served.

import { build } from "esbuild";
import { mkdir, readFile, readdir, rename, rm, stat, writeFile } from "node:fs/promises";
import path from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";

const HERE = path.dirname(fileURLToPath(import.meta.url));
const BASE = "/ui/";
const COMPRESSED = new Set([".js", ".css", ".html", ".svg"]);

const outFlag = process.argv.indexOf("--out");
const out = path.resolve(outFlag > 0 ? process.argv[outFlag + 1] : path.join(HERE, "..", "static"));
const staging = `${out}.building`;

await rm(staging, { recursive: true, force: true });

const result = await build({
  absWorkingDir: HERE,
  entryPoints: {
    app: "src/main.tsx",
    changes: "src/api/sharedChanges.ts",
    theme: "src/theme/boot.ts",
    styles: "src/styles/index.css",
    icon: "src/icon.svg",
  },
  outdir: path.join(staging, "assets"),
  entryNames: "[name]-[hash]",
  chunkNames: "[name]-[hash]",
  assetNames: "[name]-[hash]",
  publicPath: `${BASE}assets/`,
  bundle: true,
  splitting: true,
  format: "esm",
  target: ["es2022"],
  jsx: "automatic",
  minify: true,
  legalComments: "none",
  define: { "process.env.NODE_ENV": '"production"' },
  loader: { ".woff2": "file", ".svg": "copy" },
  metafile: true,
  logLevel: "warning",
});

const built = new Map();
for (const [file, facts] of Object.entries(result.metafile.outputs)) {
  const name = path.basename(file);
  if (facts.entryPoint) built.set(facts.entryPoint, name);
  const font = Object.keys(facts.inputs).find((input) => input.includes("inter-latin-wght-normal"));
  if (font && name.endsWith(".woff2")) built.set("font", name);
}
const at = (key) => {
  const name = built.get(key);
  if (!name) throw new Error(`the bundle has no output for ${key}`);
  return `${BASE}assets/${name}`;
};

// What the app imports at once is asked for beside it: found one by one, they would cost a second round.
const entry = Object.values(result.metafile.outputs).find(({ entryPoint }) => entryPoint === "src/main.tsx");
const chunks = new Set();
const follow = (output) => {
  for (const { path: file, kind } of output.imports) {
    if (kind !== "import-statement" || chunks.has(file)) continue;
    chunks.add(file);
    follow(result.metafile.outputs[file]);
  }
};
follow(entry);
const preloads = [...chunks].map((file) => `<link rel="modulepreload" href="${BASE}assets/${path.basename(file)}">`);

const template = await readFile(path.join(HERE, "src", "index.html"), "utf8");
const page = template
  .replace("{{theme}}", at("src/theme/boot.ts"))
  .replace("{{styles}}", at("src/styles/index.css"))
  .replace("{{icon}}", at("src/icon.svg"))
  .replace("{{font}}", at("font"))
  .replace("{{changes}}", at("src/api/sharedChanges.ts"))
  .replace("{{chunks}}", preloads.join("\n    "))
  .replace("{{app}}", at("src/main.tsx"));
if (page.includes("{{")) throw new Error("index.html has a placeholder that the build does not fill");
await writeFile(path.join(staging, "index.html"), page);

let total = 0;
for (const file of await readdir(staging, { recursive: true })) {
  const full = path.join(staging, file);
  if (!(await stat(full)).isFile()) continue;
  const content = await readFile(full);
  total += content.length;
  if (COMPRESSED.has(path.extname(file))) await writeFile(`${full}.gz`, gzipSync(content, { level: 9 }));
}

await mkdir(path.dirname(out), { recursive: true });
await rm(out, { recursive: true, force: true });
await rename(staging, out);
console.log(`dashboard: ${out} (${(total / 1024).toFixed(0)} KiB before compression)`);
