// Numbers and spans of time as short texts.

export function isNumber(x) {
  return typeof x === "number" && Number.isFinite(x);
}

// A number in few characters: "0.123", "1,234", "12.3k", "1.2e-5"; a dash for none.
export function short(x, digits = 3) {
  if (!isNumber(x)) return x === null || x === undefined ? "–" : String(x);
  const size = Math.abs(x);
  if (x === 0) return "0";
  if (size >= 1000 && size < 999500) {
    return size < 10000 ? trimmed(x.toFixed(Math.max(digits - 4, 0))) : `${trimmed((x / 1000).toPrecision(digits))}k`;
  }
  if (size >= 0.001 && size < 1000) return trimmed(x.toPrecision(digits));
  const [number, exponent] = x.toExponential(Math.max(digits - 2, 0)).split("e");
  return `${trimmed(number)}e${Number(exponent)}`;
}

function trimmed(text) {
  return text.includes(".") ? text.replace(/0+$/, "").replace(/\.$/, "") : text;
}

export function signed(x, digits = 3) {
  return isNumber(x) && x > 0 ? `+${short(x, digits)}` : short(x, digits);
}

export function counted(n, one, many = `${one}s`) {
  return `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
}

export function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds === 0) return "0 s";
  if (seconds < 0.001) return `${short(seconds * 1e6, 2)} µs`;
  if (seconds < 1) return `${short(seconds * 1000, 3)} ms`;
  if (seconds < 60) return `${short(seconds, 3)} s`;
  return seconds < 3600 ? `${(seconds / 60).toFixed(1)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

// Bytes in the unit that fits: "512 B", "1.5 MiB", "24 GiB"; a dash for none.
export function bytes(x) {
  if (!isNumber(x)) return "–";
  const power = Math.min(Math.floor(Math.log2(Math.max(x, 1)) / 10), 4);
  return `${short(x / 1024 ** power)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

// A value of the settings as text.
export function shown(value) {
  if (value === null || value === undefined) return "–";
  if (value === true) return "yes";
  if (value === false) return "no";
  if (Array.isArray(value)) return value.length ? value.map(shown).join(", ") : "none";
  if (isNumber(value) && value !== 0 && Math.abs(value) < 1e-3) return short(value, 6);
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

// The end of a long text: a prompt's template is at its beginning, and the question at its end.
export function tail(text, most) {
  return text.length > most ? `…${text.slice(text.length - most)}` : text;
}

// The most similar of several names, or null if none is near.
export function nearest(name, names) {
  const scored = names.map((each) => [distance(name.toLowerCase(), each.toLowerCase()), each]);
  const [best] = scored.sort((a, b) => a[0] - b[0]);
  return best && best[0] <= Math.max(1, Math.floor(name.length / 3)) ? best[1] : null;
}

function distance(a, b) {
  let before = Array.from({ length: b.length + 1 }, (_, j) => j);
  for (let i = 1; i <= a.length; i++) {
    const line = [i];
    for (let j = 1; j <= b.length; j++) {
      line[j] = Math.min(before[j] + 1, line[j - 1] + 1, before[j - 1] + (a[i - 1] === b[j - 1] ? 0 : 1));
    }
    before = line;
  }
  return before[b.length];
}
