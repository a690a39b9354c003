"""What a report, a page and a comparison are made of, whole: every setting, stage, file and step in its own place."""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
from typing import Any
from urllib.parse import quote

import attrs
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fppo.batch import Experience
from fppo.pipeline.program import RunState
from fppo.report import card, charts, compare, diff, summary, timeline, view_page, viewed
from fppo.report.charts import Panel
from fppo.report.compare import Comparison
from fppo.report.timeline import Bar
from fppo.report.view_server import Viewed, respond
from fppo.runs import starts
from fppo.runs.jsonl import JsonLines
from fppo.runs.sample_files import SAMPLES
from fppo.settings import files
from fppo.settings.train import TrainSettings
from tests import tiny_run
from tests.report import view_runs
from tests.report.test_pictures import exported, front, section, trained
from tests.report.test_view_server import Scripts

# cards

FORMS = [("actor", "whole"), ("actor", "adapter"), ("actor", "merged"), ("critic", "whole"), ("critic", "merged")]


@pytest.mark.slow
@pytest.mark.parametrize(("role", "form"), FORMS)
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("seen", [False, True])
def test_the_front_of_a_card_is_what_a_hub_reads(tmp_path, monkeypatch, role, form, local, seen):
    monkeypatch.chdir(tmp_path)
    if local:
        (tmp_path / "org" / "base-7b").mkdir(parents=True)
    sets = ["openai/gsm8k:main", "org/x", "openai/gsm8k:test", "/a/b.jsonl", "c.JSONL", "d.parquet"]
    more: dict[str, Any] = {"data.path": sets} | ({"data.chat": True, "data.images": "image"} if seen else {})
    more |= {} if form == "whole" else {"model.lora.rank": 2, "model.lora.base": "nf4"}
    made = exported(tmp_path, more=more, role=role, form=form)
    expected: dict[str, Any] = {
        "library_name": "peft" if form == "adapter" else "transformers",
        "pipeline_tag": "token-classification" if role == "critic" else "text-generation",
        "tags": ["fppo", "reinforcement-learning"] + ["lora"] * (form != "whole"),
        "datasets": ["openai/gsm8k", "org/x"],
    }
    if seen and role == "actor":
        expected["pipeline_tag"] = "image-text-to-text"
    if not local:
        expected["base_model"] = "org/base-7b"
        expected["base_model_relation"] = "adapter" if form == "adapter" else "finetune"
    assert front(made) == expected
    text = section(made, "Use")
    kind = "TokenClassification" if role == "critic" else "ImageTextToText" if seen else "CausalLM"
    assert text.count(f"AutoModelFor{kind}") == 2
    assert text.count("AutoModelFor") == 2
    assert ("load the base so" in text) == (form == "adapter")


def test_a_card_names_no_directory_of_the_machine(tmp_path):
    """Whatever setting names a file; those that are names of the hub stay."""
    one = {name: f"/home/alice/{name}" for name in ("model.tokenizer", "data.chat_template", "output_dir")}
    one |= {name: f"/home/alice/{name}" for name in files.PATHS if name not in ("data.path", "data.eval_path")}
    one |= {"data.tools": "/home/alice/tools.json", "module_dirs": ["/home/alice/modules"]}
    one |= {"data.path": ["/home/alice/a.jsonl", "org/b"], "data.eval_path": ["/home/alice/e.jsonl"]}
    settings = files.replace(files.from_dict({}), {**one, "model.teacher_path": "/home/alice/teacher"})
    text = card.card(attrs.evolve(exported(tmp_path), settings=settings), [], [])
    assert "alice" not in text
    assert '"org/b"' in text
    for name in ("tools.json", "a.jsonl", "e.jsonl", "modules", "model.tokenizer", "data.chat_template"):
        assert name in text
    taught = {"algorithm.advantage": "distill", "model.teacher_path": "/home/alice/teacher"}
    assert trained(exported(tmp_path, more=taught))["teacher"] == "teacher"


