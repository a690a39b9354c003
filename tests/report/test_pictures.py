"""Pictures, tables and cards hold the numbers of their runs: each line of a panel, each row of a table."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from html import unescape
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from fppo.report import card, charts, compare, summary
from fppo.report.card import Exported
from fppo.report.charts import Panel
from fppo.report.compare import Comparison, Spread, spread
from fppo.report.diff import diff
from fppo.report.remains import remains
from fppo.runs import origins, starts
from fppo.runs.jsonl import JsonLines
from fppo.settings import files, logged
from fppo.settings.train import TrainSettings
from tests import tiny_run

LONG = [(float(i), float(i % 7)) for i in range(45)]


def drawn_lines(ax: Any) -> list[list[list[float]]]:
    return [line.get_xydata().tolist() for line in ax.lines]


def test_a_picture_has_each_point_of_each_line():
    """A long line is drawn twice: as it is, and smoothed over it."""
    short = {f"l{i}": [(0.0, float(i)), (2.0, i + 1.0)] for i in range(6)}
    panels = [Panel("A", "", short), Panel("B", "", {"": LONG}), Panel("C", "", {"x": LONG[:12], "y": LONG[:11]})]
    figure = charts.picture(panels, title="Of a run")
    first, second, third = figure.axes
    assert [ax.get_title("left") for ax in figure.axes] == ["A", "B", "C"]
    assert [x.get_text() for x in figure.texts] == ["Of a run"]
    assert drawn_lines(first) == [[list(point) for point in line] for line in short.values()]
    assert [line.get_color() for line in first.lines] == list(charts.COLORS[:6])
    assert [x.get_text() for x in first.get_legend().get_texts()] == ["l0", "l1", "l2", "l3"]
    raw, smoothed = drawn_lines(second)
    assert raw == [list(point) for point in LONG]
    assert smoothed == [list(point) for point in charts.smooth(LONG)]
    assert [line.get_alpha() for line in second.lines] == [0.25, None]
    assert second.get_legend() is None
    assert [line.get_marker() for line in third.lines] == ["None", "o"]
    places = [(round(ax.get_position().x0 * 13.2, 1), round(ax.get_position().y0 * 3.3, 1)) for ax in figure.axes]
    assert [round(x // 4.4) for x, _ in places] == [0, 1, 2]
    tall = charts.picture([Panel(str(i), "", {"": LONG[:3]}) for i in range(5)], title="")
    corners = [(int(3 * ax.get_position().x0), ax.get_position().y0 < 0.5) for ax in tall.axes]
    assert corners == [(0, False), (1, False), (2, False), (0, True), (1, True)]


def test_a_moving_average_is_centred_and_as_wide_as_a_fifteenth():
    """At each end it is as narrow as what is left there."""
    for count in (41, 90, 200):
        line = [(float(i), float((3 * i) % 11)) for i in range(count)]
        half = max(2, count // 30)
        for i, (step, value) in enumerate(charts.smooth(line)):
            reach = min(half, i, count - 1 - i)
            values = [line[j][1] for j in range(i - reach, i + reach + 1)]
            assert (step, value) == (float(i), pytest.approx(sum(values) / len(values)))


def test_every_metric_of_a_panel_is_one_that_a_run_logs(tmp_path):
    """Of training, or of imitation."""
    critic = tiny_run.settings(tmp_path, eval__exact_values=True)
    names = [name for _, _, _, lines in charts.PANELS for _, name in lines]
    assert len({*names}) == len(names)
    for name in names:
        assert name.startswith("supervised/") or logged.missing(critic, name) is None, name
    supervised = [name for name in names if name.startswith("supervised/")]
    assert supervised == ["supervised/nll_loss", "supervised/grad_norm"]
    records = [{"step": 1, **{name: float(i + 1) for i, name in enumerate(names)}}]
    panels = charts.panels(records)
    assert [panel.title for panel in panels] == [title for title, *_ in charts.PANELS]
    assert [value for panel in panels for line in panel.lines.values() for _, value in line] == [
        float(i + 1) for i in range(len(names))
    ]
    assert [charts.least_of(name) for name in ("critic/vf_loss", "actor/pg_clipfrac", "none")] == [1e-3, 0.01, 0.0]
    assert [panel.least for panel in panels] == [least for _, _, least, _ in charts.PANELS]


def test_points_are_finite_numbers_in_the_order_of_the_steps():
    records = [
        {"step": 2, "a": 1.0},
        {"step": 3},
        {"step": 4, "a": None},
        {"step": 5, "a": math.nan},
        {"step": 6, "a": 3},
    ]
    assert charts.points(records, "a") == [(2, 1.0), (6, 3)]
    assert charts.points([{"step": 1, "a": math.inf}, {"step": 2, "a": "x"}], "a") == []


def test_a_held_out_measure_has_a_span_of_a_hundredth_of_its_scores():
    records = [{"step": 0, "val-core/a/reward/mean@1": -300.0}, {"step": 1, "val-core/a/reward/mean@1": 100.0}]
    (panel,) = charts.panels(records)
    assert panel.least == 3.0
    (panel,) = charts.panels([{"step": 0, "val-core/a/reward/mean@1": 0.5}])
    assert (panel.least, panel.note) == (0.01, "prompts never trained on")
    many = {f"val-aux/a/m{i}/mean@1": float(i) for i in range(9)} | {"val-core/a/reward/mean@1": 0.5}
    assert len(charts.panels([{"step": 0, **many}])) == charts.SHOWN_MEASURES


# comparisons

CURVES: Mapping[str, Mapping[str, Mapping[int, charts.Points]]] = {
    "score": {
        "a": {0: [(0, 1.0), (1, 2.0), (2, 4.0)], 1: [(0, 3.0), (2, 6.0)]},
        "b": {0: [(0, 2.0), (2, 8.0)], 1: [(0, 1.0), (2, 4.0)], 2: [(0, 9.0), (2, 9.0)]},
        "c": {5: [(0, 1.0), (2, 1.0)]},
    },
    "other": {"a": {0: [(1, 0.5)]}, "b": {}, "c": {}},
}


def test_rows_of_a_comparison_are_last_and_mean_and_what_is_apart_at_equal_seeds():
    rows = Comparison(curves=CURVES).rows()
    found = {(row["metric"], row["variant"]): row for row in rows}
    assert list(found) == [(metric, name) for metric in CURVES for name in "abc"]
    a, b, c = (found["score", name] for name in "abc")
    assert [row["seeds"] for row in (a, b, c)] == [2, 3, 1]
    assert a["last"] == spread([4.0, 6.0])
    assert a["mean"] == spread([7 / 3, 4.5])
    assert (a["last_apart"], a["mean_apart"], c["last_apart"]) == (None, None, None)
    assert b["last"] == spread([8.0, 4.0, 9.0])
    assert b["last_apart"] == spread([4.0, -2.0])
    assert b["mean_apart"] == spread([5.0 - 7 / 3, 2.5 - 4.5])
    none = found["other", "b"]
    assert [none[name] for name in ("seeds", "last", "last_apart", "mean", "mean_apart")] == [0, None, None, None, None]
    numbers = Comparison(curves=CURVES).numbers()
    assert numbers[1]["last"] == attrs.asdict(b["last"])
    assert numbers[1]["variant"] == "b"
    assert json.loads(json.dumps(numbers[4]))["last"] is None


def test_the_table_of_a_comparison_and_its_markdown():
    one = {
        "score": {"a": {0: [(0, 1.0), (2, 3.0)]}, "variant b": {0: [(0, 2.0), (2, 8.0)]}},
        "x": {"a": {}, "variant b": {}},
    }
    assert Comparison(curves=one).table().splitlines() == [
        "score",
        "variant    seeds  last    to the first  mean of the run  to the first",
        "a          1      3.0000                2.0000",
        "variant b  1      8.0000  5.0000        5.0000           3.0000",
        "",
        "x",
        "variant    seeds  last  to the first  mean of the run  to the first",
        "a          0",
        "variant b  0",
        "",
        "± is half of the 95 % confidence interval of the mean over seeds",
    ]
    assert Comparison(curves=one).markdown().splitlines() == [
        "| variant | `score` | `x` |",
        "| --- | --- | --- |",
        "| `a` | 2.0000 |  |",
        "| `variant b` | 5.0000 |  |",
    ]
    assert str(Spread(1.25, 0.5, 2)) == "1.2500 ± 0.5000"


def test_the_picture_of_a_comparison_has_means_of_steps_that_all_seeds_have():
    figure = compare.picture(Comparison(curves=CURVES), x="update")
    first, second = figure.axes
    a, b, c = first.lines
    assert a.get_xydata().tolist() == [[0.0, 2.0], [2.0, 5.0]]
    assert b.get_xydata().tolist() == [[0.0, 4.0], [2.0, 7.0]]
    assert c.get_xydata().tolist() == [[0.0, 1.0], [2.0, 1.0]]
    assert [x.get_text() for x in first.get_legend().get_texts()] == ["a 5", "b 7", "c 1"]
    assert [line.get_color() for line in first.lines] == list(charts.COLORS[:3])
    assert (first.get_xlabel(), first.get_title("left")) == ("update", "score")
    bands = [path.get_paths()[0].vertices for path in first.collections]
    assert len(bands) == 2  # one seed has none
    half = spread([1.0, 3.0]).half
    ends = sorted({round(y, 6) for x, y in bands[0].tolist() if x == 0.0})
    assert ends == [pytest.approx(2.0 - half, abs=1e-5), pytest.approx(2.0 + half, abs=1e-5)]
    low, high = first.get_ylim()
    assert low <= 2.0 - half
    assert high >= 9.0
    assert [x.get_text() for x in second.get_legend().get_texts()] == ["a 0.5", "b", "c"]


def test_intervals_are_those_of_student():
    for count, quantile in ((2, 12.706), (5, 2.776), (11, 2.228), (21, 2.086), (31, 2.042)):
        values = [0.0, 1.0] * (count // 2) + [0.5] * (count % 2)
        found = spread(values)
        assert (found.mean, found.count) == (pytest.approx(0.5), count)
        assert found.half == pytest.approx(quantile * float(np.std(values, ddof=1)) / math.sqrt(count), rel=2e-3)
    with pytest.raises(ValueError, match="no numbers"):
        spread([])


def test_metrics_that_are_compared_are_the_given_or_the_first(tmp_path):
    for name, seed in (("a", 0), ("a", 1), ("b", 0)):
        log = JsonLines(tmp_path / name / str(seed) / "metrics.jsonl")
        log.log(1, {"critic/true/r2": 0.5 + seed, "val-core/x/reward/mean@1": 0.25, "z": float(seed)})
        log.log(2, {"critic/true/r2": 0.5})
        log.close()
    runs = {"a": {seed: tmp_path / "a" / str(seed) for seed in (0, 1)}, "b": {0: tmp_path / "b" / "0"}}
    assert list(compare.collect(runs).curves) == ["val-core/x/reward/mean@1", "critic/true/r2"]
    assert compare.collect(runs, ["z"]).curves == {"z": {"a": {0: [(1, 0.0)], 1: [(1, 1.0)]}, "b": {0: [(1, 0.0)]}}}


# summaries


def test_the_seconds_of_stages_are_means_the_longest_first():
    records = [
        {"step": 1, "timing_s/gen": 1.0, "timing_s/adv": 5.0, "timing_s/step": 9.0, "timing_s/testing": 7.0, "x": 1.0},
        {"step": 2, "timing_s/gen": 2.0, "timing_s/late": 4.0},
        {"step": 3, "timing_s/none": None},
    ]
    assert list(summary.stages(records).items()) == [("adv", 5.0), ("late", 4.0), ("gen", 1.5)]


def tiles(records, **settings):
    return [attrs.astuple(tile) for tile in summary.tiles(records, settings)]


def test_headlines_are_of_the_first_and_last_numbers():
    assert tiles([]) == []
    records = [{"step": 0, "val-core/a/reward/mean@1": -0.5}, {"step": 3, "supervised/nll_loss": 2.0}]
    records += [{"step": 4, "val-core/a/reward/mean@1": 0.25, "supervised/nll_loss": 0.5}]
    assert tiles(records, steps=9) == [
        ("Held-out reward", "-0.500 → 0.250", "+0.750; before, and after step 4"),
        ("Loss in training", "2.000 → 0.500", "-1.500; first and last step"),
        ("Steps", "4 of 9", ""),
    ]
    late = [{"step": 2, "val-core/a/nll_loss/mean@1": 0.5}, {"step": 3, "val-core/a/nll_loss/mean@1": 0.25}]
    assert tiles(late)[0][1:] == ("0.500 → 0.250", "-0.250; after step 2, and after step 3")
    scores = [{"step": i, "critic/score/mean": float(i), "timing_s/step": 1800.0} for i in range(1, 5)]
    assert tiles(scores) == [
        ("Reward in training", "1.500 → 3.500", "+2.000; first and last 2 steps"),
        ("Steps", "4", ""),
        ("Time in steps", "2.0 h", ""),
    ]
    assert tiles(scores[:3])[0] == ("Reward in training", "1.000 → 3.000", "+2.000; first and last step")
    four = {f"val-core/{x}/reward/mean@1": 0.5 for x in "abcd"}
    assert [caption for caption, *_ in tiles([{"step": 1, **four}])] == [
        *(f"Held-out reward, {x}" for x in "abc"),
        "Steps",
    ]
    for seconds, shown in {59.9: "59.9 s", 60.0: "1.0 min", 3599.0: "60.0 min", 3600.0: "1.0 h"}.items():
        assert tiles([{"step": 1, "timing_s/step": seconds}])[-1] == ("Time in steps", shown, "")


def test_settings_of_a_run_are_the_chosen_and_the_others(tmp_path):
    assert summary.settings_of(tmp_path / "none.toml") == ({}, {})
    usual = files.flat(files.to_dict(TrainSettings()))["rollout.n"]
    (tmp_path / "s.toml").write_text(f"steps = 3\nown = 1\n[rollout]\nn = {usual}\n")
    assert summary.settings_of(tmp_path / "s.toml") == ({"steps": 3, "own": 1}, {"rollout.n": usual})


def test_responses_beside_the_truth_are_the_furthest_apart():
    """First that of the largest range, then one by one the one furthest from those that are chosen."""

    def line(number, exact, values):
        return {"id": number, "exact_values": exact, "values": values}

    lines = [
        line(0, [0.5, 0.5], [0.5, 0.5]),
        line(1, [0.0, 1.0], [0.0, 1.0]),
        line(2, [0.5, 0.4], [0.5, 0.4]),
        line(3, [1.0, 0.0], [1.0, 0.0]),
        line(4, [0.5, 0.5], [0.9, 0.9]),
    ]
    order = [each["id"] for each in summary.unlike(lines, 5)]
    features = {
        x["id"]: (
            max(x["exact_values"]) - min(x["exact_values"]),
            x["exact_values"][0],
            x["exact_values"][-1],
            sum(abs(a - b) for a, b in zip(x["values"], x["exact_values"], strict=True)) / 2,
        )
        for x in lines
    }
    chosen = [1]
    while len(chosen) < 5:
        left = [x for x in features if x not in chosen]
        chosen.append(max(left, key=lambda x: min(math.dist(features[x], features[y]) for y in chosen)))
    assert order == chosen
    assert [each["id"] for each in summary.unlike(lines, 2)] == chosen[:2]


# what is left of runs, and their differences


def test_a_mean_is_of_the_responses_with_a_score_by_their_prompts(tmp_path):
    log = JsonLines(tmp_path / "evaluations" / "step_00000003.jsonl")
    rows = [("a", 1, 1.0), ("a", 1, 0.0), ("a", 2, None), ("a", 2, 0.5), ("b", 1, 4.0), ("a", 2, 0.5)]
    log.write(*({"step": 3, "source": source, "id": name, "score": score} for source, name, score in rows))
    log.close()
    (tmp_path / "evaluations" / "notes.txt").touch()
    (tmp_path / "checkpoints" / "step_00000002.old").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_00000004").mkdir()
    (tmp_path / "digests.jsonl").write_text('{"step": 1}\n{"x": 2}\n')
    found = remains(tmp_path, [6], on_damage=lambda _: None)
    assert sorted(found, key=lambda x: x["step"]) == [
        {"step": 1},
        {"step": 3, "val-core/a/reward/mean@2": 0.5, "val-core/b/reward/mean@1": 4.0},
        {"step": 4},
        {"step": 6},
    ]


def test_five_leaves_and_metrics_are_named_and_the_others_counted(tmp_path):
    for name, value in (("a", "x"), ("b", "y")):
        leaves = {f".scores[{i}]": value for i in range(7)} | {".tokens": "same"}
        lines = JsonLines(tmp_path / name / "digests.jsonl")
        lines.write({"step": 1, "batch": leaves, "result": {".key": "k"}})
        lines.close()
        log = JsonLines(tmp_path / name / "metrics.jsonl")
        numbers = {f"m{i}": 1.0 + i * (value == "y") for i in range(8)}
        log.log(1, numbers | {"perf/x": float(len(value)), "equal": 1.0})
        log.close()
    found = diff(tmp_path / "a", tmp_path / "b")
    assert found.differs
    first, stage, counts, metrics = found.lines[-4:]
    assert first == "the first step to differ is 1 (no step before is equal)"
    named = ", ".join(f".scores[{i}]" for i in range(5))
    assert stage == f"  first in what reward made: {named} and 2 more"
    assert counts == "  7 of 8 columns of its batch and 0 of 1 leaves of the state after it differ"
    assert metrics.startswith(
        "  7 of 9 metrics differ, by at most 9e-01 (of numbers over 1: of their size), as m7 1.0 "
    )
    assert " 1.0 and 8.0; m6 1.0 and 7.0; " in metrics
    assert metrics.count(" and ") == 5


def test_settings_that_differ_are_named_but_for_the_place(tmp_path):
    for name, seed in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        starts.record(tiny_run.settings(tmp_path, output_dir=str(tmp_path / name), seed=seed), 0)
        log = JsonLines(tmp_path / name / "metrics.jsonl")
        log.log(1, {"x": 1.0})
        log.close()
    found = diff(tmp_path / "a", tmp_path / "b")
    assert found.lines[0] == "settings that differ: seed 1 and 2"
    assert not found.differs


# cards


def exported(directory: Path, *, more: Mapping[str, Any] | None = None, **changes: Any) -> Exported:
    values = {
        "output_dir": str(directory / "run"),
        "steps": 9,
        "model": {"path": "org/base-7b"},
        "data": {"path": ["openai/gsm8k:main", "/home/a/train.jsonl"], "prompt": "q"},
        "reward": {"functions": ["exact_match", "mine:fn"]},
    }
    settings = files.replace(files.from_dict(values), dict(more or {}))
    (directory / "run").mkdir(parents=True, exist_ok=True)
    starts.record(settings, 0)
    made = Exported(run_dir=directory / "run", settings=settings, step=2, name="me/new")
    return attrs.evolve(made, **changes)


def front(made: Exported) -> dict[str, Any]:
    """What a hub reads of a card."""
    lines = card.card(made, [], []).split("---\n")[1].splitlines()
    return {name: json.loads(x) for name, x in (line.split(": ", 1) for line in lines)}


def section(made: Exported, title: str, records: Sequence[Mapping[str, Any]] = ()) -> str:
    """The text of a card below a title."""
    return card.card(made, records, []).partition(f"## {title}\n\n")[2].partition("\n\n## ")[0].rstrip("\n")


def trained(made: Exported, records: Sequence[Mapping[str, Any]] = ()) -> dict[str, str]:
    """What a card says of the training, by the names of its rows."""
    rows = [line.strip("| ").split(" | ") for line in section(made, "Training", records).splitlines()[2:]]
    return {unescape(name): unescape(text) for name, text in rows}


RECORDS = [
    {"step": 1, "critic/score/mean": 0.5, "timing_s/step": 60.0, "perf/total_num_tokens": 1000.0},
    {"step": 2, "critic/score/mean": 0.25, "timing_s/step": 30.0, "perf/total_num_tokens": 234.0},
]


def test_a_card_has_the_settings_of_the_training_line_by_line(tmp_path):
    plain = exported(tmp_path)
    s = plain.settings
    usual = {
        "base": "org/base-7b",
        "data": "openai/gsm8k:main, train.jsonl",
        "rewards": "exact_match, mine:fn",
        "advantages": "gae",
        "policy loss": "ppo_clip",
        "KL": "none",
        "critic": "mse",
        "adapter": "none: all weights",
        "steps": "2 of 9",
        "responses of a step": f"{s.rollout.batch_size}, {s.rollout.n} to each prompt",
        "longest response": f"{s.rollout.max_tokens} tokens",
        "learning rate": f"{s.actor.optimizer.lr:g}, critic {s.critic.optimizer.lr:g}",
        "seed": "0",
    }
    plain = attrs.evolve(plain, settings=files.replace(s, {"algorithm.kl.coef": 0.0}))
    assert trained(plain) == usual
    ends = {
        "mean reward in training": "0.500 in the first step, 0.250 in the last",
        "tokens": "1,234",
        "time in steps": "1.5 min",
    }
    assert trained(plain, RECORDS) == usual | ends
    changes = {
        "algorithm.kl.coef": 0.5,
        "actor.kl_coef": 0.25,
        "actor.kl_kind": "k2",
        "algorithm.advantage": "rloo",
        "rollout.n": 4,
        "rollout.batch_size": 16,
        "rollout.max_tokens": 77,
        "actor.loss.name": "gspo",
        "seed": 3,
        "model.lora.rank": 8,
        "model.lora.alpha": 32.0,
        "actor.optimizer.lr": 3e-5,
    }
    other = trained(exported(tmp_path, more=changes))
    assert other == usual | {
        "advantages": "rloo",
        "policy loss": "gspo",
        "KL": "0.5 in the rewards, 0.25 in the loss (k2)",
        "critic": "none",
        "adapter": "rank 8, alpha 32",
        "responses of a step": "16, 4 to each prompt",
        "longest response": "77 tokens",
        "learning rate": "3e-05",
        "seed": "3",
    }
    hour = [{"step": 1, "timing_s/step": 3600.0}]
    assert trained(plain, hour)["time in steps"] == "1.00 h"


POLICY = "The policy after step 2 of a run of fppo that trained base by gae and ppo&#95;clip"


@pytest.mark.parametrize(
    ("role", "form", "lora", "sentence", "lines"),
    [
        (
            "actor",
            "whole",
            {},
            f"{POLICY}.",
            None,
        ),
        (
            *("actor", "adapter", {"model.lora.rank": 4, "model.lora.base": "nf4"}),
            f"{POLICY}, as an adapter of rank 4.",
            ["from peft import PeftModel", "from transformers import AutoModelForCausalLM, AutoTokenizer", ""],
        ),
        (
            *("actor", "merged", {"model.lora.rank": 4}),
            f"{POLICY}, with its adapter merged.",
            None,
        ),
        (
            "critic",
            "whole",
            {},
            "The critic after step 2 of a run of fppo that trained critic by gae and ppo&#95;clip.",
            None,
        ),
    ],
)
def test_a_card_says_what_is_exported_and_how_it_is_loaded(tmp_path, role, form, lora, sentence, lines):
    for name in ("base", "critic"):
        (tmp_path / name).mkdir()
    more = {"model.path": str(tmp_path / "base"), "model.critic_path": str(tmp_path / "critic"), **lora}
    made = exported(tmp_path, more=more, role=role, form=form)
    assert sentence in card.card(made, [], []).splitlines()
    text = section(made, "Use")
    kind = "AutoModelForCausalLM" if role == "actor" else "AutoModelForTokenClassification"
    code = text.split("```python\n")[1].split("\n```")[0].splitlines()
    end = 'tokenizer = AutoTokenizer.from_pretrained("me/new")'
    if lines is None:
        assert code == [
            *(f"from transformers import {kind}, AutoTokenizer", ""),
            *(f'model = {kind}.from_pretrained("me/new")', end),
        ]
    else:
        assert code == [
            *lines,
            'base = AutoModelForCausalLM.from_pretrained("base")',
            'model = PeftModel.from_pretrained(base, "me/new")',
            end,
        ]
    assert ("It was trained on the base in nf4; load the base so." in text) == (form == "adapter")
    read = front(made)
    assert ("lora" in read["tags"]) == bool(lora)
    assert "base_model" not in read  # a directory is no name of the hub
    assert (read["library_name"] == "peft") == (form == "adapter")
    assert (read["pipeline_tag"] == "token-classification") == (role == "critic")


@pytest.mark.parametrize(
    ("prompt", "chat", "words"),
    [
        ("q", False, "Prompts are this field of the data:"),
        ("Q: {q}", False, "Prompts are this template, filled with fields of the data:"),
        ("q", True, "Prompts are this field of the data, through the chat template:"),
    ],
)
def test_a_card_says_what_prompts_are(tmp_path, prompt, chat, words):
    text = section(exported(tmp_path, more={"data.prompt": prompt, "data.chat": chat}), "Use")
    assert f"{words}\n\n```text\n{prompt}\n```" in text


def test_a_card_evaluates_by_the_first_and_the_last_number(tmp_path):
    records = [
        {"step": 1, "val-core/s/reward/mean@4": 0.25},
        {"step": 3, "val-core/s/reward/mean@4": 0.5, "val-core/s/reward/best@4/mean": 0.75},
        {"step": 5, "val-core/s/reward/best@4/mean": None},
    ]
    made = exported(tmp_path)
    lines = section(made, "Evaluation", records).splitlines()
    assert lines[:2] == ["On held-out prompts, which were not trained on:", ""]
    assert lines[4:] == [
        "| s | reward | mean&#64;4 | 1 | 0.25 | 3 | 0.5 |",
        "| s | reward | best&#64;4 | 3 | 0.75 | 3 | 0.75 |",
    ]
    assert "## Evaluation" not in card.card(made, [{"step": 1, "x": 1.0}], [])


@pytest.mark.slow
def test_a_card_says_what_repeats_the_run(tmp_path):
    made = exported(tmp_path)
    text = section(made, "Repeat it")
    assert 'pip install "fppo"\nfppo train run.toml' in text
    assert "It needs the modules mine, which are not part of this export." in text
    assert "began from" not in text
    without = exported(tmp_path / "without", more={"reward.functions": ["exact_match"]})
    assert "It needs" not in section(without, "Repeat it")
    given = section(exported(tmp_path / "given", more={"reward.functions": ["fppo.train:score"]}), "Repeat it")
    assert "It needs rewards that were functions of the program that called fppo.train." in given
    assert "modules" not in given
    shutil.rmtree(made.run_dir / "starts")
    other, moved = str(tmp_path / "other" / "step_00000007"), {"seed": 5, "data.path": ["/a/b.jsonl"]}
    for step, change in ((7, {"resume": other}), (8, {"seed": 5}), (9, moved), (10, {"seed": 6})):
        starts.record(files.replace(made.settings, change), step)
    origin = origins.Origin(versions={"fppo": "1.2", "torch": "3", "numpy": "4"}, commits={"fppo": "abc"}, code={})
    (made.run_dir / "starts" / "step_00000009.json").write_text(json.dumps(attrs.asdict(origin)))
    fork = attrs.evolve(made, step=10)
    text = section(fork, "Repeat it")
    assert 'pip install "fppo==1.2"' in text
    assert "The run began from the checkpoint of another run, of step 7." in text
    changed = [line for line in unescape(text).splitlines() if line.startswith(("| 7 |", "| 8 |", "| 9 |", "| 10 |"))]
    assert changed == [  # up to the step
        "| 8 | seed | 0 | 5 |",
        "| 9 | data.path | ['openai/gsm8k:main', 'train.jsonl'] | ['b.jsonl'] |",
    ]
    versions = ["| fppo | 1.2 |", "| torch | 3 |", "| commit of fppo | abc |"]
    assert unescape(section(fork, "Versions")).splitlines()[2:] == versions
