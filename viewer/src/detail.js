// One row: what was asked, what was answered, why it has its score, its group, and the same prompt in other steps and
// runs.

import { chart } from "./charts.js";
import { command, el, heading, text } from "./dom.js";
import { counted, isNumber, short, signed } from "./format.js";
import { mean } from "./rows.js";
import { choices, strip } from "./tokens.js";

const GROUP = 24; // cards of a group, and of the prompt's other steps, shown at first
const LONG = 1200; // letters of a prompt that are shown at first

// The pane of a row. `data` has {rows, row, runs, file, images}; `open(row)` goes to another one.
export function detail({ rows, row, runs, file, images }, { open, numbers, coloured }) {
  const run = runs[rows.get("run", row)];
  const group = rows.group(row).sort((a, b) => order(rows, a, b));
  const parts = [
    facts(rows, row, run),
    reasons({ rows, row, run, file, group }),
    section("Prompt", images.length ? pictures(images) : null, prompted(file.prompt)),
    file.ground_truth === null ? null : section("Expected", text("plain", file.ground_truth)),
    responded(file, numbers, coloured),
    grouped({ rows, row, group }, open),
    over({ rows, row, run }, open),
    runs.length > 1 ? across({ rows, row, runs, group }, open) : null,
    section(
      "Again",
      ...commands(run, rows.get("step", row)).map(([label, line]) =>
        el("div", {}, el("p", { className: "note", textContent: label }), command(line)),
      ),
    ),
  ];
  return el("div", { className: "detail" }, ...parts);
}

// The commands that make a run again, go on with it, or look at it in Python.
export function commands(run, step) {
  const again =
    step === null ? [] : [["Compute this step again and compare it", `fppo replay ${run.quoted} --step ${step}`]];
  const rows = step === null ? "" : `step=${step}`;
  return [
    ...again,
    ["Go on with the run", `fppo train ${run.quotedSettings}`],
    [
      "Train variants of it and compare them",
      `fppo compare ${run.quotedSettings} --vary SECTION.SETTING=A,B --seeds 3`,
    ],
    ["Its rows in Python", `fppo.open(${JSON.stringify(run.path)}).samples(${rows})`],
  ];
}

function section(title, ...children) {
  return el("section", {}, heading(3, title), ...children);
}

function facts(rows, row, run) {
  const score = rows.get("score", row);
  const more = [
    ["run", run.title],
    ["step", rows.get("step", row)],
    ["row", rows.get("row_id", row)],
    ["source", rows.get("source", row)],
    ["id", rows.get("id", row)],
    ["policy version", rows.get("version", row)],
    ["tokens", rows.get("length", row)],
  ].filter(([, value]) => value !== null && value !== "");
  const cut = rows.get("finish", row) === "length";
  return el(
    "header",
    { className: "facts" },
    el("div", { className: "big" }, isNumber(score) ? short(score, 4) : "no score"),
    el(
      "div",
      { className: "chips" },
      ...more.map(([name, value]) =>
        el(
          "span",
          { className: "chip" },
          el("span", { className: "dim", textContent: `${name} ` }),
          el("bdi", { textContent: String(value) }),
        ),
      ),
      cut ? el("span", { className: "chip warn", textContent: "cut off at the length limit" }) : null,
    ),
  );
}

function prompted(prompt) {
  if (prompt.length <= LONG) return text("plain", prompt);
  const box = text("plain", `…${prompt.slice(prompt.length - LONG)}`);
  const all = el("button", {
    type: "button",
    className: "more",
    textContent: `Show all ${counted(prompt.length, "character")}`,
  });
  all.addEventListener("click", () => {
    box.textContent = prompt;
    all.remove();
  });
  return el("div", {}, all, box);
}

function pictures(images) {
  const film = (frames, n) =>
    el(
      "span",
      { className: "film" },
      ...frames.map((frame, i) => {
        const name = frames.length > 1 ? `video ${n + 1}, frame ${i + 1}` : `image ${n + 1}`;
        const url = URL.createObjectURL(new Blob([frame], { type: "image/png" }));
        return el("img", { src: url, alt: name, on: { load: () => URL.revokeObjectURL(url) } });
      }),
    );
  return el("div", { className: "images" }, ...images.map(film));
}

function responded(file, numbers, coloured) {
  const tokens = strip(file, numbers.chosen);
  const pick = el("select", {
    attrs: { "aria-label": "Colour by" },
    on: {
      change: () => {
        tokens.colour(pick.value);
        coloured(pick.value);
      },
    },
  });
  pick.append(...choices(tokens.names).map(([value, label]) => el("option", { value, textContent: label })));
  pick.value = tokens.names.includes(numbers.chosen) ? numbers.chosen : "";
  return el(
    "section",
    {},
    heading(3, "Response ", el("label", { className: "by" }, "coloured by ", pick)),
    tokens.element,
  );
}