@pytest.mark.parametrize(
    ("more", "data", "rewards"),
    [
        (
            {"reward.functions": [], "algorithm.advantage": "distill", "model.teacher_path": "org/t"},
            "openai/gsm8k:main, train.jsonl",
            "none",
        ),
        (
            {"reward.functions": [], "reward.model.path": "org/m"},
            "openai/gsm8k:main, train.jsonl",
            "a reward model or a judge",
        ),
        ({"data.path": [], "data.rows": "mine:rows"}, "mine:rows", "exact_match, mine:fn"),
        ({"data.path": [], "rollout.environment": "mine:env"}, "mine:env", "exact_match, mine:fn"),
        (
            {"data.path": [], "data.rows": "mine:rows", "rollout.environment": "mine:env"},
            "mine:rows",
            "exact_match, mine:fn",
        ),
    ],
)
def test_a_card_says_where_prompts_and_scores_are_from(tmp_path, more, data, rewards):
    rows = trained(exported(tmp_path, more=more))
    assert (rows["data"], rows["rewards"]) == (data, rewards)


# charts


@given(st.text("ab$", max_size=30), st.integers(5, 20))
def test_a_long_text_keeps_its_ends(text, width):
    found = charts.shortened(text, width)
    assert len(found) == min(len(text), width)
    if len(text) > width:
        begin, end = found.split("...", 1)
        assert text.startswith(begin)
        assert text.endswith(end)
        assert abs(len(begin) - len(end)) <= 2
    else:
        assert found == text
    shown = charts.worded(text + "\x1b", 40)
    assert shown.replace("\\$", "") == (text + "\\x1b").replace("$", "")
    assert shown.count("\\$") == text.count("$")


@given(
    st.lists(st.floats(-3, 3).map(lambda x: round(x, 6)), min_size=1, max_size=5),
    st.sampled_from([0.0, 1e-3, 0.5, 10.0]),
)
def test_the_range_of_an_axis_is_as_wide_as_its_panel_says(values, least):
    """What is never negative has no axis below 0; else a margin of 6 hundredths on both sides."""
    low, high = charts.axis_range(values, least)
    narrow = max(least, 0.02 * max(map(abs, values))) or 1.0
    span = max(values) - min(values)
    if span >= narrow:
        assert high == pytest.approx(max(values) + 0.06 * span)
        below = min(values) - 0.06 * span
        assert low == pytest.approx(max(below, 0.0) if min(values) >= 0 else below)
    else:
        assert high - low == pytest.approx(narrow)
        assert min(values) < 0 or low >= 0
    figure = charts.picture([Panel("A", "", {"x": list(enumerate(values))}, least=least)], title="")
    assert figure.axes[0].get_ylim() == pytest.approx((low, high))


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [([0.0, 1.0], 0.0, 1.06), ([0.03, 1.03], 0.0, 1.09), ([0.5, 1.5], 0.44, 1.56), ([-1.0, 0.0], -1.06, 0.06)],
)
def test_an_axis_of_what_is_never_negative_begins_at_0_or_above(values, low, high):
    assert charts.axis_range(values) == (pytest.approx(low), pytest.approx(high))


def test_a_chart_by_source_has_the_means_alone():
    """Whatever else is measured of several responses, and in whatever order it is logged."""
    numbers = {"reward/mean@4": 0.25, "reward/best@4/mean": 0.5, "reward/best@2/mean": 0.375, "reward/maj@4/mean": 0.75}
    for sources, expected in (
        (["a"], {"mean@4": 0.25, "best@4": 0.5, "maj@4": 0.75}),
        (["a", "b"], {"a": 0.25, "b": 0.25}),
    ):
        for order in (1, -1):
            levels = {name: "aux" if "@2" in name else "core" for name in numbers}
            line = {f"val-{levels[x]}/{source}/{x}": y for source in sources for x, y in [*numbers.items()][::order]}
            (panel,) = charts.panels([{"step": 3, **line}])
            assert panel.lines == {label: [(3, value)] for label, value in expected.items()}


