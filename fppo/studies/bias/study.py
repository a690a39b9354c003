"""Tables of bias and noise: every estimator, weight mode, KL kind, loss, correction, critic and value loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from inspect import signature
from statistics import median
from typing import Any, Literal

import attrs
import torch

from fppo import advantages, losses
from fppo.advantages.columns import columns_of, name_of
from fppo.laws.expectation import KL, Bias, StepMath, compared, step_bias
from fppo.laws.fixed_points import fixed_point
from fppo.laws.worlds import DIVERGENCES, SmallWorld, world

EXACT = 1e-9
WIDE = (1e-6, 1e6)
PENALTY = 1.0
Number = float | str


def reinforce(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The reward to go of each token, without a baseline."""
    return advantages.discounted_returns(rewards, mask)


ESTIMATORS: Mapping[str, Callable[..., Any]] = {
    "no baseline": reinforce,
    "rloo": advantages.rloo,
    "grpo": advantages.grpo,
    "grpo, scale none": partial(advantages.grpo, scale="none"),
    "maxrl": advantages.maxrl,
    "opo": advantages.opo,
    "opo, leave_one_out": partial(advantages.opo, leave_one_out=True),
    "optimal_token_baseline": advantages.optimal_token_baseline,
    "optimal_token_baseline, leave_one_out": partial(advantages.optimal_token_baseline, leave_one_out=True),
    "gpg": advantages.gpg,
    "grpo_passk": advantages.grpo_passk,
    "lite_ppo": advantages.lite_ppo,
    "pkpo": advantages.pkpo,
    "qae": advantages.qae,
    "reinforce_plus_plus": advantages.reinforce_plus_plus,
    "reinforce_plus_plus_baseline": advantages.reinforce_plus_plus_baseline,
    "remax": advantages.remax,
    "gae, exact values": advantages.gae,
    "gae, exact values, lam 0": partial(advantages.gae, lam=0.0),
    "gae, lam_alpha 0.6": partial(advantages.gae, lam_alpha=0.6),
}
REFUSED = "refused"


@attrs.frozen(kw_only=True)
class WorldSizes:
    """Sizes of the worlds that medians are taken over, and the number of rows in a group."""

    vocabulary: int = 2
    horizon: int = 3
    worlds: int = 5
    groups: tuple[int, ...] = (2, 4, 8)

    def world(self, seed: int, **how: Any) -> SmallWorld:
        """A world of these sizes with scores of 0 and 1."""
        return world(vocabulary=self.vocabulary, horizon=self.horizon, seed=seed, binary=True, **how)


@attrs.frozen(kw_only=True)
class BiasTable:
    """Numbers in columns, one row for each label; `about` says how they were taken."""

    name: str
    title: str
    about: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Number, ...]], ...]


@attrs.frozen(kw_only=True)
class Typical:
    """Medians over worlds of the fields of `laws.Bias`: direction error, size and noise of a mean gradient."""

    turned: float
    scale: float
    noise: float

    @property
    def still(self) -> bool:
        """Whether the mean gradient is 0 in every world."""
        return math.isinf(self.noise)


def typical(math_of: StepMath, worlds: Sequence[SmallWorld]) -> Typical:
    """Measure a step's bias in each world, and take the medians."""
    return medians([step_bias(math_of, own) for own in worlds])


def medians(found: Sequence[Bias]) -> Typical:
    """The medians of biases, one bias per world."""
    return Typical(**{name: median(getattr(x, name) for x in found) for name in ("turned", "scale", "noise")})


def _cells(found: Typical, *, noise: bool = True) -> tuple[Number, ...]:
    if found.still:
        return ("no gradient", 0.0, *(("",) if noise else ()))
    return (found.turned, found.scale, *((found.noise,) if noise else ()))


def estimators(sizes: WorldSizes, own: Mapping[str, Callable[..., Any]]) -> BiasTable:
    """Bias of every estimator, for groups of several sizes, under a weight mode without bias."""
    rows = []
    worlds = [sizes.world(seed) for seed in range(sizes.worlds)]
    for name, fn in {**ESTIMATORS, **own}.items():
        cells: list[Number] = []
        for n in sizes.groups:
            cells += _cells(typical(StepMath(estimator=fn, n=n), worlds))
        rows.append((name, tuple(cells)))
    heads = tuple(f"{head}, n {n}" for n in sizes.groups for head in ("turned", "size", "noise"))
    about = "One prompt, groups of n rows, mode seq-mean-token-sum, scores of 0 and 1, old log-probs of a pass."
    return BiasTable(name="estimators", title="Estimators", about=about, heads=heads, rows=tuple(rows))