// The score's parts with their weights, the group's scores, and the advantage that the row got.
function reasons({ rows, row, run, file, group }) {
  const score = rows.get("score", row);
  const functions = run.settings["reward.functions"] ?? [];
  const weights = run.settings["reward.weights"] ?? [];
  const parts = rows.parts
    .map((name) => [name.slice("score.".length), rows.get(name, row)])
    .filter(([, value]) => value !== null);
  const lines = parts.map(([name, value]) => {
    const place = functions.indexOf(name);
    const weight = place >= 0 && weights.length === functions.length ? weights[place] : null;
    return el(
      "tr",
      {},
      el("td", { textContent: name }),
      el("td", { className: "num", textContent: short(value, 4) }),
      el("td", { className: "dim", textContent: weight === null ? "" : `× ${short(weight)}` }),
    );
  });
  const scores = group.map((each) => rows.get("score", each)).filter(isNumber);
  const better = scores.filter((x) => x > score).length;
  const advantage = mean((file.advantages ?? []).filter((_, i) => file.mask[i]));
  const said = [];
  if (!isNumber(score)) said.push("The reward failed on this row: it has no score, and nothing is learnt from it.");
  else if (scores.length > 1) {
    const same = scores.every((x) => x === score);
    const place = same
      ? "all have the same score"
      : `${better ? `${counted(better, "response")} scored higher` : "none scored higher"}`;
    said.push(`Of ${scores.length} responses to the prompt ${place}; their mean is ${short(mean(scores), 4)}.`);
  }
  if (advantage !== null) {
    const way = advantage > 0 ? "more" : advantage < 0 ? "less" : "neither more nor less";
    said.push(`Its mean advantage is ${signed(advantage, 4)}: the update makes it ${way} likely.`);
  }
  const list = lines.length ? el("table", { className: "parts" }, el("tbody", {}, ...lines)) : null;
  return section(
    isNumber(score) ? `Why its score is ${short(score, 4)}` : "Why it has no score",
    list,
    ...said.map((line) => el("p", { textContent: line })),
  );
}

function order(rows, a, b) {
  return (rows.get("score", b) ?? -Infinity) - (rows.get("score", a) ?? -Infinity) || a - b;
}

// A list of cards, some of them at first, with a button for the others.
function cards(list, make, most = GROUP) {
  const box = el("div", { className: "cards" }, ...list.slice(0, most).map(make));
  if (list.length <= most) return box;
  const more = el("button", { type: "button", className: "more", textContent: `Show the other ${list.length - most}` });
  more.addEventListener("click", () => {
    box.append(...list.slice(most).map(make));
    more.remove();
  });
  return el("div", {}, box, more);
}

function card(rows, row, current, label, open) {
  const score = rows.get("score", row);
  const head = el(
    "span",
    { className: "card-head" },
    el("b", { textContent: isNumber(score) ? short(score) : "failed" }),
    el("span", { className: "dim", textContent: label }),
  );
  const words = el("span", { className: "card-text", dir: "auto", textContent: rows.get("response", row) ?? "" });
  const attrs = { "aria-current": row === current ? "true" : null };
  return el(
    "button",
    { type: "button", className: row === current ? "card current" : "card", attrs, on: { click: () => open(row) } },
    head,
    words,
  );
}

function grouped({ rows, row, group }, open) {
  if (group.length < 2)
    return section(
      "Group",
      el("p", { className: "note", textContent: "It is the only response to this prompt that is kept of this step." }),
    );
  const label = (each) => counted(rows.get("length", each) ?? 0, "token");
  return section(
    `Group: ${group.length} responses to this prompt`,
    cards(group, (each) => card(rows, each, row, label(each), open)),
  );
}

function over({ rows, row, run }, open) {
  const all = rows.over(row);
  const steps = new Map();
  for (const each of all) steps.set(rows.get("step", each), [...(steps.get(rows.get("step", each)) ?? []), each]);
  if (steps.size < 2)
    return section(
      "This prompt in other steps",
      el("p", { className: "note", textContent: "It was drawn in this step alone." }),
    );
  const points = [...steps]
    .map(([step, members]) => [step, mean(members.map((each) => rows.get("score", each)))])
    .filter(([, y]) => y !== null);
  const lines = [{ label: "", color: run.color, points }];
  const picture = chart({ title: `Mean score in ${steps.size} steps`, note: "", least: 0.01, lines }, { height: 120 });
  const others = all.filter((each) => rows.get("step", each) !== rows.get("step", row));
  return section(
    "This prompt in other steps",
    picture.element,
    cards(others, (each) => card(rows, each, row, `step ${rows.get("step", each)}`, open), 12),
  );
}

// The responses of the row's group beside those of other runs to the same prompt, a column for each run.
function across({ rows, row, runs, group }, open) {
  const others = rows.across(row).map((each) => each.sort((a, b) => order(rows, a, b)));
  if (!others.length)
    return section(
      "This prompt in other runs",
      el("p", { className: "note", textContent: "No other run has a row with this prompt." }),
    );
  const column = (members) => {
    const run = runs[rows.get("run", members[0])];
    const score = mean(members.map((each) => rows.get("score", each)));
    const words = [`step ${rows.get("step", members[0])}`, `mean score ${score === null ? "none" : short(score)}`];
    const name = el("bdi", { textContent: run.title });
    return el(
      "div",
      {},
      heading(4, el("i", { className: "dot", style: { background: run.color } }), name),
      el("p", { className: "note", textContent: words.join(" · ") }),
      cards(members, (each) => card(rows, each, row, counted(rows.get("length", each) ?? 0, "token"), open), 12),
    );
  };
  return section("This prompt in other runs", el("div", { className: "beside" }, ...[group, ...others].map(column)));
}
