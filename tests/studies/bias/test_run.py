"""What is said of a run is what its step's math has on its worlds, part by part; and pictures show the numbers."""

from __future__ import annotations

import math
from functools import partial

import attrs
import pytest
import torch
from matplotlib.figure import Figure

from fppo import advantages, losses
from fppo.laws.expectation import KL, StepMath, compared, step_bias
from fppo.studies.bias import chart, study, text
from fppo.studies.bias.run import DIVERGENCE, RunBias, lines_of
from fppo.studies.bias.study import BiasTable, Typical, WorldSizes, typical

SIZES = WorldSizes(vocabulary=2, horizon=2, worlds=1)
CUT = partial(losses.ppo_clip, clip_low=0.01, clip_high=0.01)
CORRECT = partial(losses.rollout_correction, level="token", threshold=1.05)


def own_worlds(lag=0.0, *, scores=True):
    worlds = [SIZES.world(seed, prompts=2, lag=lag) for seed in range(SIZES.worlds)]
    return worlds if scores else [attrs.evolve(x, scores=torch.zeros_like(x.scores)) for x in worlds]


STEPS = {
    "mode": StepMath(estimator=advantages.grpo, mode="token-mean", n=3),
    "loss": StepMath(estimator=advantages.rloo, loss_fn=CUT, old_log_probs="engine"),
    "correction": StepMath(estimator=advantages.rloo, correct=CORRECT, mode="seq-mean-token-mean"),
    "exact": StepMath(estimator=advantages.rloo),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_score_is_that_of_the_whole_step_and_of_each_part_alone(name):
    step, lag = STEPS[name], 0.0 if name in ("mode", "exact") else 0.3
    found = lines_of(RunBias(step=attrs.evolve(step, kl=KL("k1", 0.1)), sizes=SIZES, lag=lag, whitens=name == "mode"))
    worlds = own_worlds(lag)
    whole = typical(step, worlds)
    assert found.numbers["score"] == attrs.asdict(whole)
    plain = StepMath(estimator=advantages.rloo, n=step.n)
    ratios = {"loss_fn": step.loss_fn, "old_log_probs": step.old_log_probs, "correct": step.correct}
    alone = {
        "the estimator": typical(attrs.evolve(plain, estimator=step.estimator), worlds).turned,
        "the weight mode": typical(attrs.evolve(plain, mode=step.mode), worlds).turned,
        "the loss and its ratios": typical(attrs.evolve(plain, **ratios), worlds).turned,
    }
    assert found.numbers["turned_alone"] == alone
    first = found.lines[0]
    assert first.endswith(
        f"; {whole.scale:.3g} of its size, noise {whole.noise:.3g} "
        f"(in groups of {step.n}, mode {step.mode}, {step.estimator.__name__}{', not whitened' * (name == 'mode')})"
    )
    for part, turned in alone.items():
        assert (f"{part} alone by {100 * turned:.2g} %" in first) == (turned > 0.005)
    assert ("its direction, exactly" in first) == (name == "exact") == (whole.turned < 1e-9)
    assert (f"turned by {100 * whole.turned:.2g} % from it" in first) == (name != "exact")
    assert found.numbers["critic"] is None
    assert found.lines[2] == "critic: none"


@pytest.mark.parametrize(
    ("kind", "where", "of", "mode", "n"),
    [
        ("k1", "reward", "sequence", "token-mean", 3),
        ("k3", "loss", "reverse", "seq-mean-token-sum", 2),
        ("k2", "loss", "token", "token-mean", 2),
        ("abs", "loss", "variation", "seq-mean-token-mean", 2),
    ],
)
def test_a_kl_term_has_the_gradient_of_the_divergence_that_is_named(kind, where, of, mode, n):
    """By itself; under the run's mode it is turned, and as large as its coefficient says."""
    kl = KL(kind, 0.25, where=where)
    step = StepMath(estimator=advantages.rloo, mode=mode, n=n, kl=kl, loss_fn=losses.gspo)
    found = lines_of(RunBias(step=step, sizes=SIZES))
    read = advantages.rloo if where == "reward" else study.reinforce
    own = StepMath(estimator=read, mode=mode, n=n, kl=attrs.evolve(kl, of=of))
    expected = typical(own, own_worlds(scores=False))
    assert found.numbers["kl"] == {"gradient_of": of, **attrs.asdict(expected)}
    turned = "0" if expected.turned < 1e-9 else f"{100 * expected.turned:.2g} %"
    assert found.lines[1] == (
        f"KL: 0.25 * {kind} in the {where}, the gradient of {DIVERGENCE[of]}; "
        f"with the estimator and weight mode of this run turned by {turned}, {expected.scale:.3g} of its size"
    )


def test_a_run_without_a_gradient_says_so():
    step = StepMath(estimator=advantages.rloo, kl=KL("k1", 0.5, where="loss"))
    found = lines_of(RunBias(step=step, sizes=SIZES))
    assert found.numbers["kl"] == {"gradient_of": "none"}
    assert found.lines[1] == "KL: k1 in the loss has no gradient"

    def nothing(scores, mask, groups):
        return 0.0 * advantages.rloo(scores, mask, groups).advantages

    found = lines_of(RunBias(step=attrs.evolve(step, estimator=nothing, kl=None), sizes=SIZES))
    assert found.numbers == {"score": None, "turned_alone": {}, "kl": None, "critic": None}
    assert [line.partition(" (")[0] for line in found.lines] == [
        *("score: nothing is learned from it", "KL: none", "critic: none")
    ]


@pytest.mark.slow
def test_errors_of_a_critic_are_those_of_the_runs_own_estimator():
    gae = partial(advantages.gae, lam=0.5)
    step = StepMath(estimator=gae, mode="token-mean", kl=KL("k1", 0.1))
    found = lines_of(RunBias(step=step, sizes=SIZES))
    expected = {
        f"{error:g}": typical(
            StepMath(estimator=gae), [SIZES.world(seed, critic_error=error) for seed in range(SIZES.worlds)]
        ).turned
        for error in (0.1, 0.3, 1.0)
    }
    assert found.numbers["critic"] == expected
    each = ", ".join(f"{100 * x:.2g} % at {error}" for error, x in expected.items())
    assert found.lines[2].startswith(f"critic: errors of its values turn the gradient by {each} (")


@pytest.mark.parametrize(("gamma", "of"), [(0.0, "token"), (1.0, "sequence"), (0.5, "none")])
def test_a_teacher_is_the_worlds_reference(gamma, of):
    fn = partial(advantages.reverse_kl, gamma=gamma)
    step = StepMath(estimator=fn, mode="token-mean")
    found = lines_of(RunBias(step=step, sizes=SIZES))
    worlds = own_worlds(scores=False)
    goal = "sequence" if of == "none" else of
    numbers = [
        (step_bias(StepMath(estimator=fn, mode=mode), x), x.gradient(1.0, goal))
        for mode in ("seq-mean-token-sum", "token-mean")
        for x in worlds
    ]
    each = [compared(x.mean, g, x.deviation) for x, g in numbers]
    alone, whole = study.medians(each[:1]), study.medians(each[1:])
    assert found.numbers["teacher"] == {"gradient_of": of, "scale": alone.scale, "turned": whole.turned}
    words = DIVERGENCE.get(of, "no divergence").replace("reference", "teacher")
    assert found.lines[3] == (
        f"teacher: the gradient of {words}, {alone.scale:.3g} of its size; with the loss and weight mode of this run "
        f"turned by {100 * whole.turned:.2g} %"
    )
    assert found.lines[0].startswith("score: nothing is learned from it (")  # the score is no part of it


TABLE = BiasTable(
    name="t",
    title="A title",
    about="How.",
    heads=("turned, n 2", "size, n 2", "turned, n 4", "kind"),
    rows=(("one", (0.25, -1.0, 1e-12, "k1")), ("two", (12.0, 12345.678, math.inf, "none"))),
)


def test_a_table_has_one_form_for_each_kind_of_number():
    assert [text.cell("turned", x) for x in (0.1234, 9.99, 10.0, 1e-10, math.inf, "no gradient")] == [
        *("12.3 %", "999.0 %", "1,000 %", "0", "-", "no gradient")
    ]
    assert [text.cell("size", x) for x in (0.12345, -0.00001, 9.9994, 10.0, 12345.67)] == [
        *("0.123", "0.000", "9.999", "10.0", "12,345.7")
    ]
    assert text.plain(TABLE) == {
        "name": "t",
        "title": "A title",
        "about": "How.",
        "rows": [
            {"label": "one", "turned, n 2": 0.25, "size, n 2": -1.0, "turned, n 4": 1e-12, "kind": "k1"},
            {"label": "two", "turned, n 2": 12.0, "size, n 2": 12345.678, "turned, n 4": None, "kind": "none"},
        ],
    }
    assert text.markdown([TABLE]).splitlines() == [
        *("### A title", "", "How.", ""),
        "|  | turned, n 2 | size, n 2 | turned, n 4 | kind |",
        "| --- | --- | --- | --- | --- |",
        "| one | 25.0 % | -1.000 | 0 | k1 |",
        "| two | 1,200 % | 12,345.7 | - | none |",
    ]
    shown = text.terminal([TABLE], 100)
    assert shown.index("How.") < shown.index("A title") < shown.index("1,200 %") < shown.index("Medians over worlds.")


def drawn(table, monkeypatch, tmp_path):
    """The bars of a picture by the labels of their rows, their widths and texts, and its axis."""
    kept = []
    real = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **named: kept.append((figure, args, named)))
    chart.save([table, TABLE], tmp_path / "new" / "x.png")
    ((figure, args, named),) = kept
    assert args == (tmp_path / "new" / "x.png",)
    real(figure, *args, **named)
    assert (tmp_path / "new" / "x.png").stat().st_size > 1000
    return figure.axes[0]