def test_a_comparison_does_not_magnify_noise_either():
    """Its axis is as wide as that of the metric's own chart, or as what is drawn."""
    steps = [(0, 1e-6), (1, 2e-6)]
    curves = {name: {"a": {0: steps}} for name in ("actor/ppo_kl", "other")}
    figure = compare.picture(Comparison(curves=curves))
    spans = [ax.get_ylim()[1] - ax.get_ylim()[0] for ax in figure.axes]
    assert spans[0] >= 1e-3 > 1e-4 > spans[1]


def test_a_comparison_needs_something_that_was_logged(tmp_path):
    log = JsonLines(tmp_path / "metrics.jsonl")
    log.log(1, {"x": 1.0})
    log.close()
    runs = {"a": {0: tmp_path}}
    with pytest.raises(ValueError, match=r"no run has logged a held-out score; there are \['step', 'x'\]"):
        compare.collect(runs)
    with pytest.raises(ValueError, match=r"no run has logged \['y'\]; there are"):
        compare.collect(runs, ["x", "y"])
    assert list(compare.collect(runs, ["x"]).curves) == ["x"]


# differences

STAGES = (
    "the drawing of prompts",
    "gen",
    "reward",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
)
MADE_BY = {
    "the drawing of prompts": "row_ids ids ground_truth source extras inputs cursor key step pretraining bases ref",
    "gen": "tokens attention_mask response_mask rollout_log_probs sampling_log_probs groups versions finish routed "
    "token_versions turn_ids turn_rewards episodes observed ahead drafts",
    "reward": "scores named_scores baselines outcomes teacher_log_probs process_rewards teacher_top_log_probs "
    "teacher_top_ids taught",
    "old_log_prob": "old_log_probs disagreement sum_squared_probs entropy hidden truth_signs",
    "ref": "ref_log_probs",
    "values": "values",
    "adv": "token_rewards advantages returns correction_weights entropy_mask entropy_coef kl",
    "update_critic": "critic",
    "update_actor": "actor teacher",
}


MAKERS = {name: stage for stage, names in MADE_BY.items() for name in names.split()}
OF_STATE = MAKERS | {"entropy": "update_actor"}  # the controller of the bonus, not the batch's column


def test_every_leaf_of_a_batch_and_of_a_state_has_a_maker():
    fields = [field.name for cls in (Experience, RunState) for field in attrs.fields(cls)]
    assert {*fields} == {*MAKERS}


def write(run, step, metrics=None, **digests):
    """A run of one step."""
    run.mkdir(exist_ok=True)
    for name, line in (("metrics", metrics), ("digests", digests)):
        (run / f"{name}.jsonl").write_text(json.dumps({"step": step, **line}) + "\n" if line else "")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sets(st.sampled_from(sorted(MAKERS)), min_size=1, max_size=4), st.sampled_from(["", "['x']", ".first", "[0].x"])
)
@example({"tokens", "actor"}, "[0].x")
def test_the_earliest_maker_of_what_differs_is_named(tmp_path, names, part):
    """Whichever part of a leaf differs."""
    fields = [{field.name for field in attrs.fields(cls)} for cls in (Experience, RunState)]
    batch, state = ([f".{x}{part}" for x in MAKERS if x in each] for each in fields)
    own = {f".{name}{part}" for name in names}
    write(tmp_path / "a", 1, batch=dict.fromkeys(batch, "a"), result=dict.fromkeys(state, "a"))
    other = [{leaf: "b" if leaf in own else "a" for leaf in each} for each in (batch, state)]
    write(tmp_path / "b", 1, batch=other[0], result=other[1])
    lines = diff.diff(tmp_path / "a", tmp_path / "b").lines
    pairs = [(batch, MAKERS), (state, OF_STATE)]
    made = [(x, by[x[1:].removesuffix(part)]) for each, by in pairs for x in each if x in own]
    stage = next(stage for stage in STAGES if any(by == stage for _, by in made))
    differing = [x for x, by in made if by == stage]
    assert f"  first in what {stage} made: {', '.join(differing)}" in lines
    write(tmp_path / "b", 1, batch=other[0], result=other[1], kind="sums")  # digests of another kind
    assert not any("first in what" in line for line in diff.diff(tmp_path / "a", tmp_path / "b").lines)


