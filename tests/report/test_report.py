"""The report: complete where the run is, honest where it is not, and closed to what samples contain."""

from __future__ import annotations

import math
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fppo.report import charts, page
from fppo.report import write as report
from fppo.report.write import write_report
from fppo.runs.jsonl import JsonLines
from fppo.settings import files

EVIL = "<script>alert('x')</script>\"&<img src=http://example.com/x.png>\u0000\ud800"


def write_run(directory: Path, *, steps: int = 50, critic: bool = True, samples: bool = True, text: str = "47") -> Path:
    metrics = JsonLines(directory / "metrics.jsonl")
    metrics.log(0, {"val/sums/accuracy/mean@1": 0.25})
    for step in range(1, steps + 1):
        numbers = {
            "critic/score/mean": step / steps,
            "actor/ppo_kl": 0.0001 * step,
            "actor/entropy": 1.0,
            "perf/throughput": 1000.0,
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
        log = JsonLines(directory / "samples.jsonl")
        for step in range(1, steps + 1):
            log.write(sample(step, text, critic=critic))
        log.close()
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
    text = write_report(tmp_path).read_text()
    assert "The critic beside the truth, token by token" in text
    assert "token 2: critic: 0.25" in text
    assert "token 1: exact: 0.25" in text
    assert "newest47" in text
    assert "oldest47" not in text
    assert "<script>" not in text


def sample(step: int, text: str, *, critic: bool = True) -> dict[str, Any]:
    return {
        "step": step,
        "id": text,
        "row_id": 3,
        "source": "sums",
        "prompt": f"prompt {text}",
        "response": f"is {text}",
        "tokens": ["is", "", f" {text}\n"],
        "log_probs": [-0.5, None, -3.0],
        "advantages": [0.25, None, -2.0],
        "values": [0.125, None, 0.5] if critic else None,
        "score": None,
        "named_scores": {"format": 1.0},
        "ground_truth": {"answer": text},
        "finish": "length",
    }


class Page(HTMLParser):
    """The tags, links and text of a page; raises if tags do not close."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.tips: list[str] = []
        self.focusable = 0
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "input"):
            self.open.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action")]
        self.focusable += ("tabindex", "0") in attrs
        self.tips += [value or "" for name, value in attrs if name == "data-t"]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text += data


def page_of(directory: Path) -> Page:
    path = write_report(directory)
    assert path == directory / "report.html"
    assert (directory / "curves.png").read_bytes().startswith(b"\x89PNG")
    return Page(path.read_text(encoding="utf-8"))


def test_a_whole_run_is_reported(tmp_path):
    settings = files.replace(files.TrainSettings(), {"steps": 50, "model.path": "some/model"})
    files.save(settings, tmp_path / "settings.toml")
    page = page_of(write_run(tmp_path))
    for shown in ("25.0% → 75.0%", "+50.0 points", "50 of 50", "1.7 min", "Value loss", "some/model", "timing_s/gen"):
        assert shown in page.text
    assert "settings at their defaults" in page.text
    assert page.tips[:2] == ["log-prob -0.500  (p = 0.607)\nadvantage +0.250\nvalue 0.125", "not trained on"]
    assert "svg" in page.tags
    assert list(tmp_path.glob(".*")) == []


def test_what_a_run_did_not_write_is_left_out(tmp_path):
    page = page_of(write_run(tmp_path, steps=1, critic=False, samples=False))
    assert "Value loss" not in page.text
    assert "Who worked when" not in page.text
    assert page.text.count("This run wrote none.") == 2
    page = page_of(write_run(tmp_path, steps=3, critic=False))
    assert "value" not in page.tips[0]
    assert "script" not in page.tags


def test_partial_records_are_reported(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 2, "a": 1.0}\n{"step": 1, "a": null}\n{"b": 3}\n{"step": 2, "b": 4}\n{"step": 3, "a":')
    (tmp_path / "samples.jsonl").write_text('{"step": 2}\n{"step": 2, "tokens": ["a"], "response": "a"}\n{"st')
    page = page_of(tmp_path)
    assert "All 2 metrics" in page.text
    assert report.merged([{"step": 2, "a": 1}, {"step": 1}, {"step": 2, "b": 4}]) == [
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
    page = page_of(run)
    said = f"{run / 'metrics.jsonl'} holds nothing of step 1 to 7"
    assert said in capsys.readouterr().err
    for shown in (said, "7 of 9", "forty-seven", "25.0% → 75.0%", "sums/reward/mean@2"):
        assert shown in page.text
    write_run(run, steps=2)
    page = page_of(run)
    assert f"{run / 'metrics.jsonl'} holds nothing of step 3 to 7" in page.text
    assert "Reward in training" in page.text


def test_nothing_in_a_sample_becomes_markup_or_a_request(tmp_path):
    directory = write_run(tmp_path / "<i>", text=EVIL, steps=2)
    files.save(files.replace(files.TrainSettings(), {"model.path": EVIL[:-1]}), directory / "settings.toml")
    page = page_of(directory)
    assert {"script", "img"}.isdisjoint(page.tags)
    assert page.links == []
    assert "<script>alert('x')</script>" in page.text
    html = (directory / "report.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in html
    assert "url(" not in html
    assert "@import" not in html


def test_errors_name_the_file(tmp_path):
    with pytest.raises(ValueError, match="no such directory"):
        write_report(tmp_path / "none")
    with pytest.raises(ValueError, match=r"metrics\.jsonl: there are no metrics"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("{\n{}\n")
    with pytest.raises(ValueError, match="line 1"):
        write_report(tmp_path)
    write_run(tmp_path / "run", steps=1)
    (tmp_path / "run" / "settings.toml").write_text("a =")
    with pytest.raises(ValueError, match=r"settings\.toml: not TOML"):
        write_report(tmp_path / "run")


def test_damaged_lines_of_samples_are_left_out_and_named(tmp_path, capsys):
    run = write_run(tmp_path, steps=2, text="forty-seven")
    whole = (run / "samples.jsonl").read_text()
    (run / "samples.jsonl").write_text("{damaged\n" + whole)
    page = write_report(run).read_text()
    assert "forty-seven" in page
    assert f"left out: {run / 'samples.jsonl'}, line 1: not JSON" in capsys.readouterr().err


def test_samples_of_the_first_and_last_steps_are_kept():
    samples = [{"step": step, "id": i} for step in range(1, 101) for i in range(9)]
    picked = report.pick(samples)
    assert next(iter(picked)) == 1
    assert list(picked)[-1] == 100
    assert len(picked) == report.SHOWN_STEPS
    assert {len(group) for group in picked.values()} == {report.SHOWN_PER_STEP}
    assert report.pick([]) == {}


def test_the_best_and_the_worst_of_late_steps_are_shown(tmp_path):
    pairs = [(step, i) for step in range(1, 9) for i in range(4)]
    scored = [{"step": step, "id": f"{step}-{i}", "score": float(i), "response": "r"} for step, i in pairs]
    best, worst = report.extremes(scored).items()
    assert best[0] == "Best of steps 7 to 8, up to 3"
    assert [sample["score"] for sample in best[1]] == [3.0, 3.0, 2.0]
    assert [sample["score"] for sample in worst[1]] == [0.0, 0.0, 1.0]
    assert report.extremes([{"step": 1, "score": 1.0}] * 3) == report.extremes([{"step": 1, "score": None}]) == {}
    log = JsonLines(write_run(tmp_path, samples=False) / "samples.jsonl")
    log.write(*scored)
    log.close()
    assert "Best of steps 7 to 8, up to 3" in page_of(tmp_path).text


def test_the_numbers_of_a_token_are_reached_without_a_pointer(tmp_path):
    page = page_of(write_run(tmp_path, steps=2))
    assert page.focusable == len(page.tips) > 0
    style = (tmp_path / "report.html").read_text().partition("<style>")[2].partition("</style>")[0]
    assert ".t:focus::after" in style


def test_a_legend_wraps_inside_its_card():
    lines = {f"a name that is long {i}": [(1.0, 1.0), (2.0, 2.0)] for i in range(9)}
    drawn = page._figure(charts.Panel("t", "n", lines))
    legend = drawn.partition("<div class=keys>")[2].partition("</div>")[0]
    assert all(name in legend for name in lines)
    style = Path(page.__file__).with_name("report.css").read_text()
    assert "flex-wrap: wrap" in style.partition(".keys {")[2].partition("}")[0]
    assert "nowrap" not in style.partition(".key {")[2].partition("}")[0]


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


def test_ticks_close_together_have_the_digits_they_need():
    assert charts.tick_labels([0.9990, 0.9992, 0.9994]) == ["0.999", "0.9992", "0.9994"]
    assert charts.tick_labels([1000.0, 1000.5]) == ["1000.0", "1000.5"]
    assert charts.tick_labels([10001.0, 10002.0]) == ["10.001k", "10.002k"]
    assert charts.tick_labels([1.01e-5, 1.02e-5]) == ["1.01e-5", "1.02e-5"]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=100))
def test_charts_stay_inside_their_frame(values):
    line = [(float(step), value) for step, value in enumerate(values)]
    drawn = charts.svg(charts.Panel("t", "n", {"a": line}))
    for part in drawn.split('<circle class="dot')[1:]:
        x, y = (float(part.split(f'{name}="')[1].split('"')[0]) for name in ("cx", "cy"))
        assert 0 <= x <= charts.WIDTH
        assert 0 <= y <= charts.HEIGHT


@given(st.floats(-5, 5), st.floats(-5, 5), st.integers(1, 90))
def test_smoothing_keeps_straight_lines(start, slope, count):
    line = [(float(i), start + slope * i) for i in range(count)]
    for (_, a), (_, b) in zip(charts.smooth(line), line):
        assert math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)


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


def test_colours_grow_with_size():
    scale = page.scale_of([sample(1, "x")])
    assert scale.advantage == 2.0
    assert (scale.value_low, scale.value_high) == (0.125, 0.5)
    assert page.scale_of([{}]).advantage == 1.0