def modes(sizes: WorldSizes, own: Mapping[str, Callable[..., Any]]) -> BiasTable:
    """Measure the bias and noise of a step's gradient under every weight mode, for estimators with and without a
    baseline, over two prompts. `own` are the user's advantage estimators by name, measured too."""
    worlds = [sizes.world(seed, prompts=2) for seed in range(sizes.worlds)]
    chosen = {"no baseline": reinforce, "rloo": advantages.rloo, "grpo": advantages.grpo}
    chosen |= {"gae, exact values": advantages.gae, **own}
    rows = [
        (f"{name}, {mode}", _cells(typical(StepMath(estimator=fn, mode=mode), worlds)))
        for name, fn in chosen.items()
        for mode in losses.MODES
    ]
    about = "Two prompts, groups of 2. The horizon of seq-mean-token-sum-norm is the longest response."
    heads = ("turned", "size", "noise")
    return BiasTable(name="modes", title="Weight modes", about=about, heads=heads, rows=tuple(rows))


def kinds(sizes: WorldSizes, own: Mapping[str, Callable[..., Any]]) -> BiasTable:
    """Bias of each KL kind where the penalty is the only reward, and the divergence whose gradient the penalty has."""
    del own
    worlds = [sizes.world(seed) for seed in range(sizes.worlds)]
    worlds = [attrs.evolve(x, scores=torch.zeros_like(x.scores)) for x in worlds]
    rows = []
    places: Sequence[tuple[str, Callable[..., Any], Literal["reward", "loss"]]]
    places = (("reward", reinforce, "reward"), ("reward, rloo", advantages.rloo, "reward"), ("loss", reinforce, "loss"))
    for place, fn, where in places:
        for kind in losses.KL_KINDS if fn is reinforce else ("k1",):
            step = StepMath(estimator=fn, kl=KL(kind, PENALTY, where=where))
            each = [step_bias(step, own) for own in worlds]
            gradient_of, found = nearest(each, worlds, PENALTY)
            taken = kind in losses.REWARD_KINDS if where == "reward" else kind != "k1"
            rows.append((f"{kind} in the {place}", (gradient_of, *_cells(found), "" if taken else REFUSED)))
    for gamma in (0.0, 0.5, 1.0):
        step = StepMath(estimator=partial(advantages.reverse_kl, gamma=gamma, coef=PENALTY))
        gradient_of, found = nearest([step_bias(step, own) for own in worlds], worlds, PENALTY)
        rows.append((f"reverse_kl, gamma {gamma:g}", (gradient_of, *_cells(found), "")))
    about = (
        "No score, coefficient 1, groups of 2. `gradient of` is the divergence whose gradient the mean is: sequence, "
        "KL(policy || reference) of whole responses; token, that of each token alone; reverse, KL(reference || policy) "
        "of each token; variation, twice the total variation of each token. Where it is none's, turned and size are "
        "against sequence. Runs refuse what is no penalty. reverse_kl is the estimator of distillation, with the "
        "reference as the teacher."
    )
    heads = ("gradient of", "turned", "size", "noise", "in runs")
    return BiasTable(name="kl", title="KL kinds", about=about, heads=heads, rows=tuple(rows))


def nearest(each: Sequence[Bias], worlds: Sequence[SmallWorld], coef: float) -> tuple[str, Typical]:
    """The name of the divergence whose gradient equals the mean gradients `each`, or "none"; and their bias against it
    (for "none" against "sequence"). `coef` multiplies the divergence."""
    for of in (*DIVERGENCES, "sequence"):
        gradients = [own.gradient(coef, of) for own in worlds]
        found = medians([compared(x.mean, g, x.deviation) for x, g in zip(each, gradients, strict=True)])
        if not found.still and found.turned < EXACT and found.scale > 0:
            return of, found
    return "none", found


def policy_losses(sizes: WorldSizes, own: Mapping[str, Callable[..., Any]]) -> BiasTable:
    """Bias of policy losses on the policy's own rows, and on rows of a lagging policy with its ratios."""
    chosen = {**losses.POLICY_LOSSES, **own}
    lags = (0.0, 0.1, 0.5)
    worlds = {lag: [sizes.world(seed, lag=lag) for seed in range(sizes.worlds)] for lag in lags}
    rows = []
    for name, fn in chosen.items():
        cells: list[Number] = []
        for lag in lags:
            step = StepMath(estimator=advantages.rloo, loss_fn=fn, old_log_probs="engine")
            cells += _cells(typical(step, worlds[lag]), noise=False)
        rows.append((name, tuple(cells)))
    heads = tuple(f"{head}, lag {lag:g}" for lag in lags for head in ("turned", "size"))
    about = (
        "rloo in groups of 2, ratios against the policy that sampled, whose logits are the policy's plus lag * normal "
        "numbers; at lag 0 every ratio is 1."
    )
    return BiasTable(name="losses", title="Policy losses", about=about, heads=heads, rows=tuple(rows))


