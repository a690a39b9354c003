"""Three lines on what one run optimises: its policy gradient, its KL, and its critic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from fppo import advantages
from fppo.advantages.columns import OfRows, name_of, reads
from fppo.laws.expectation import StepMath, compared, step_bias
from fppo.laws.worlds import DIVERGENCES, Divergence, SmallWorld
from fppo.studies.bias.study import EXACT, Typical, WorldSizes, medians, nearest, reinforce, typical

SMALL = 0.005  # direction errors below this are not named
DIVERGENCE = {
    "sequence": "KL(policy || reference) of whole responses",
    "token": "KL(policy || reference) of each token",
    "reverse": "KL(reference || policy) of each token",
    "variation": "twice the total variation of each token",
}


@attrs.frozen(kw_only=True)
class RunBias:
    """A run's step without whitening, the sizes of the worlds, and how far the engine lags behind the policy.

    Over many rows whitening multiplies the gradient by a factor; over the few rows of a world's batch it would turn it.
    """

    step: StepMath
    sizes: WorldSizes
    lag: float = 0.0
    whitens: bool = False


@attrs.frozen(kw_only=True)
class RunReport:
    """Lines for a terminal, and their numbers for JSON."""

    lines: tuple[str, ...]
    numbers: dict[str, Any]


def lines_of(run: RunBias) -> RunReport:
    """Describe what a run optimises in three lines (score, KL and critic), measured in small worlds of two prompts with
    scores of 0 and 1. A run with a teacher has a fourth line; the world's reference stands for the teacher."""
    step, sizes = run.step, run.sizes
    worlds = [sizes.world(seed, prompts=2, lag=run.lag) for seed in range(sizes.worlds)]
    taught = reads(step.estimator, "teacher_log_probs")
    score, first = _score(step, [attrs.evolve(x, ref_logits=x.logits) for x in worlds] if taught else worlds)
    kl, second = _kl(step, worlds)
    critic, third = _critic(step, sizes)
    about = f"in groups of {step.n}, mode {step.mode}, {name_of(_plain(step))}{', not whitened' * run.whitens}"
    numbers, lines = {**score, "kl": kl, "critic": critic}, (f"{first} ({about})", second, third)
    if taught:
        numbers["teacher"], fourth = _teacher(step, worlds)
        lines = (*lines, fourth)
    return RunReport(lines=lines, numbers=numbers)


def _score(step: StepMath, worlds: Sequence[SmallWorld]) -> tuple[dict[str, Any], str]:
    """Numbers and a line of text on how far a run's gradient, without KL, is from the gradient of the expected score,
    and which parts of the step cause the difference."""
    whole = typical(attrs.evolve(step, kl=None), worlds)
    if whole.still:
        return {"score": None, "turned_alone": {}}, "score: nothing is learned from it"
    parts = {name: typical(part, worlds).turned for name, part in _parts(step).items()}
    causes = [f"{name} alone by {_percent(x)}" for name, x in parts.items() if x > SMALL]
    far = f"turned by {_percent(whole.turned)} from it" + (f" ({', '.join(causes)})" if causes else "")
    exact = "its direction, exactly" if whole.turned < EXACT else far
    size = f"{whole.scale:.3g} of its size, noise {whole.noise:.3g}"
    return {"score": attrs.asdict(whole), "turned_alone": parts}, (
        f"score: the gradient of the expected score, {exact}; {size}"
    )


def _teacher(step: StepMath, worlds: Sequence[SmallWorld]) -> tuple[dict[str, Any], str]:
    """Numbers and a line of text on distillation: the divergence from the teacher whose gradient the run's estimator
    has, and how far the run's loss and weight mode turn that gradient."""
    still = [attrs.evolve(x, scores=torch.zeros_like(x.scores)) for x in worlds]
    of, alone = nearest([step_bias(StepMath(estimator=step.estimator), x) for x in still], still, 1.0)
    if alone.still:
        return {"gradient_of": "none"}, "teacher: nothing is learned from it"
    words = DIVERGENCE.get(of, "no divergence").replace("reference", "teacher")
    found = _against(attrs.evolve(step, kl=None), still, of)
    numbers = {"gradient_of": of, "scale": alone.scale, "turned": found.turned}
    return numbers, (
        f"teacher: the gradient of {words}, {alone.scale:.3g} of its size; with the loss and weight mode of this run "
        f"turned by {_percent(found.turned)}"
    )


