"""Variants of a run side by side: what is varied, what is trained, what is shown."""

import json
import math
import re

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fppo.assembly.run import assemble
from fppo.commands import actions, cli
from fppo.commands.compare import compare, plan
from fppo.pipeline.train import iterate
from fppo.report.compare import Comparison, collect, picture, spread
from fppo.runs.jsonl import JsonLines
from fppo.settings import files, logged
from fppo.settings.compare import CompareSettings, Variant, variants
from tests import tiny_run


def test_values_are_crossed_and_may_bring_others_along():
    found = variants(
        [
            "critic.loss=mse,hl_gauss+critic.loss.low=-1.0+critic.loss.high=1.0+critic.loss.bins=21",
            "algorithm.advantage.lam=0.9,1e+0",
        ]
    )
    assert [variant.changes for variant in found] == [
        {"critic.loss": "mse", "algorithm.advantage.lam": 0.9},
        {"critic.loss": "mse", "algorithm.advantage.lam": 1.0},
        {
            "critic.loss": "hl_gauss",
            "critic.loss.low": -1.0,
            "critic.loss.high": 1.0,
            "critic.loss.bins": 21,
            "algorithm.advantage.lam": 0.9,
        },
        {
            "critic.loss": "hl_gauss",
            "critic.loss.low": -1.0,
            "critic.loss.high": 1.0,
            "critic.loss.bins": 21,
            "algorithm.advantage.lam": 1.0,
        },
    ]
    assert found[0].name == "critic.loss=mse, algorithm.advantage.lam=0.9"
    assert len({variant.directory for variant in found}) == 4


@pytest.mark.parametrize(
    ("vary", "lists"),
    [
        ("reward.weights=[1, 0.5],[1,0]", [[1, 0.5], [1, 0]]),
        ("reward.weights=1 0.5,1 0,2", [[1, 0.5], [1, 0], [2]]),
        ("rollout.stop=['a,]'],[\"+b=\", \"it's\"],don't", [["a,]"], ["+b=", "it's"], ["don't"]]),
        ("actor.loss.name=ppo_clip+reward.weights=1 2,gspo+reward.weights=[3, 4]", [[1, 2], [3, 4]]),
    ],
)
def test_lists_are_values(vary, lists):
    found = variants([vary])
    assert [list(variant.changes.values())[-1] for variant in found] == lists
    assert len({variant.directory for variant in found}) == len(found)


def test_a_text_with_blanks_is_one_value():
    found = variants(["data.prompt=Q: {q} A:,{q}+data.source=of one"])
    assert [variant.changes for variant in found] == [
        {"data.prompt": "Q: {q} A:"},
        {"data.prompt": "{q}", "data.source": "of one"},
    ]


@given(st.lists(st.text(min_size=1), min_size=1, max_size=3), st.booleans())
def test_directories_of_variants_are_plain_names(values, many):
    """They stand in commands without quotes, on any file system, and tell variants apart."""
    texts = [json.dumps(value, ensure_ascii=False) for value in values]
    named = [Variant(", ".join([f"a.b={text}"] * (40 if many else 1)), {}) for text in dict.fromkeys(texts)]
    names = [variant.directory for variant in named]
    assert all(re.fullmatch(r"[A-Za-z0-9_.+-]{1,120}", name) and name not in (".", "..") for name in names)
    assert len(set(names)) == len(named)


def test_the_directory_of_an_ordinary_variant_reads_as_it_is_called():
    (found,) = variants(["critic.loss=mse+critic.loss.bins=3", "actor.optimizer.lr=1e-6"])
    assert found.directory == "critic.loss-mse+critic.loss.bins-3_actor.optimizer.lr-1e-6"


def test_the_held_out_reward_is_compared_first_of_each_source(tmp_path):
    """Whatever else was measured, and whatever the alphabet says."""
    log = JsonLines(tmp_path / "metrics.jsonl")
    other = {"val-aux/a/exact_match/mean@4": 0.0, "val-aux/a/chars/mean@4": 12.0, "val-core/a/reward/best@4/mean": 1.0}
    log.log(0, {**other, "val-core/a/reward/mean@4": 0.5, "val-core/b/reward/mean@4": 0.25})
    log.close()
    assert list(collect({"x": {0: tmp_path}}).curves) == ["val-core/a/reward/mean@4", "val-core/b/reward/mean@4"]


def test_a_spread_is_students_interval():
    found = spread([1.0, 2.0, 4.0])
    assert found.mean == pytest.approx(7 / 3)
    assert found.half == pytest.approx(4.303 * math.sqrt(7 / 3) / math.sqrt(3))  # the deviation is sqrt(7 / 3)
    assert math.isnan(spread([1.0]).half)
    assert spread([float(i) for i in range(200)]).half == pytest.approx(8.071, rel=1e-3)
    assert spread([float(i) for i in range(21)]).half == pytest.approx(2.086 * math.sqrt(38.5 / 21), rel=1e-6)


