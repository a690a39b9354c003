// The numbers of tokens: which there are, what they are called, and the colours that show them.

import { isNumber } from "./format.js";

// kind "signed": blue above `middle` and orange below; "plain": from nothing to strong; "unlikely": strong for low
// log-probs; "ratio": signed by its logarithm.
export const NUMBERS = {
  advantages: { label: "Advantage", kind: "signed" },
  ratio: { label: "Ratio, trainer to sampler", kind: "ratio" },
  values: { label: "Value", kind: "plain" },
  entropy: { label: "Entropy (nats)", kind: "plain" },
  kl: { label: "KL to the reference (k1)", kind: "signed" },
  teacher_kl: { label: "Log-prob (trainer less teacher)", kind: "signed" },
  correction_weights: { label: "Weight of the correction", kind: "ratio" },
  old_log_probs: { label: "Log-prob (trainer)", kind: "unlikely" },
  rollout_log_probs: { label: "Log-prob (sampler)", kind: "unlikely" },
  ref_log_probs: { label: "Log-prob (reference)", kind: "unlikely" },
  teacher_log_probs: { label: "Log-prob (teacher)", kind: "unlikely" },
  returns: { label: "Return", kind: "signed" },
  token_rewards: { label: "Token reward", kind: "signed" },
  turn_rewards: { label: "Turn reward", kind: "signed" },
  process_rewards: { label: "Step reward", kind: "signed" },
  token_versions: { label: "Policy version", kind: "plain" },
};

// The numbers of a row's tokens by name, also those that two columns make together.
export function numbersOf(row) {
  const between = (a, b, f) =>
    row[a] && row[b] ? row[a].map((x, i) => (isNumber(x) && isNumber(row[b][i]) ? f(x, row[b][i]) : null)) : null;
  const made = {
    ratio: between("old_log_probs", "rollout_log_probs", (x, y) => Math.exp(x - y)),
    kl: between("old_log_probs", "ref_log_probs", (x, y) => x - y),
    teacher_kl: between("old_log_probs", "teacher_log_probs", (x, y) => x - y),
  };
  const all = Object.keys(NUMBERS).map((name) => [name, made[name] ?? row[name] ?? null]);
  return Object.fromEntries(all.filter(([, numbers]) => numbers));
}

// The strength of each token's colour from -1 to 1, null for none, and the numbers at its ends.
export function scaled(name, numbers, mask) {
  const { kind } = NUMBERS[name];
  const finite = numbers.filter((x, i) => isNumber(x) && (mask?.[i] ?? true));
  const { of, low, high } = SCALES[kind](finite);
  return { strengths: numbers.map((x) => (isNumber(x) ? Math.max(-1, Math.min(1, of(x))) : null)), low, high, kind };
}

const SCALES = {
  signed: (xs) => {
    const most = robust(xs.map(Math.abs)) || 1;
    return { of: (x) => x / most, low: -most, high: most };
  },
  ratio: (xs) => {
    const most = Math.max(robust(xs.filter((x) => x > 0).map((x) => Math.abs(Math.log(x)))), 1e-3);
    return { of: (x) => (x > 0 ? Math.log(x) / most : -1), low: Math.exp(-most), high: Math.exp(most) };
  },
  plain: (xs) => {
    const [low, high] = xs.length ? [least(xs), robust(xs)] : [0, 1];
    return { of: (x) => (high > low ? Math.max(0, (x - low) / (high - low)) : 0.5), low, high };
  },
  unlikely: () => ({ of: (x) => Math.min(1, Math.max(0, -x / 5)), low: 0, high: -5 }),
};

function least(xs) {
  return xs.reduce((a, b) => Math.min(a, b), Infinity);
}

// The largest number but for the top 2 %: one outlier does not pale the others.
function robust(xs) {
  const sorted = Float64Array.from(xs).sort();
  return sorted.length ? sorted[Math.min(Math.ceil(0.98 * sorted.length), sorted.length) - 1] : 0;
}

const MOST = 55; // per cent of a colour behind text: with more the text has a contrast below 4.5 in a dark page

// The background of a strength, as CSS.
export function colour(strength) {
  if (strength === null || Math.abs(strength) < 0.01) return "transparent";
  const share = Math.round(Math.abs(strength) * MOST);
  return `color-mix(in srgb, var(${strength > 0 ? "--plus" : "--minus"}) ${share}%, transparent)`;
}

// Black or white: the ink with more contrast on a colour such as "#0072b2".
export function inkOn(color) {
  const value = parseInt(color.slice(1), 16);
  const [red, green, blue] = [16, 8, 0].map((bits) => {
    const x = ((value >> bits) & 255) / 255;
    return x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  });
  const luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  return luminance > 0.179 ? "#000" : "#fff"; // where (1 + 0.05) / (x + 0.05) is (x + 0.05) / 0.05
}

// Consecutive tokens of one turn: [{turn, first, end}]; one span without a number where the row has no turns.
export function turns(row) {
  const count = row.pieces.length;
  if (!row.turn_ids) return [{ turn: null, first: 0, end: count }];
  const spans = [];
  row.turn_ids.forEach((turn, i) => {
    const last = spans[spans.length - 1];
    if (last && last.turn === turn) last.end = i + 1;
    else spans.push({ turn, first: i, end: i + 1 });
  });
  return spans.length ? spans : [{ turn: null, first: 0, end: count }];
}