def test_metrics_are_named_by_their_relative_differences(tmp_path):
    write(tmp_path / "a", 1, {"small": 1e-6, "large": 100.0, "same": 1.0, "gone": None})
    write(tmp_path / "b", 1, {"small": 3e-6, "large": 101.0, "same": 1.0})
    by = "by at most 1e-02 (of numbers over 1: of their size)"
    shown = f"  3 of 4 metrics differ, {by}, as gone None and nothing; small 1e-06 and 3e-06; large 100.0 and 101.0"
    assert shown in diff.diff(tmp_path / "a", tmp_path / "b").lines


def test_an_evaluation_before_the_first_step_is_compared_by_metrics(tmp_path):
    for name in "ab":
        log = JsonLines(tmp_path / name / "metrics.jsonl")
        digests = JsonLines(tmp_path / name / "digests.jsonl")
        for step in range(4):
            log.log(step, {"x": 1.0})
            if step:
                digests.write({"step": step, "batch": {".ids": "x"}, "result": {}})
        log.close()
        digests.close()
    assert diff.diff(tmp_path / "a", tmp_path / "b").lines == [
        "equal in steps 0 to 3, bit for bit: batches, states and metrics"
    ]


# timelines

ROLES = {
    "rollout": ["gen", "generate"],
    "reward": ["reward"],
    "actor": ["old_log_prob", "update_actor"],
    "reference": ["ref", "teacher"],
    "critic": ["values", "update_critic"],
    "other": ["adv", "step", "testing"],
}


def test_each_stage_has_the_line_of_its_role(tmp_path):
    spans = [[name, 1.0, 2.0] for names in ROLES.values() for name in names]
    log = JsonLines(tmp_path / "trace" / "rank_00000.jsonl")
    log.write({"step": 3, "spans": spans, "calls": []})
    log.close()
    found = {bar.name: (bar.kind, bar.line) for bar in timeline.read(tmp_path)}
    assert found == {
        name: (role, "step" if name == "step" else role) for role, names in ROLES.items() for name in names
    }


def test_bars_are_line_by_line_processes_before_pools_and_ranks_by_number(tmp_path):
    calls = [
        {
            "group": "a",
            "label": "values",
            "start": 9.0,
            "seconds": 0.2,
            "ranks": [[20.0 - rank, 0.3] for rank in range(11)],
            "there": 1,
            "back": 2,
        }
    ]
    log = JsonLines(tmp_path / "trace" / "rank_00000.jsonl")
    for step in (1, 2):
        spans = [["values", 5.0 - step, 1.0], ["adv", 0.0, 1.0], ["gen", 2.0, 1.0], ["step", 0.0, 9.0]]
        log.write({"step": step, "spans": spans, "calls": calls})
    log.close()
    bars = timeline.read(tmp_path)
    lines = list(dict.fromkeys((bar.process, bar.line) for bar in bars))
    ranks = [("pool a", f"rank {number}") for number in range(11)]
    assert lines == [*(("controller", x) for x in ("step", "rollout", "critic", "other")), *ranks]
    assert [(bar.step, bar.start) for bar in bars if bar.line == "critic"] == [(2, 3.0), (1, 4.0)]
    assert {bar.more["waited"] for bar in bars if bar.process == "pool a"} == {0.0}  # never less than nothing
    assert {bar.step for bar in timeline.read(tmp_path, last=1)} == {2}


bars_of = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)), min_size=1, max_size=6)