def test_differences_are_those_of_equal_seeds():
    """What seeds share falls out of the difference."""
    curves = {
        "a": {0: [(0, 0.0), (2, 1.0)], 1: [(0, 0.0), (2, 5.0)]},
        "b": {0: [(0, 0.0), (2, 2.0)], 1: [(0, 0.0), (2, 6.2)]},
    }
    first, second = Comparison(curves={"score": curves}).rows()
    assert first["last_apart"] is None
    assert second["last_apart"].mean == pytest.approx(1.1)
    assert second["last_apart"].half < 2 < second["last"].half
    assert second["mean_apart"].mean == pytest.approx(0.55)


@pytest.fixture
def task(tmp_path):
    tiny_run.write_task(tmp_path, rows=8)
    settings = tiny_run.settings(
        tmp_path, steps=1, actor__optimizer__schedule="constant", actor__epochs=1, eval__exact_values=True
    )
    files.save(settings, tmp_path / "run.toml")
    return tmp_path


TOOLBOX = {
    "algorithm.advantage=gae,gae+algorithm.advantage.lam=0.9+algorithm.advantage.critic_lam=1.0,"
    "gae+algorithm.advantage.lam_alpha=0.05,"
    "turn_gae+algorithm.advantage.gamma=0.9,td+algorithm.advantage.steps=2,vtrace+algorithm.correction=rollout": 6,
    "critic.loss=mse,mse+critic.popart=0.1,huber+critic.loss.delta=0.5,"
    "hl_gauss+critic.loss.bins=21,two_hot,quantile": 6,
    "critic.reads=tokens,confidence,hidden,hidden+critic.ensemble=4+critic.leave_agreed=0.2": 4,
    "critic.privileged=0,8": 2,
    "critic.pretrain=0,1,1+critic.freeze=true": 3,
    "actor.positive_nll_coef=0.0,0.1": 2,
    "actor.optimizer.warmup_steps=0,2+critic.optimizer.warmup_steps=1": 2,
}


def test_all_of_the_critics_toolbox_can_be_varied(tmp_path):
    """Each estimator, loss and kind of critic beside the others; what a variant lacks is refused."""
    settings = tiny_run.settings(tmp_path)
    planned = {vary: len(plan(settings, CompareSettings(vary=(vary,), seeds=1))) for vary in TOOLBOX}
    assert planned == TOOLBOX


ARGUMENTS = ("--vary", "critic.loss=mse,quantile+critic.loss.bins=3", "--seeds", "1", "--actor.optimizer.lr", "0.002")


@pytest.mark.slow
def test_what_is_done_is_not_run_again(task, monkeypatch, capsys):
    trained = []

    def train(settings, here):
        trained.append((settings.critic.loss.name, settings.seed, settings.actor.optimizer.lr))
        return 130 if len(trained) == 2 else real(settings, here)

    real = actions.train
    monkeypatch.setattr(actions, "train", train)
    assert cli.main(["compare", str(task / "run.toml"), *ARGUMENTS]) == 130
    assert (
        "stopped in critic.loss=quantile+critic.loss.bins=3, seed 0; the same command resumes there"
        in capsys.readouterr().out
    )
    assert cli.main(["compare", str(task / "run.toml"), *ARGUMENTS]) == 0
    assert trained == [("mse", 0, 0.002), ("quantile", 0, 0.002), ("quantile", 0, 0.002)]
    text = capsys.readouterr().out
    assert "1 of 2 runs are done" in text
    out = task / "run-compare"
    assert "critic/true/r2" in (out / "compare.txt").read_text()
    head, rule, *rows = (out / "compare.md").read_text().splitlines()
    assert head.startswith("| variant | `val-core/")
    assert head.endswith("| `critic/true/r2` |")
    assert rule == "| --- | --- | --- |"
    names = ["critic.loss=mse", "critic.loss=quantile+critic.loss.bins=3"]
    assert [row.split(" | ")[0] for row in rows] == [f"| `{name}`" for name in names]
    numbers = json.loads((out / "compare.json").read_text())
    assert [row["variant"] for row in numbers[:2]] == names
    assert (out / "compare.png").stat().st_size > 5000
    assert cli.main(["compare", str(task / "run.toml"), *ARGUMENTS, "--metrics", "critic/vf_loss"]) == 0
    assert "critic/vf_loss" in capsys.readouterr().out
    assert len(trained) == 3
    assert cli.main(["compare", str(task / "run.toml"), *ARGUMENTS, "--rollout.n", "2"]) == 2
    assert "holds a run with other settings (rollout.n 1 -> 2)" in capsys.readouterr().err