def _against(step: StepMath, worlds: Sequence[SmallWorld], of: str) -> Typical:
    """The bias of a step against the gradient of the divergence `of`; for "none", against that of "sequence"."""
    known: dict[str, Divergence] = {x: x for x in DIVERGENCES}
    goal = known.get(of, "sequence")
    found = [step_bias(step, x) for x in worlds]
    return medians(
        [compared(x.mean, own.gradient(1.0, goal), x.deviation) for x, own in zip(found, worlds, strict=True)]
    )


def _parts(step: StepMath) -> dict[str, StepMath]:
    """Each part of a step by itself, the other parts replaced by ones without bias."""
    right = StepMath(estimator=advantages.rloo, n=step.n)
    loss = {"loss_fn": step.loss_fn, "old_log_probs": step.old_log_probs, "correct": step.correct}
    return {
        "the estimator": attrs.evolve(right, estimator=step.estimator),
        "the weight mode": attrs.evolve(right, mode=step.mode),
        "the loss and its ratios": attrs.evolve(right, **loss),
    }


def _plain(step: StepMath) -> Any:
    return step.estimator.fn if isinstance(step.estimator, OfRows) else step.estimator


def _percent(x: float) -> str:
    return "0" if x < EXACT else f"{100 * x:.2g} %"


def _kl(step: StepMath, worlds: Sequence[SmallWorld]) -> tuple[dict[str, Any] | None, str]:
    """Numbers and a line of text on a run's KL term: the divergence whose gradient it has, and how far the run's
    estimator and weight mode turn that gradient."""
    if step.kl is None:
        return None, "KL: none"
    still = [attrs.evolve(x, scores=torch.zeros_like(x.scores)) for x in worlds]
    plain = StepMath(estimator=reinforce, kl=step.kl)
    of, _ = nearest([step_bias(plain, x) for x in still], still, step.kl.coef)
    against = attrs.evolve(step.kl, of=of) if of in DIVERGENCE else step.kl
    own = StepMath(estimator=step.estimator if step.kl.where == "reward" else reinforce, mode=step.mode, n=step.n)
    found = typical(attrs.evolve(own, kl=against), still)
    if found.still:
        return {"gradient_of": "none"}, f"KL: {step.kl.kind} in the {step.kl.where} has no gradient"
    words, turned = DIVERGENCE.get(of, "no divergence"), _percent(found.turned)
    numbers = {"gradient_of": of, **attrs.asdict(found)}
    return numbers, (
        f"KL: {step.kl.coef:g} * {step.kl.kind} in the {step.kl.where}, the gradient of {words}; "
        f"with the estimator and weight mode of this run turned by {turned}, "
        f"{found.scale:.3g} of its size"
    )


def _critic(step: StepMath, sizes: WorldSizes) -> tuple[dict[str, float] | None, str]:
    """Numbers and a line of text on a critic: the direction error of the gradient that errors in its values cause, if
    the estimator reads values."""
    if not reads(step.estimator, "values"):
        return None, "critic: none"
    own, turned = StepMath(estimator=step.estimator), dict[str, float]()
    for error in (0.1, 0.3, 1.0):
        worlds = [sizes.world(seed, critic_error=error) for seed in range(sizes.worlds)]
        turned[f"{error:g}"] = typical(own, worlds).turned
    each = ", ".join(f"{_percent(x)} at {error}" for error, x in turned.items())
    return turned, f"critic: errors of its values turn the gradient by {each} (their deviation, scores being 0 or 1)"
