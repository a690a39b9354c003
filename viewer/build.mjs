// Build the page's script and style sheet into fppo/report/viewer, with the licences of what they hold.
// `--check` builds in memory, and fails if a committed file differs by a byte.

import { createHash } from "node:crypto";
import { readFile, readdir, writeFile, mkdir } from "node:fs/promises";
import { dirname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const HERE = dirname(fileURLToPath(import.meta.url));
const TARGET = join(HERE, "..", "fppo", "report", "viewer");

async function built() {
  const { outputFiles, metafile } = await build({
    absWorkingDir: HERE,
    entryPoints: { viewer: "src/main.js" },
    outdir: TARGET,
    bundle: true,
    minify: true,
    format: "iife",
    target: "es2022",
    charset: "utf8",
    legalComments: "none",
    metafile: true,
    write: false,
  });
  const files = new Map(outputFiles.map((file) => [relative(TARGET, file.path), file.text]));
  return files
    .set("THIRD_PARTY.txt", await licences(Object.keys(metafile.inputs)))
    .set("SOURCES.txt", `${await digest()} sha256 of the sources in viewer, which a test compares\n`);
}

// The digest of the sources, with which a machine without npm notices that a build is due.
async function digest() {
  const sources = (await readdir(join(HERE, "src"))).map((name) => ["src", name]);
  const paths = [...sources, ["build.mjs"], ["package-lock.json"]];
  paths.sort((a, b) => (a.at(-1) < b.at(-1) ? -1 : 1));
  const hash = createHash("sha256");
  for (const path of paths)
    hash
      .update(`${path.at(-1)}\0`)
      .update(await readFile(join(HERE, ...path)))
      .update("\0");
  return hash.digest("hex");
}

// The licence of each package with a file in the bundle.
async function licences(inputs) {
  const names = inputs.map((path) => path.match(/node_modules\/((?:@[^/]+\/)?[^/]+)\//)?.[1]).filter(Boolean);
  const texts = [];
  for (const name of [...new Set(names)].sort()) {
    const folder = join(HERE, "node_modules", name);
    const { version, license } = JSON.parse(await readFile(join(folder, "package.json"), "utf8"));
    const file = (await readdir(folder)).find((each) => /^licen[cs]e/i.test(each));
    if (!file) throw new Error(`${name} brings no licence file`);
    texts.push(
      `${name} ${version}, ${license}\n\n${(await readFile(join(folder, file), "utf8")).replaceAll("\r\n", "\n").trim()}\n`,
    );
  }
  return `viewer.js and viewer.css hold the following packages.\n\n${texts.join(`\n${"-".repeat(80)}\n\n`)}`;
}

async function main() {
  const files = await built();
  const check = process.argv.includes("--check");
  await mkdir(TARGET, { recursive: true });
  const wrong = [];
  for (const [name, text] of files) {
    const path = join(TARGET, name);
    if (!check) await writeFile(path, text);
    else if ((await readFile(path, "utf8").catch(() => "")) !== text) wrong.push(name);
  }
  if (wrong.length) throw new Error(`${wrong.join(", ")} differ from what the sources give: run npm run build`);
  for (const [name, text] of files) console.log(`${name}: ${Buffer.byteLength(text)} bytes`);
}

main().catch((error) => {
  console.error(error.message);
  process.exitCode = 1;
});