def test_a_picture_has_a_bar_for_each_number_about_direction(tmp_path, monkeypatch):
    ax = drawn(TABLE, monkeypatch, tmp_path)
    bars = [(bar.get_width(), round(bar.get_y() + bar.get_height() / 2, 6)) for bar in ax.patches]
    assert bars == [(25.0, -0.2), (1200.0, 0.8), (1e-10, 0.2), (0.0, 1.2)]  # what is not finite has none
    assert [x.get_text() for x in ax.texts] == [" 25.0 %", " 1,200 %", " 0", " -"]
    assert [x.get_text() for x in ax.get_yticklabels()] == ["one", "two"]
    assert [x.get_text() for x in ax.get_legend().get_texts()] == ["turned, n 2", "turned, n 4"]
    assert ax.get_xlim()[1] == pytest.approx(1.12 * 1200)
    assert ax.get_ylim() == (1.6, -0.6)
    assert (ax.get_title("left"), ax.get_xlabel()) == ("A title", "per cent across the objective's gradient")


def test_a_picture_of_values_has_all_numbers(tmp_path, monkeypatch):
    table = attrs.evolve(TABLE, heads=("a",), rows=(("one", (-0.5,)), ("two", (0.25,))))
    ax = drawn(table, monkeypatch, tmp_path)
    assert [bar.get_width() for bar in ax.patches] == [-0.5, 0.25]
    assert ([x.get_text() for x in ax.texts], ax.get_legend()) == ([" -0.500", " 0.250"], None)
    assert [x.get_position()[0] for x in ax.texts] == [0.0, 0.25]
    assert ax.get_xlabel() == "value less the mean return"
    with pytest.raises(ValueError, match="no tables to draw"):
        chart.save([], tmp_path / "none.png")


def test_medians_are_over_worlds():
    worlds = [WorldSizes(vocabulary=2, horizon=2).world(seed) for seed in range(3)]
    each = [step_bias(STEPS["mode"], own) for own in worlds]
    each = [attrs.evolve(x, scale=scale) for x, scale in zip(each, (3.0, 1.0, 2.0), strict=True)]
    found = study.medians(each)
    assert found == Typical(turned=sorted(x.turned for x in each)[1], scale=2.0, noise=sorted(x.noise for x in each)[1])


def test_a_number_below_nothing_is_shown_as_itself():
    assert [text.cell("size", x) for x in (-0.5, -12.0, -1e-10, -math.inf)] == ["-0.500", "-12.0", "0", "-"]
    assert text.cell("turned", -0.25) == "-25.0 %"