@given(bars_of)
def test_bars_of_a_line_do_not_overlap_and_end_where_they_did(times):
    bars = [Bar("p", "l", f"{i}", 1, 50.0 + a, float(b)) for i, (a, b) in enumerate(sorted(times))]
    events = [x for x in timeline.chrome(bars)["traceEvents"] if x["ph"] == "X"]
    first, reached = bars[0].start, bars[0].start
    for bar, event in zip(bars, events, strict=True):
        begin = max(bar.start, reached)
        length = max(bar.start + bar.seconds - begin, 0.0)
        assert (event["ts"], event["dur"]) == (pytest.approx(1e6 * (begin - first)), pytest.approx(1e6 * length))
        reached = max(reached, bar.start + bar.seconds)


# pages and servers


def test_runs_of_a_page_share_its_bytes_and_have_an_index_for_each_few_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(viewed, "MOST_STEPS", 2)
    runs = [view_runs.write_run(tmp_path / name, steps=5, rows=2) for name in ("a", "b</script>".replace("/", ""))]
    page = Scripts(view_page.export(runs, tmp_path / "page.html", most_bytes=1e9).read_text())
    for number in (0, 1):
        names = [name for name in page.scripts if name.startswith(f"index-{number}-")]
        assert names == [f"index-{number}-{first}" for first in (1, 3, 5)]
        steps = [
            sorted({*pq.read_table(io.BytesIO(base64.b64decode(page.scripts[name]))).column("step").to_pylist()})
            for name in names
        ]
        assert steps == [[1, 2], [3, 4], [5]]
        assert [name for name in page.scripts if name.startswith(f"rows-{number}-")] == [
            f"rows-{number}-{step}" for step in range(1, 6)
        ]
    assert "<" not in page.scripts["state"]  # nothing there begins a tag or a comment
    assert json.loads(page.scripts["state"])[1]["title"] == "b<script>"
    size = max(path.stat().st_size for run in runs for path in (run / SAMPLES).iterdir())
    page = Scripts(view_page.export(runs, tmp_path / "page.html", most_bytes=6 * size).read_text())
    states = json.loads(page.scripts["state"])
    assert [[step for step, _ in state["samples"]] for state in states] == [[2, 4, 5]] * 2
    assert {name for name in page.scripts if name.startswith("rows")} == {
        f"rows-{number}-{step}" for number in (0, 1) for step in (2, 4, 5)
    }


@pytest.fixture
def served(tmp_path):
    runs = [view_runs.write_run(tmp_path / name, steps=1, rows=2) for name in "abc"]
    return Viewed(runs=runs, titles=list("abc"), key="key")


def states_of(served, known):
    return json.loads(respond(served, f"/key/states?known={quote(json.dumps(known))}").body)


def test_each_run_is_known_by_its_own_place(served):
    """Whoever knows fewer runs, or more of them, gets what changed of each."""
    stamps = [[state["lines"]["stamp"], 2] for state in states_of(served, [])]
    for known in itertools.chain.from_iterable(([stamps[:n], [*stamps[:n], *stamps[:3]][:5]]) for n in range(4)):
        expected = [None if each == own else "new" for each, own in zip([*known, None, None, None], stamps)]
        found = [state if state is None else "new" for state in states_of(served, known)]
        assert found == expected
    swapped = states_of(served, [stamps[1], stamps[0], stamps[2]])
    assert [state and state["title"] for state in swapped] == ["a", "b", None]
    twice = respond(served, "/key/run/2/index?steps=7&steps=1")
    assert pq.read_table(io.BytesIO(twice.body)).num_rows == 2
    assert respond(served, "/key/run/3/index").status == 404


# what the viewer reads


def test_a_run_is_known_by_any_part_of_its_record(tmp_path):
    for name in ("metrics.jsonl", "samples", "starts", "evaluations", "digests.jsonl"):
        place = tmp_path / name / "run" / name
        place.parent.mkdir(parents=True)
        place.touch() if name.endswith("jsonl") else place.mkdir()
        assert viewed.is_run(place.parent) == (name in ("metrics.jsonl", "samples", "starts"))


CHANGED = ("metrics.jsonl", "settings.toml", "samples/.000009.new", "truth/step_00000001.jsonl")
CHANGED += ("trace/rank_00000.jsonl", "trace/rank_00001.jsonl")


