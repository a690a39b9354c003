"""The report: complete where the run is, honest where it is not, and closed to what samples contain."""

from __future__ import annotations

import json
import math
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fppo.report import charts, summary
from fppo.report import write as report
from fppo.report.write import write_report
from fppo.runs.jsonl import JsonLines, read
from fppo.runs.sample_files import SAMPLES
from fppo.settings import files
from tests.report.test_view_server import Scripts

EVIL = "<script>alert('x')</script>\"&<img src=http://example.com/x.png>\u0000\ud800"


def write_run(directory: Path, *, steps: int = 50, critic: bool = True, samples: bool = True, text: str = "47") -> Path:
    metrics = JsonLines(directory / "metrics.jsonl")
    metrics.log(0, {"val/sums/accuracy/mean@1": 0.25})
    for step in range(1, steps + 1):
        numbers = {
            "critic/score/mean": step / steps,
            "actor/ppo_kl": 0.0001 * step,
            "actor/entropy": 1.0,
            "perf/throughput": 2000.0 * step / (steps + 1),  # 1000 in the mean
            "timing_s/step": 2.0,
            "timing_s/gen": 1.5,
        }
        if critic:
            numbers["critic/vf_loss"] = 1 / step
        if step == steps:
            numbers["val/sums/accuracy/mean@1"] = 0.75
        metrics.log(step, numbers)
    metrics.close()
    if samples:
        for step in range(1, steps + 1):
            write_rows(directory, step, [sample(text, critic=critic)])
    return directory


def test_the_critic_is_drawn_beside_the_truth_of_the_last_evaluation(tmp_path):
    write_run(tmp_path, steps=2, samples=False)
    for step, prompt in ((0, "oldest"), (2, "newest")):
        log = JsonLines(tmp_path / "truth" / f"step_{step:08d}.jsonl")
        numbers = {"values": [0.5, 0.25], "exact_values": [0.75, 1.0], "advantages": [0.5, 0.75]}
        log.write(
            {"step": step, "prompt": f"{EVIL}{prompt}", "tokens": ["4", "7"], **numbers, "exact_advantages": [0.25, 0]}
        )
        log.close()
    values, advantages = state_of(tmp_path)["truth"]
    assert values["lines"] == {"exact": [[1.0, 0.75], [2.0, 1.0]], "critic": [[1.0, 0.5], [2.0, 0.25]]}
    assert advantages["lines"] == {"exact": [[1.0, 0.25], [2.0, 0.0]], "estimate": [[1.0, 0.5], [2.0, 0.75]]}
    assert values["title"].endswith("newest47")
    assert values["unit"] == "token"


def write_rows(directory: Path, step: int, rows: list[dict[str, Any]]) -> Path:
    """Write the file of a step."""
    path = directory / SAMPLES / f"{step:06d}.parquet"
    path.parent.mkdir(exist_ok=True, parents=True)
    pq.write_table(pa.Table.from_pylist([{"step": step, **row} for row in rows]), path)
    return path


def sample(text: str, *, critic: bool = True, score: float | None = None, group: int = 0) -> dict[str, Any]:
    text = text.encode("utf-8", "replace").decode()
    return {
        "id": text,
        "row_id": 3,
        "group": group,
        "source": "sums",
        "prompt": f"prompt {text}",
        "response": f"is {text}",
        "pieces": ["is", "", f" {text}\n"],
        "mask": [True, False, True],
        "old_log_probs": [-0.5, -1.0, -3.0],
        "advantages": [0.25, 0.5, -2.0],
        **({"values": [0.125, 0.5, 0.5]} if critic else {}),
        "score": score,
        "score.format": 1.0,
        "ground_truth": f'{{"answer": "{text}"}}',
        "finish": "length",
    }


def state_of(directory: Path) -> dict[str, Any]:
    """The state of the run that its report shows, once it is written."""
    path = write_report(directory)
    assert path == directory / "report.html"
    assert (directory / "curves.png").read_bytes().startswith(b"\x89PNG")
    (state,) = json.loads(Scripts(path.read_text(encoding="utf-8")).scripts["state"])
    return state


