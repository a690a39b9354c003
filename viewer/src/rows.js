// All sampled rows of all runs, column by column. A row is a number, its place in the columns.

// What every row has; a run's further scores are columns, too.
export const TEXT_COLUMNS = ["id", "source", "finish", "prompt", "prompt_key", "response", "ground_truth"];

export class Rows {
  constructor() {
    this.count = 0;
    this.columns = new Map([
      ["run", []],
      ["step", []],
      ["number", []],
    ]);
  }

  // Append the columns of a table, one value for each row; columns that one side lacks are null there.
  append(run, table) {
    const added = table.get("step")?.length ?? 0;
    const names = new Set([...this.columns.keys(), ...table.keys()]);
    for (const name of names) {
      const column = this.columns.get(name) ?? new Array(this.count).fill(null);
      const values = name === "run" ? null : table.get(name);
      if (values) for (const value of values) column.push(typeof value === "bigint" ? Number(value) : (value ?? null));
      else for (let i = 0; i < added; i++) column.push(name === "run" ? run : null);
      this.columns.set(name, column);
    }
    this.count += added;
  }

  // Drop the rows of some steps of a run.
  drop(run, steps) {
    if (!steps.size) return;
    const [runs, all] = [this.columns.get("run"), this.columns.get("step")];
    const kept = this.#where((row) => !(runs[row] === run && steps.has(all[row])));
    if (kept.length === this.count) return;
    for (const [name, column] of this.columns)
      this.columns.set(
        name,
        kept.map((row) => column[row]),
      );
    this.count = kept.length;
  }

  get(name, row) {
    return this.columns.get(name)?.[row] ?? null;
  }

  // The names of the parts of a score, as "score.NAME".
  get parts() {
    return [...this.columns.keys()].filter((name) => name.startsWith("score."));
  }

  // The rows that `keep`, by a column; rows without a number or text come last either way.
  ordered(keep, [name, way]) {
    const order = this.#where(keep);
    const column = this.columns.get(name);
    const [steps, runs] = [this.columns.get("step"), this.columns.get("run")];
    if (!column) return order;
    return order.sort((a, b) => {
      const [x, y] = [column[a], column[b]];
      if (x === y) return steps[b] - steps[a] || runs[a] - runs[b] || a - b;
      if (x === null || y === null) return x === null ? 1 : -1;
      return x < y ? -way : way;
    });
  }

  // The responses to one prompt in one step.
  group(row) {
    return this.#same(row, ["run", "step", "group"]);
  }

  // All responses to a prompt in a run, by step.
  over(row) {
    const steps = this.columns.get("step");
    return this.#same(row, ["run", "prompt_key"]).sort((a, b) => steps[a] - steps[b] || a - b);
  }

  // Rows with the prompt of a row in other runs: for each run those of the step nearest to the row's, the earlier of two.
  across(row) {
    const [runs, steps] = [this.columns.get("run"), this.columns.get("step")];
    const found = new Map();
    for (const other of this.#same(row, ["prompt_key"])) {
      if (runs[other] === runs[row]) continue;
      const nearest = found.get(runs[other])?.[0] ?? other;
      const [gap, least] = [other, nearest].map((each) => Math.abs(steps[each] - steps[row]));
      if (gap < least || (gap === least && steps[other] < steps[nearest])) found.set(runs[other], [other]);
      else if (steps[other] === steps[nearest]) found.set(runs[other], [...(found.get(runs[other]) ?? []), other]);
    }
    return [...found.values()];
  }

  // The row of a run, a step and a number in its file; -1 for none.
  find(run, step, number) {
    const [runs, steps, numbers] = ["run", "step", "number"].map((name) => this.columns.get(name));
    for (let row = 0; row < this.count; row++) {
      if (numbers[row] === number && steps[row] === step && runs[row] === run) return row;
    }
    return -1;
  }

  #same(row, names) {
    const columns = names.map((name) => this.columns.get(name)).filter(Boolean);
    return columns.length < names.length ? [row] : this.#where((other) => columns.every((x) => x[other] === x[row]));
  }

  #where(keep) {
    const kept = [];
    for (let row = 0; row < this.count; row++) if (keep(row)) kept.push(row);
    return kept;
  }
}

export function mean(numbers) {
  const finite = numbers.filter((x) => typeof x === "number" && Number.isFinite(x));
  return finite.length ? finite.reduce((sum, x) => sum + x, 0) / finite.length : null;
}