@pytest.mark.slow
def test_what_cannot_differ_is_said_before_the_runs_and_what_does_not_after_them(task, capsys):
    """A clip where a step has one update, beside a rate that has an effect."""
    once = ["--actor.mini-batch-size", "8", "--seeds", "1", "--metrics", "critic/score/mean"]
    vary = ["--vary", "actor.loss.clip_low=0.1,0.2,0.1+actor.optimizer.lr=0.5"]
    assert cli.main(["compare", str(task / "run.toml"), *vary, *once]) == 0
    said = capsys.readouterr().out
    idle = "actor.loss.clip_low, actor.loss.clip_high, actor.loss.dual_clip change nothing"
    assert said.startswith(f"one update a step: the ratio is 1; {idle}\n\nrun 1 of 3")
    lines = [line for line in said.splitlines() if "variants are equal" in line]
    assert lines == ["the variants are equal, number by number, and end in other states"]  # of one step's scores
    assert cli.main(["compare", str(task / "run.toml"), "--vary", "actor.loss.clip_low=0.1,0.2", *once]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "variants are equal" in line]
    assert lines == ["the variants are equal, number by number, and end in the same state, bit by bit"]


def test_variants_that_are_equal_are_named():
    """Step by step and seed by seed; one without runs is equal to none."""
    curves = {"a": [(1, 0.5)], "b": [(1, 0.5)], "c": [(1, 0.25)], "d": [(1, 0.5), (2, 0.5)]}
    every = {name: {0: points} for name, points in curves.items()} | {"e": {}, "f": {}}
    assert Comparison(curves={"x": every}).equal() == [["a", "b"]]
    assert Comparison(curves={"x": every, "y": every | {"b": {0: [(1, 0.0)]}}}).equal() == []


@pytest.mark.slow
def test_the_table_is_in_sight_after_each_seed_and_last_of_all(task, tmp_path, capsys):
    left = [0, 0, 1, 0]

    def train(settings, file):
        log = JsonLines(f"{settings.output_dir}/metrics.jsonl")
        log.log(1, {"actor/entropy": 0.5})
        log.close()
        return left.pop(0)

    asked = CompareSettings(
        vary=("critic.loss=mse,huber",), seeds=2, metrics=("actor/entropy",), out=str(tmp_path / "out")
    )
    assert compare(files.load(task / "run.toml"), asked, train) == 1
    said, table = capsys.readouterr().out, "actor/entropy\nvariant"
    assert said.count(table) == 2
    assert said.index("run 2 of 4") < said.index(table) < said.index("run 3 of 4")
    assert said.index("failed; the same command") < said.rindex(table)


def test_a_variant_whose_settings_conflict_is_named_with_its_conflict(tmp_path):
    vary = CompareSettings(vary=("rollout.n=2,3,5",), seeds=2)
    with pytest.raises(files.SettingsError) as caught:
        plan(tiny_run.settings(tmp_path), vary)
    found = [problem.partition(": ")[::2] for problem in caught.value.problems]
    assert {name for name, _ in found} == {"rollout.n=3", "rollout.n=5"}
    assert all("must be a multiple of rollout.n" in text for _, text in found)


@pytest.mark.slow
def test_all_that_is_wrong_with_any_variant_is_named_before_any_run(task, capsys):
    vary = ["--vary", "steps=1,2"]
    for arguments, text in (
        (["--vary", "critic.loss"], "'critic.loss' is not of that form: write section.setting=VALUE,VALUE"),
        (["--seeds", "2"], "--vary: is not set; write section.setting=VALUE,VALUE"),
        (["--vary", "seed=1,2"], "seed: fppo compare sets it; give --seeds and --out"),
        (["--vary", "critic.los=mse"], "critic.los = 'mse': there is no such setting; did you mean critic.loss?"),
        (["--vary", "critic.loss=mse,mae"], "critic.loss.name = 'mae': there is no such value loss"),
        (["--vary", "critic.loss=mse+critic.loss.bins=3"], "bins=3: critic.loss.bins = 3: mse has no such keyword"),
        (
            ["--vary", "actor.loss.dual_clip=3,0.5"],
            "0.5: actor.loss = ppo_clip(dual_clip=0.5): dual_clip must",
        ),
        (["--vary", "critic.loss=[mse"], "'critic.loss=[mse' is not of that form"),
        (
            [*vary, "--metrics", "actor/entropi"],
            "actor/entropi: there is no such metric; did you mean actor/entropy",
        ),
        (
            [*vary, "--metrics", "actor/entropy", "loss"],
            "--metrics loss: there is no such metric; names begin with",
        ),
        ([*vary, "--metrics", "val-core/a/reward/mean@4"], "with eval.n = 1 there are mean@1"),
        ([*vary, "--metrics", "val-aux/a/reward/mean@1"], "it is called val-core/a/reward/mean@1"),
        ([*vary, "--eval.no-exact-values", "--metrics", "critic/true/r2"], "give eval.exact_values = true"),
        (
            [*vary, "--data.eval-path", "--eval.no-exact-values"],
            "--metrics is not set, and there are no held-out prompts",
        ),
    ):
        assert cli.main(["compare", str(task / "run.toml"), *arguments]) == 2
        assert text in capsys.readouterr().err
    assert not (task / "run-compare").exists()