@pytest.mark.slow
def test_a_whole_run_is_reported(tmp_path):
    settings = files.replace(files.TrainSettings(), {"steps": 50, "model.path": "some/model"})
    files.save(settings, tmp_path / "settings.toml")
    state = state_of(write_run(tmp_path))
    assert state["tiles"] == [
        ["Held-out accuracy", "25.0% → 75.0%", "+50.0 points; before, and after step 50"],
        ["Reward in training", "0.060 → 0.960", "+0.900; first and last 5 steps"],
        ["Steps", "50 of 50", ""],
        ["Time in steps", "1.7 min", "1,000 tokens/s"],
    ]
    assert "Value loss" in [panel["title"] for panel in state["panels"]]
    assert state["settings"]["model.path"] == "some/model"
    assert "model.path" in state["chosen"]
    assert len(state["settings"]) > len(state["chosen"])
    assert len(state["samples"]) == 50
    assert list(tmp_path.glob(".*")) == []


def test_what_a_run_did_not_write_is_left_out(tmp_path):
    state = state_of(write_run(tmp_path, steps=1, critic=False, samples=False))
    assert "Value loss" not in [panel["title"] for panel in state["panels"]]
    assert state["work"] == state["samples"] == state["truth"] == []
    assert state["settings"] == {}