@pytest.mark.parametrize("change", CHANGED)
def test_a_state_is_read_again_whatever_changed(tmp_path, change):
    run = view_runs.write_run(tmp_path, steps=1, rows=2)
    (run / "truth").mkdir()
    for path in (run, run / "truth", run / SAMPLES, *run.glob("*.*"), *run.glob("trace/*")):
        os.utime(path, (1e9, 1e9))
    first = viewed.state_of(run, "")
    assert first is not None
    before = first["lines"]["stamp"]
    assert viewed.state_of(run, "", (before, 2)) is None
    with (run / change).open("a") as file:
        file.write("\n")
    state = viewed.state_of(run, "", (before, 2))
    assert state is not None
    assert state["lines"]["stamp"] != before
    assert state["lines"]["from"] == 2


def logged(run, steps, *, more=()):
    log = JsonLines(run / "metrics.jsonl")
    for step in steps:
        log.log(step, {"critic/score/mean": 0.5, "timing_s/gen": 1.0})
    log.close()
    for step in more:
        view_runs.write_table(run, step, view_runs.table(step, 2))


def test_rows_may_be_a_step_before_the_metrics_and_a_fork_begins_where_it_does(tmp_path):
    logged(tmp_path / "one", [1, 2], more=[1, 2, 3])
    state = viewed.state_of(tmp_path / "one", "")
    assert (state["notes"], state["others"]) == ([], [])
    logged(tmp_path / "two", [1, 2], more=[1, 2, 4])
    state = viewed.state_of(tmp_path / "two", "")
    assert state["notes"] == [f"{tmp_path / 'two' / 'metrics.jsonl'} holds nothing of step 3 to 4"]
    assert [record["step"] for record in state["others"]] == [4]
    fork = tmp_path / "run"
    fork.mkdir()
    starts.record(tiny_run.settings(tmp_path, resume=str(tmp_path / "other" / "step_00000003")), 3)
    logged(fork, [4, 5], more=[4, 5])
    state = viewed.state_of(fork, "")
    assert (state["notes"], state["others"]) == ([], [])


def test_tiles_and_stages_know_all_settings_and_steps(tmp_path):
    """Of steps without metrics, too; settings that differ from the defaults come first."""
    run = tmp_path / "run"
    usual = files.flat(files.to_dict(TrainSettings()))["steps"]
    logged(run, [1, 2, 3])
    (run / "settings.toml").write_text(f"seed = 3\nsteps = {usual}\n")
    state = viewed.state_of(run, "a run")
    assert ["Steps", f"3 of {usual}", ""] in state["tiles"]
    assert (list(state["settings"]), state["chosen"]) == (["seed", "steps"], ["seed"])
    assert (state["title"], state["path"], state["stages"]) == ("a run", str(run), [["gen", 1.0]])
    assert [x["title"] for x in state["panels"]] == ["Reward"]
    assert state["panels"][0]["least"] == 0.01
    later = viewed.state_of(run, "", (state["lines"]["stamp"].replace("-", "-0"), 2))
    assert [x["step"] for x in later["lines"]["records"]] == [3]
    assert later["stages"] == state["stages"]
    known = (state["lines"]["stamp"].replace("-", "-0"), 7)  # more than there are: the file was cut
    assert [x["step"] for x in viewed.state_of(run, "", known)["lines"]["records"]] == [1, 2, 3]


def test_charts_beside_the_truth_do_not_magnify_noise(tmp_path):
    log = JsonLines(tmp_path / "step_00000001.jsonl")
    names = ("values", "exact_values", "advantages", "exact_advantages")
    log.write({"step": 1, "prompt": "p", "tokens": ["a"], **{name: [0.5] for name in names}})
    log.close()
    assert [(x.note, x.unit, x.least) for pair in summary.beside_truth(tmp_path) for x in pair] == [
        ("value before each token", "token", 0.1),
        ("advantage", "token", 0.1),
    ]