def corrections(sizes: WorldSizes, own: Mapping[str, Callable[..., Any]]) -> BiasTable:
    """Bias of off-policy corrections for a lagging sampler."""
    del own
    correct = losses.rollout_correction
    chosen = {
        "none": None,
        "token": partial(correct, level="token", threshold=WIDE),
        "token, at most 2": partial(correct, level="token", threshold=2.0),
        "token, 0.5 to 2": partial(correct, level="token", threshold=(0.5, 2.0)),
        "sequence": partial(correct, level="sequence", threshold=WIDE),
        "sequence, at most 2": partial(correct, level="sequence", threshold=2.0),
    }
    rows = []
    for label, fn in chosen.items():
        for name, estimator in (("no baseline", reinforce), ("rloo", advantages.rloo)):
            cells: list[Number] = []
            for lag in (0.1, 0.5):
                worlds = [sizes.world(seed, lag=lag) for seed in range(sizes.worlds)]
                cells += _cells(typical(StepMath(estimator=estimator, correct=fn), worlds))
            rows.append((f"{label}, {name}", tuple(cells)))
    heads = tuple(f"{head}, lag {lag}" for lag in (0.1, 0.5) for head in ("turned", "size", "noise"))
    about = "Groups of 2, old log-probs of a pass. Weights are training / sampling probability of tokens or sequences."
    return BiasTable(name="corrections", title="Off-policy corrections", about=about, heads=heads, rows=tuple(rows))


def critics(sizes: WorldSizes, own: Mapping[str, Callable[..., Any]]) -> BiasTable:
    """Bias of GAE under critics with errors, by its decay lam."""
    del own
    errors, rows = (0.0, 0.1, 0.3, 1.0), []
    for lam in (0.0, 0.5, 0.9, 0.95, 1.0):
        cells: list[Number] = []
        for error in errors:
            worlds = [sizes.world(seed, critic_error=error) for seed in range(sizes.worlds)]
            found = typical(StepMath(estimator=partial(advantages.gae, lam=lam)), worlds)
            cells += [found.turned, found.noise]
        rows.append((f"lam {lam:g}", tuple(cells)))
    heads = tuple(f"{head}, error {error:g}" for error in errors for head in ("turned", "noise"))
    about = "Groups of 2. The values are exact plus normal errors of this deviation, one for each place."
    return BiasTable(name="critics", title="GAE under a critic's errors", about=about, heads=heads, rows=tuple(rows))


RETURNS: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "1 with 0.05": ((0.0, 1.0), (0.95, 0.05)),
    "1 with 0.3": ((0.0, 1.0), (0.7, 0.3)),
    "1 with 0.9": ((0.0, 1.0), (0.1, 0.9)),
    "0, 0.1, 1": ((0.0, 0.1, 1.0), (0.5, 0.4, 0.1)),
}
HEADS: Mapping[str, losses.ValueHead] = {
    "mse": losses.mse_head(),
    "mse, clip none": losses.mse_head(clip=None),
    "huber": losses.huber_head(),
    "huber, delta 0.1": losses.huber_head(delta=0.1),
    "hl_gauss": losses.hl_gauss_head(),
    "two_hot": losses.two_hot_head(),
    "quantile": losses.quantile_head(),
    "quantile, delta 0.1": losses.quantile_head(delta=0.1),
}


def values(sizes: WorldSizes, own: Mapping[str, Callable[..., Any]]) -> BiasTable:
    """Bias of critic losses: the value that minimises the expected loss over random returns, minus their mean."""
    del sizes, own
    rows = []
    for name, head in HEADS.items():
        errors = []
        for returns, chances in RETURNS.values():
            mean = sum(x * p for x, p in zip(returns, chances, strict=True))
            errors.append(fixed_point(head, returns, chances) - mean)
        rows.append((name, tuple(errors)))
    about = "The value of least expected loss less the mean return: 1 with a chance, else 0; or one of three returns."
    return BiasTable(name="values", title="Value losses", about=about, heads=tuple(RETURNS), rows=tuple(rows))


TABLES: Mapping[str, Callable[[WorldSizes, Mapping[str, Callable[..., Any]]], BiasTable]] = {
    "estimators": estimators,
    "modes": modes,
    "kl": kinds,
    "losses": policy_losses,
    "corrections": corrections,
    "critics": critics,
    "values": values,
}


def is_loss(fn: Callable[..., Any]) -> bool:
    """Whether a function, by its parameters, is a policy loss (True) or an estimator. Raises ValueError for neither."""
    if "old_log_probs" in signature(fn).parameters:
        return True
    columns_of(fn)
    return False


def study(names: Sequence[str], sizes: WorldSizes, own: Mapping[str, Callable[..., Any]]) -> Iterator[BiasTable]:
    """Compute the tables of these names, one after the other; `own` estimators and losses are among their rows.

    Raises ValueError for a function of `own` that is neither.
    """
    fns: dict[bool, dict[str, Callable[..., Any]]] = {True: {}, False: {}}
    for name, fn in own.items():
        fns[is_loss(fn)][name or name_of(fn)] = fn
    for name in names:
        yield TABLES[name](sizes, fns[name == "losses"])