def test_partial_records_are_reported(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 2, "a": 1.0}\n{"step": 1, "a": null}\n{"b": 3}\n{"step": 2, "b": 4}\n{"step": 3, "a":')
    write_rows(tmp_path, 2, [sample("a"), sample("b", critic=False)])
    assert len(state_of(tmp_path)["lines"]["records"]) == 4
    assert summary.merged([{"step": 2, "a": 1}, {"step": 1}, {"step": 2, "b": 4}]) == [
        {"step": 1},
        {"step": 2, "a": 1, "b": 4},
    ]


def test_a_run_whose_metrics_are_gone_is_reported_as_far_as_other_files_know_it(tmp_path, capsys):
    run = write_run(tmp_path / "run", steps=4, text="forty-seven")
    (run / "metrics.jsonl").unlink()
    files.save(files.replace(files.TrainSettings(), {"steps": 9}), run / "settings.toml")
    (run / "digests.jsonl").write_text("".join(f'{{"step": {step}, "state": "x"}}\n' for step in range(1, 7)))
    (run / "checkpoints" / "step_00000007").mkdir(parents=True)
    for step, scores in ((0, (0, 0, 1, 0)), (7, (1, 0, 1, 1))):
        lines = JsonLines(run / "evaluations" / f"step_{step:08d}.jsonl")
        lines.write(*({"step": step, "id": i // 2, "source": "sums", "score": x} for i, x in enumerate(scores)))
        lines.close()
    (run / "evaluations" / "step_00000007_eval_1.jsonl").write_text("{}")
    state = state_of(run)
    said = f"{run / 'metrics.jsonl'} holds nothing of step 1 to 7"
    assert said in capsys.readouterr().err
    assert state["notes"] == [said]
    shown = [value for _, value, _ in state["tiles"]]
    assert shown == ["25.0% → 75.0%", "7 of 9"]
    assert state["panels"][0]["metrics"] == [["mean@2", "val-core/sums/reward/mean@2"]]
    write_run(run, steps=2)
    state = state_of(run)
    assert state["notes"] == [f"{run / 'metrics.jsonl'} holds nothing of step 3 to 7"]
    assert "Reward in training" in [caption for caption, _, _ in state["tiles"]]


def test_nothing_in_a_sample_becomes_markup_or_a_request(tmp_path):
    directory = write_run(tmp_path / "<i>", text=EVIL, steps=2)
    files.save(files.replace(files.TrainSettings(), {"model.path": EVIL[:-1]}), directory / "settings.toml")
    state = state_of(directory)
    html = (directory / "report.html").read_text(encoding="utf-8")
    page = Scripts(html)
    assert set(page.tags) == {"html", "head", "meta", "title", "style", "body", "noscript", "script"}
    assert page.loads == []
    assert state["settings"]["model.path"] == EVIL[:-1]
    assert EVIL[:8] + "alert" not in html
    assert "default-src 'none'" in unescape(html)


def test_errors_name_the_file(tmp_path):
    with pytest.raises(ValueError, match="no such directory"):
        write_report(tmp_path / "none")
    with pytest.raises(ValueError, match=r"metrics\.jsonl: no metrics"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("{\n{}\n")
    with pytest.raises(ValueError, match="line 1"):
        write_report(tmp_path)
    write_run(tmp_path / "run", steps=1)
    (tmp_path / "run" / "settings.toml").write_text("a =")
    with pytest.raises(ValueError, match=r"settings\.toml: not TOML"):
        write_report(tmp_path / "run")


def test_damaged_files_of_samples_are_left_out_and_named(tmp_path, capsys):
    run = write_run(tmp_path, steps=3, text="forty-seven")
    damaged = run / SAMPLES / "000002.parquet"
    damaged.write_bytes(damaged.read_bytes()[:100])
    (run / SAMPLES / "000003.parquet").write_bytes(b"")
    write_report(run)
    said = capsys.readouterr().err
    assert all(f"left out: {run / SAMPLES / name}.parquet: damaged" in said for name in ("000002", "000003"))


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_round_and_inside(low, width):
    high = low + width
    if high - low < 1e-9 * max(abs(low), abs(high)):
        return
    marks = charts.ticks(low, high)
    assert 1 <= len(marks) <= 9
    slack = (high - low) * 1e-3
    assert all(low - slack <= m <= high + slack for m in marks)
    steps = {f"{b - a:.6e}" for a, b in pairwise(marks)}
    assert len(steps) <= 2  # one step, but for rounding


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(0, 5))
def test_ticks_that_differ_read_differently(low, width, shrink):
    high = low + width * 10.0**-shrink
    if high - low < 1e-9 * max(abs(low), abs(high)):
        return
    marks = charts.ticks(low, high)
    labels = charts.tick_labels(marks)
    assert len(set(labels)) == len(labels)
    slack = (marks[1] - marks[0]) / 2 if len(marks) > 1 else math.inf
    read = [float(label.replace("k", "e3")) for label in labels]
    assert all(abs(a - b) <= slack for a, b in zip(read, marks, strict=True))


def test_numbers_beside_a_panel_stand_inside_of_the_picture():
    values = [(0.0, 1.0 + 5e-7), (1.0, 1.0 + 9e-7)], [(0.0, -3e-5), (1.0, 2e-5)], [(0.0, 0.0), (1.0, 0.0)]
    panels = [charts.Panel("Ratio", "", {"ratio": each}) for each in values]
    figure = charts.picture(panels, title="")
    for number, ax in enumerate(figure.axes):
        box = ax.yaxis.get_tightbbox().transformed(figure.dpi_scale_trans.inverted())  # in inches
        assert 4.4 * number <= box.x0 < box.x1 <= 4.4 * number + 2
        assert not ax.yaxis.get_offset_text().get_text()


def held_out_records(sources=("sums",), n=4):
    """An evaluation before and one after: a reward of two functions, and the lengths that one of them returns."""
    means = {"reward": (0.2, 0.6), "exact_match": (0.0, 0.0), "mine": (0.4, 1.2), "mine/chars": (300.0, 250.0)}
    records = []
    for step in (0, 1):
        numbers = {}
        for source in sources:
            for name, values in means.items():
                level = "core" if name == "reward" else "aux"
                numbers[f"val-{level}/{source}/{name}/mean@{n}"] = values[step]
                numbers[f"val-{level}/{source}/{name}/best@{n}/mean"] = 2 * values[step]
        records.append({"step": step, **dict(sorted(numbers.items()))})
    return records


def test_the_first_tile_is_the_held_out_reward():
    tiles = summary.tiles(held_out_records(), {})
    assert (tiles[0].caption, tiles[0].value) == ("Held-out reward", "20.0% → 60.0%")
    assert [tile.caption for tile in tiles] == ["Held-out reward", "Steps"]
    two = summary.tiles(held_out_records(("a", "b")), {})
    assert [tile.caption for tile in two[:2]] == ["Held-out reward, a", "Held-out reward, b"]


def test_a_chart_shows_one_quantity():
    """Lengths and scores are not alike; nor are the norms of two models' gradients."""
    drawn = charts.panels(held_out_records())
    assert [panel.title for panel in drawn] == [
        *("Held-out reward", "Held-out exact_match", "Held-out mine", "Held-out mine/chars")
    ]
    assert all(set(panel.lines) == {"mean@4", "best@4"} for panel in drawn)
    assert [set(panel.lines) for panel in charts.panels(held_out_records(("a", "b")))] == [{"a", "b"}] * 4
    norms = charts.panels([{"step": 1, "actor/grad_norm": 0.1, "critic/grad_norm": 50.0}])
    assert [len(panel.lines) for panel in norms] == [1, 1]


def test_a_term_that_is_the_reward_has_no_chart_of_its_own(tmp_path):
    log = JsonLines(tmp_path / "metrics.jsonl")
    for step in (0, 1):
        log.log(step, {"val-core/a/reward/mean@1": 0.25 * step, "val-aux/a/exact_match/mean@1": 0.25 * step})
    log.close()
    assert [panel.title for panel in charts.panels(read(tmp_path / "metrics.jsonl"))] == ["Held-out reward"]
    assert report.held_out_change(tmp_path) == (0.0, 0.25)
    JsonLines(tmp_path / "metrics.jsonl", first_step=9).log(2, {"val-core/a/reward/mean@1": 0.125})
    assert report.held_out_change(tmp_path) == (0.0, 0.125)  # the last, which is not the best


def test_what_is_always_0_lies_at_the_foot_and_noise_is_flat():
    assert charts.axis_range([0.0, 0.0]) == (0.0, 1.0)
    assert charts.axis_range([0.0, 0.0], 1e-3) == (0.0, 1e-3)
    (panel,) = charts.panels([{"step": step, "training/rollout_ratio_max": 1 + 1e-6 * step} for step in (1, 2)])
    figure = charts.picture([panel], title="")
    low, high = figure.axes[0].get_ylim()
    assert high - low >= 0.01


@pytest.mark.parametrize("count", range(1, 41))
def test_no_row_has_one_chart_or_tile_alone(count):
    for most in ((3, 4, 2, 5), (4, 5, 3, 2)):
        columns = charts.columns_of(count, most)
        assert 2 <= columns <= min(5, count) or columns == count == 1
        assert count == 1 or count % columns != 1


def test_long_names_stay_inside_of_their_chart():
    name = "a_reward_of_ones_own_with_a_name_that_goes_on_and_on/" * 4
    panels = [charts.Panel(f"Held-out {name}", "", {f"{i}{name}": [(0.0, 0.0), (1.0, 1.0)] for i in range(7)})] * 2
    figure = charts.picture(panels, title="")
    for number, ax in enumerate(figure.axes):
        legend = ax.get_legend()
        assert legend is not None
        for item in (ax.title, ax._left_title, legend):  # pyright: ignore[reportAttributeAccessIssue]
            box = item.get_window_extent(figure.canvas.get_renderer()).transformed(figure.dpi_scale_trans.inverted())
            assert 4.4 * number <= box.x0 <= box.x1 <= 4.4 * (number + 1)
            assert box.y0 >= -0.01


def test_the_critic_is_shown_on_responses_that_differ():
    def line(number: int, exact: list[float], values: list[float]) -> dict[str, Any]:
        return {"id": number, "exact_values": exact, "values": values}

    solved = [line(number, [1.0, 1.0], [1.0, 1.0]) for number in range(9)]
    others = [line(9, [0.5, 0.0], [0.5, 0.0]), line(10, [1.0, 1.0], [0.0, 0.0]), line(11, [0.0, 0.0], [0.0, 0.0])]
    assert {each["id"] for each in summary.unlike([*solved, *others])} == {0, 9, 10, 11}
    assert summary.unlike([]) == summary.unlike([line(0, [], [])]) == []
    assert len(summary.unlike(solved)) == 4


def test_ticks_close_together_have_the_digits_they_need():
    assert charts.tick_labels([0.9990, 0.9992, 0.9994]) == ["0.999", "0.9992", "0.9994"]
    assert charts.tick_labels([1000.0, 1000.5]) == ["1000.0", "1000.5"]
    assert charts.tick_labels([10001.0, 10002.0]) == ["10.001k", "10.002k"]
    assert charts.tick_labels([1.01e-5, 1.02e-5]) == ["1.01e-5", "1.02e-5"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.12345, "0.123"),
        (0.00075, "7.5e-4"),
        (-5e-7, "-5e-7"),
        (1234.5, "1234"),
        (15000, "15k"),
        (2e6, "2e6"),
    ],
)
def test_numbers_are_short(value, text):
    assert charts.short(value) == text