@pytest.mark.slow
def test_a_metric_that_the_first_runs_lack_is_named_before_the_next_seed(task, tmp_path):
    trained = []

    def train(settings, file):
        trained.append((settings.seed, settings.critic.loss.name))
        log = JsonLines(f"{settings.output_dir}/metrics.jsonl")
        log.log(1, {"actor/entropy": 0.5})
        log.close()
        return 0

    settings = files.load(task / "run.toml")
    asked = CompareSettings(
        vary=("critic.loss=mse,huber",), seeds=2, metrics=("actor/of_a_loss",), out=str(tmp_path / "out")
    )
    with pytest.raises(ValueError, match=r"no run has logged \['actor/of_a_loss'\]; there are \['actor/entropy', 's"):
        compare(settings, asked, train)
    assert trained == [(0, "mse"), (0, "huber")]
    assert compare(settings, attrs.evolve(asked, metrics=("actor/entropy",)), train) == 0


@pytest.mark.slow
def test_what_runs_log_is_never_refused(task):
    """By a run with a critic, held-out prompts and exact values, and by its settings."""
    settings = files.load(task / "run.toml")
    with assemble(settings) as assembly:
        _, _, report = next(iterate(assembly.run, program=assembly.program, draw=assembly.draw))
        names = [*report, *assembly.evaluate(assembly.run), "perf/cpu_memory_used_gb", "training/global_step"]
    assert [name for name in names if logged.missing(settings, name)] == []
    assert logged.missing(settings, "val-aux/errors") is None
    without = files.replace(settings, {"algorithm.advantage": "grpo"})
    assert logged.missing(without, "critic/score/mean") is None
    assert "no critic is trained" in str(logged.missing(without, "critic/vf_loss"))


def test_every_metric_of_a_picture_has_a_panel_and_no_other(tmp_path):
    curves = {metric: {"x": {0: [(1, 1e-7), (2, 2e-7)]}} for metric in ("actor/ppo_kl", "b", "c", "d", "e")}
    figure = picture(Comparison(curves=curves))
    assert [ax.get_title("left") for ax in figure.axes if ax.axison] == list(curves)
    low, high = figure.axes[0].get_ylim()
    assert high - low >= 1e-3


def test_a_metric_that_no_run_has_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 2.0}\n')
    with pytest.raises(ValueError, match=r"no run has logged \['b'\]; there are \['a', 'step'\]"):
        collect({"x": {0: tmp_path}}, ["b"])
    with pytest.raises(ValueError, match="no run has logged a held-out score"):
        collect({"x": {0: tmp_path}})


def test_a_metric_that_one_variant_logs_may_be_compared(tmp_path):
    settings = tiny_run.settings(tmp_path, data__eval_path=[])

    def planned(*names, metrics=("critic/vf_loss",)):
        vary = f"algorithm.advantage={','.join(names)}"
        return plan(settings, CompareSettings(vary=(vary,), seeds=1, metrics=metrics))

    assert len(planned("gae", "reinforce_plus_plus")) == len(planned("reinforce_plus_plus", "gae")) == 2
    with pytest.raises(files.SettingsError, match="--metrics critic/vf_loss: no critic is trained"):
        planned("reinforce_plus_plus")
    with pytest.raises(files.SettingsError, match="--metrics is not set, and there are no held-out prompts"):
        planned("gae", metrics=())


def test_seeds_count_from_the_runs_own(tmp_path):
    runs = plan(
        tiny_run.settings(tmp_path, seed=7),
        CompareSettings(vary=("actor.optimizer.lr=1e-5",), seeds=2, metrics=("critic/score/mean",)),
    )
    (of_seed,) = runs.values()
    assert {seed: own.seed for seed, own in of_seed.items()} == {7: 7, 8: 8}
