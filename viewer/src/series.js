// Curves: smoothing, common steps, means over seeds with their confidence, and ranges of axes.

import { isNumber } from "./format.js";

// The 0.975 quantiles of Student's t with 1, 2, ... degrees of freedom.
const STUDENT = [
  12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131, 2.12, 2.11,
  2.101, 2.093, 2.086,
];

// One record for each step, in order; lines of one step are joined.
export function merged(lines) {
  const steps = new Map();
  for (const line of lines) {
    if (Number.isInteger(line.step)) steps.set(line.step, { ...steps.get(line.step), ...line });
  }
  return [...steps.values()].sort((a, b) => a.step - b.step);
}

// The points [x, value] of a metric, finite numbers alone.
export function points(records, name, xOf = (record) => record.step) {
  return records
    .filter((record) => isNumber(record[name]) && isNumber(xOf(record)))
    .map((record) => [xOf(record), record[name]]);
}

// A centred moving average over a share of the line, narrower at its ends: it lags behind nothing.
export function smooth(line, share) {
  const half = Math.round((share * line.length) / 2);
  if (!half) return line;
  const sums = [0];
  for (const [, value] of line) sums.push(sums[sums.length - 1] + value);
  return line.map(([x], i) => {
    const reach = Math.min(half, i, line.length - 1 - i);
    return [x, (sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1)];
  });
}

// Lines over the union of their xs: [xs, values of the first, ...], null where a line has none.
export function aligned(lines) {
  const xs = [...new Set(lines.flatMap((line) => line.map(([x]) => x)))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, i) => [x, i]));
  const columns = lines.map((line) => {
    const column = new Array(xs.length).fill(null);
    for (const [x, value] of line) column[place.get(x)] = value;
    return column;
  });
  return [xs, ...columns];
}

// The mean of several lines where all have a number, and the 95 % confidence interval of that mean (Student's t).
export function band(lines) {
  const [xs, ...columns] = aligned(lines);
  const result = { mean: [], low: [], high: [] };
  xs.forEach((x, i) => {
    const values = columns.map((column) => column[i]);
    if (values.some((value) => value === null)) return;
    const { mean, half } = spread(values);
    result.mean.push([x, mean]);
    result.low.push([x, mean - half]);
    result.high.push([x, mean + half]);
  });
  return result;
}

export function spread(values) {
  const mean = values.reduce((sum, x) => sum + x, 0) / values.length;
  if (values.length < 2) return { mean, half: 0 };
  const degrees = values.length - 1;
  const variance = values.reduce((sum, x) => sum + (x - mean) ** 2, 0) / degrees;
  const quantile = degrees <= STUDENT.length ? STUDENT[degrees - 1] : 1.96 + 2.5 / degrees;
  return { mean, half: quantile * Math.sqrt(variance / values.length) };
}

// The range of an axis: at least `least` and 2 % of the largest number wide, so that noise looks small.
export function axisRange(values, least = 0) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const narrow = Math.max(least, 0.02 * Math.max(Math.abs(low), Math.abs(high))) || 1;
  if (high - low < narrow) {
    const middle = (low + high) / 2;
    const start = low >= 0 ? Math.max(middle - narrow / 2, 0) : middle - narrow / 2;
    return [start, Math.max(start + narrow, high)];
  }
  const margin = (high - low) * 0.06;
  return [low >= 0 ? Math.max(low - margin, 0) : low - margin, high + margin];
}

// Settings that name the place of a run, not what it does.
const PLACES = ["output_dir", "resume"];

// The settings in which runs differ: [name, value in each run].
export function differing(runs) {
  const names = new Set(runs.flatMap((run) => Object.keys(run.settings)));
  return [...names]
    .filter((name) => !PLACES.includes(name) && new Set(runs.map((run) => JSON.stringify(run.settings[name]))).size > 1)
    .map((name) => [name, runs.map((run) => run.settings[name] ?? null)]);
}

// Runs that differ in their seeds alone, as lists of their places in `runs`.
export function seedGroups(runs) {
  const groups = new Map();
  runs.forEach((run, i) => {
    const rest = Object.entries(run.settings).filter(([name]) => name !== "seed" && !PLACES.includes(name));
    const key = rest.length ? JSON.stringify(rest.sort(([a], [b]) => (a < b ? -1 : 1))) : `run ${i}`;
    groups.set(key, [...(groups.get(key) ?? []), i]);
  });
  return [...groups.values()];
}
