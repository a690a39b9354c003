// Where the page has its runs from: blocks inside of an exported page, or the server of `fppo view`.

import { columnOf, columnsOf, rowOf } from "./parquet.js";

const CACHED = 6; // files of rows whose bytes are kept
const WHOLE = 2 ** 22; // bytes up to which a file is read at once, instead of by ranges
const CHUNK = 64; // steps of one index

export function source() {
  const embedded = document.getElementById("state");
  return embedded ? embeddedSource(JSON.parse(embedded.textContent)) : liveSource(liveBytes());
}

// A source has `live`, `states(known)`, `index(run, steps)` and `row(run, step, number)`, all but the first async.
function embeddedSource(states) {
  const file = cached(async (run, step) => ({ buffer: decoded(`rows-${run}-${step}`) }));
  return {
    live: false,
    states: async () => states,
    index: async (run, steps) => (steps.length ? columnsOf(decoded(`index-${run}-${steps[0]}`)) : new Map()),
    ...readers(file),
  };
}

function liveSource({ json, bytes, range, sizes }) {
  const file = cached(async (run, step, tag) => {
    const name = `run/${run}/samples/${step}`;
    const size = sizes(tag);
    if (size <= WHOLE) return { buffer: await bytes(name) };
    return { buffer: { byteLength: size, slice: (start, end) => range(name, start, end ?? size) } };
  });
  return {
    live: true,
    states: (known) => json("states", known),
    index: async (run, steps) => columnsOf(await bytes(`run/${run}/index?steps=${steps.join(",")}`)),
    ...readers(file),
  };
}

function readers(file) {
  return {
    row: async (run, step, number, tag) => rowOf(await file(run, step, tag), number, ["images"]),
    images: async (run, step, tag) => columnOf(await file(run, step, tag), "images"),
  };
}

// Requests to the server. The page's own address holds the token, so that relative ones do, too.
function liveBytes() {
  const get = async (path, options) => {
    const reply = await fetch(path, { cache: "no-store", ...options });
    if (!reply.ok) throw new Error(`${path}: ${reply.status} ${await reply.text()}`);
    return reply;
  };
  return {
    json: async (path, known) => (await get(`${path}?known=${encodeURIComponent(JSON.stringify(known))}`)).json(),
    bytes: async (path) => (await get(path)).arrayBuffer(),
    range: async (path, start, end) =>
      (await get(path, { headers: { Range: `bytes=${start}-${end - 1}` } })).arrayBuffer(),
    sizes: (tag) => Number(tag.split("-")[0]),
  };
}

// Steps in the chunks that one index holds.
export function chunked(steps) {
  return Array.from({ length: Math.ceil(steps.length / CHUNK) }, (_, i) => steps.slice(i * CHUNK, (i + 1) * CHUNK));
}

function cached(open) {
  const files = new Map();
  return async (run, step, tag) => {
    const key = `${run}/${step}/${tag}`;
    const file = files.get(key) ?? open(run, step, tag);
    files.delete(key);
    files.set(key, file); // the newest last
    if (files.size > CACHED) files.delete(files.keys().next().value);
    try {
      return await file;
    } catch (error) {
      files.delete(key);
      throw error;
    }
  };
}

// The bytes of a block, which holds them as base64; a block of no script's type is not parsed when the page opens.
function decoded(id) {
  const block = document.getElementById(id);
  if (!block) throw new Error(`the page has no block ${id}`);
  const letters = atob(block.textContent);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes.buffer;
}
