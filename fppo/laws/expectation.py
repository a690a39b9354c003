"""Laws in expectation: the exact mean and noise of a step's gradient, over all batches that it can draw.

The library's own functions run on every batch of a small world at once: `advantages.experience.estimate`, the policy's
objective with its loss, KL term and correction, and `losses.loss_weights`. The mean of their gradients is compared with
autograd's gradient of the objective, sum over responses of probability * (score - coef * divergence).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs
import torch
from torch import Tensor

from fppo import losses
from fppo.laws._search import LawViolation, fn_name
from fppo.laws.worlds import DIVERGENCES, OUTSIDE, Batches, Divergence, SmallWorld, all_batches
from fppo.laws.worlds import worlds as small_worlds
from fppo.losses import KLState, Totals

if TYPE_CHECKING:  # an update's objective imports transformers, which the other laws do not need
    from fppo.batch import Annotated, Experience

EXACT = 1e-9
PROBES = 12  # number of batches that are tried to find out whether an estimator compares rows of different batches
ZERO = 1e-12
SCORE = "score"  # the name of a world's single score


@attrs.frozen
class KL:
    """A KL estimate of a step: its kind and coefficient, `where` it is used, and `of`, the divergence whose gradient it
    should have.

    Raises ValueError for another place than "reward" or "loss", another kind, and an unknown divergence.
    """

    kind: str = attrs.field(default="k1", validator=attrs.validators.in_(losses.KL_KINDS))
    coef: float = 0.5
    where: Literal["reward", "loss"] = attrs.field(default="reward", validator=attrs.validators.in_(("reward", "loss")))
    of: Divergence = attrs.field(default="sequence", validator=attrs.validators.in_(DIVERGENCES))


@attrs.frozen(kw_only=True)
class StepMath:
    """The functions that turn a batch's scores into a gradient, everything in a step but the model, with `bias`'s
    arguments as fields."""

    estimator: Callable[..., Any]
    loss_fn: Callable[..., Any] = losses.ppo_clip
    mode: str = "seq-mean-token-sum"
    n: int = 2
    kl: KL | None = None
    correct: Callable[..., Any] | None = None
    old_log_probs: Literal["pass", "engine"] = "pass"
    whiten: bool = False


@attrs.frozen(kw_only=True, eq=False)
class Bias:
    """The mean gradient of a step, compared with the gradient g of -objective, which is minimised; and its noise."""

    cosine: float
    """The cosine between the mean and g; nan where one of them is 0."""
    scale: float
    """<mean, g> / <g, g>: a factor that a learning rate can compensate."""
    turned: float
    """|mean - scale g| / |scale g|: an error that no learning rate compensates."""
    deviation: float
    """The standard deviation of a batch's gradient."""
    noise: float
    """The standard deviation of a batch's gradient over |mean|; inf where the mean is 0."""
    mean: Tensor = attrs.field(repr=False)
    """The mean gradient by all logits of the world, flat, float64."""
    gradient: Tensor = attrs.field(repr=False)
    """g, likewise."""

    @property
    def error(self) -> float:
        """|mean - g| over |g|, or over 1 where g is 0."""
        size = self.gradient.norm()
        return float((self.mean - self.gradient).norm() / (size if size > ZERO else 1.0))


def bias(
    estimator: Callable[..., Any],
    *,
    world: SmallWorld,
    loss_fn: Callable[..., Any] = losses.ppo_clip,
    mode: str = "seq-mean-token-sum",
    n: int = 2,
    kl: KL | None = None,
    correct: Callable[..., Any] | None = None,
    old_log_probs: Literal["pass", "engine"] = "pass",
    whiten: bool = False,
) -> Bias:
    """Measure how far a step's mean gradient is from the objective's, exactly: `laws.bias(rloo, world=laws.world())`.

    `estimator` is as in a run (its parameters are columns, `advantages.columns`), `loss_fn` a policy loss with its
    scalars bound, `mode` a weight mode (the horizon is the world's), `n` the rows of each group. `correct` weighs the
    sampling policy as in `Estimate`. The old log-probs are those of a "pass" of the policy, so that every ratio is 1,
    or those of the "engine", the sampling policy. `whiten` gives a batch's advantages mean 0 and variance 1.
    Raises ValueError for a loss that selects tokens by noise (`SelectiveLoss`).
    """
    math = StepMath(
        estimator=estimator,
        loss_fn=loss_fn,
        mode=mode,
        n=n,
        kl=kl,
        correct=correct,
        old_log_probs=old_log_probs,
        whiten=whiten,
    )
    return step_bias(math, world)


def check_gradient(
    estimator: Callable[..., Any],
    *,
    loss_fn: Callable[..., Any] = losses.ppo_clip,
    mode: str = "seq-mean-token-sum",
    n: int = 2,
    kl: KL | None = None,
    correct: Callable[..., Any] | None = None,
    old_log_probs: Literal["pass", "engine"] = "pass",
    up_to: Literal["nothing", "scale"] = "nothing",
    worlds: Sequence[SmallWorld] | None = None,
) -> None:
    """Check a step's gradient by the law of its expectation: `laws.check_gradient(my_estimator, n=3)`.

    The arguments are those of `bias`. On every world the mean gradient over all batches must be the objective's, to
    1e-9 of its size; `up_to="scale"` allows a positive factor. With `n` rows in a group this takes a second or two.

    By default `worlds` are `laws.worlds()`, smallest first; their sampling policy lags if there is a correction or the
    old log-probs are the engine's. An estimator that is right for scores of 0 and 1 alone, as GRPO's standard deviation
    is, takes `worlds=laws.worlds(binary=True)`. Raises LawViolation with the smallest world on which the law does not
    hold, and ValueError as `bias`.
    """
    if up_to not in ("nothing", "scale"):
        raise ValueError(f'up_to must be "nothing" or "scale", got {up_to!r}')
    math = StepMath(
        estimator=estimator, loss_fn=loss_fn, mode=mode, n=n, kl=kl, correct=correct, old_log_probs=old_log_probs
    )
    _check_loss(loss_fn)
    lagging = correct is not None or old_log_probs == "engine"
    for world in small_worlds(lag=0.5 if lagging else 0.0) if worlds is None else worlds:
        try:
            reason = _breach(math, world, up_to)
        except Exception as error:
            reason = f"it raised {type(error).__name__}: {error}"
        if reason is not None:
            raise _violation(math, world, up_to, reason)


def _breach(math: StepMath, world: SmallWorld, up_to: str) -> str | None:
    """Describe how the mean gradient of a step (`math`) on a world differs from the objective's gradient; None if it
    does not. `up_to` "scale" permits a positive factor."""
    batches = all_batches(world, math.n)
    found = step_bias(math, world, batches)
    still = float(found.gradient.norm()) <= ZERO
    wrong = found.error if up_to == "nothing" or still else found.turned if found.scale > 0 else torch.inf
    if wrong <= EXACT:
        return None
    apart = found.mean - found.gradient * (1.0 if up_to == "nothing" else found.scale)
    place = int(apart.abs().argmax())
    prompt, at, token = (int(x) for x in torch.unravel_index(torch.tensor(place), world.logits.shape))
    numbers = f"is {float(found.mean[place]):.6g}, the objective's {float(found.gradient[place]):.6g}"
    return (
        f"the mean over {batches.count} batches has a cosine of {found.cosine:.6f} with the objective's gradient and "
        f"{found.scale:.6g} of its size;\n  by the logit of token {token} at place {at} of prompt {prompt} it {numbers}"
    )


def _violation(math: StepMath, world: SmallWorld, up_to: str, reason: str) -> LawViolation:
    """The violation by a step on a world, with lines of Python that show it and the rows of its likeliest batch."""
    name, tail = fn_name(math.estimator), " up to a positive factor" if up_to == "scale" else ""
    defaults = {field.name: field.default for field in attrs.fields(StepMath)}
    given = {key: x for key, x in attrs.asdict(math, recurse=False).items() if x is not defaults[key]}
    words = [f"{key}={_written(x)}" for key, x in given.items() if key != "estimator"]
    prompts, responses = world.scores.shape
    lines = [
        f'{name} breaks the law "expectation": over all batches the mean gradient is the objective\'s{tail}.',
        f"  {reason}",
        *(['  If that is meant: give up_to="scale".'] if up_to == "nothing" else []),
        f"  The smallest counter-example, {prompts} x {responses} responses, as it was used:",
        "    from fppo import laws",
        f"    world = {world.made}",
        f"    print(laws.bias({', '.join([name, 'world=world', *words])}))",
    ]
    with contextlib.suppress(Exception):  # if the function raises on this batch, its rows have no advantages
        lines += ["  Its likeliest batch of several responses, and what they get:", *_likeliest(math, world)]
    tensors = {"tokens": world.tokens, "mask": world.mask, "scores": world.scores, "logits": world.logits}
    return LawViolation("\n".join(lines), "expectation", tensors)


def _written(x: Any) -> str:
    return f"laws.{x!r}" if isinstance(x, KL) else fn_name(x) if callable(x) else repr(x)


def _likeliest(math: StepMath, world: SmallWorld) -> list[str]:
    """Describe the likeliest batch of several responses: a line for each row, with its tokens, score and advantages."""
    batches = all_batches(world, math.n)
    rows = batches.responses.view(batches.count, -1)
    number = int(batches.chances.where((rows != rows[:, :1]).any(1), -1.0).argmax())
    own = (batches.numbers == number).nonzero().flatten()
    experience = _estimated(math, world, batches, own)
    lines: list[str] = []
    for i, row in enumerate(own.tolist()):
        p, s, kept = int(batches.prompts[row]), int(batches.responses[row]), experience.response_mask[i]
        numbers = [float(f"{x:.4g}") for x in experience.advantages[i][kept].tolist()]
        tokens, score = world.tokens[s][world.mask[s]].tolist(), float(world.scores[p, s])
        lines.append(f"    prompt {p}, tokens {tokens}, score {score:.4g}, advantages {numbers}")
    return lines


def step_bias(math: StepMath, world: SmallWorld, batches: Batches | None = None) -> Bias:
    """Measure the `bias` of a step's functions (`math`) on a world, over all `batches` that it can draw."""
    _check_loss(math.loss_fn)
    batches = all_batches(world, math.n) if batches is None else batches
    experience = _experience(math, world, batches)
    weights = _weights(experience.response_mask, batches, math.mode, world.horizon)
    by_log_prob = _objective_slope(math, world, batches, experience, weights)
    slopes = world.slopes()[batches.prompts, batches.responses]
    by_row = torch.einsum("rt,rtk->rk", by_log_prob, slopes)
    each = by_row.new_zeros(batches.count, by_row.shape[1]).index_add(0, batches.numbers, by_row)
    mean = (batches.chances[:, None] * each).sum(0)
    variance = (batches.chances * (each - mean).square().sum(1)).sum()
    gradient = world.gradient() if math.kl is None else world.gradient(math.kl.coef, math.kl.of)
    return compared(mean, gradient, float(variance.sqrt()))


def compared(mean: Tensor, gradient: Tensor, deviation: float) -> Bias:
    """Compare a mean gradient with the objective's, both flat; `deviation` is the standard deviation of one batch's."""
    size, wanted = float(mean.norm()), float(gradient.norm())
    product = float(mean @ gradient)
    scale = product / wanted**2 if wanted > ZERO else 0.0
    along = abs(scale) * wanted
    return Bias(
        cosine=product / (size * wanted) if min(size, wanted) > ZERO else torch.nan,
        scale=scale,
        turned=float((mean - scale * gradient).norm()) / along if along > ZERO else torch.inf if size > ZERO else 0.0,
        deviation=deviation,
        noise=deviation / size if size > ZERO else torch.inf,
        mean=mean,
        gradient=gradient,
    )


def _check_loss(loss_fn: Any) -> None:
    if hasattr(loss_fn, "select_fn"):
        raise ValueError(
            f"{fn_name(loss_fn.loss_fn)} selects tokens by noise, which has no list of all batches: give a loss of "
            "(log_probs, old_log_probs, advantages, mask)"
        )


def _experience(math: StepMath, world: SmallWorld, batches: Batches) -> Experience:
    """All batches of a world with the advantages that `math` gives. They come from one call of the estimator, or from
    one call for each batch if it compares rows of different batches."""
    from fppo.batch import concat, rows

    every = torch.arange(len(batches.numbers))
    whole = _estimated(math, world, batches, every)
    own = batches.numbers.argsort(stable=True).view(batches.count, -1)
    for number in torch.linspace(0, batches.count - 1, PROBES).long().unique().tolist():
        alone, within = _estimated(math, world, batches, own[number]), rows(whole, own[number])
        if not all(map(_same, _read(alone), _read(within))):
            return concat([_estimated(math, world, batches, own[i]) for i in range(batches.count)])
    return whole


def _read(rows: Experience) -> tuple[Tensor | None, ...]:
    return rows.advantages, rows.response_mask, rows.correction_weights


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return (a is None and b is None) or (
        a is not None and b is not None and torch.allclose(a.double(), b.double(), rtol=1e-10, atol=1e-12)
    )


def _estimated(math: StepMath, world: SmallWorld, batches: Batches, index: Tensor) -> Experience:
    """The rows at `index`, with the advantages that a step computes for them together."""
    from fppo.advantages.experience import estimate

    kl = math.kl
    in_reward = kl is not None and kl.where == "reward"
    return estimate(
        _annotated(math, world, batches, index),
        KLState(coef=kl.coef if kl is not None and in_reward else 0.0),
        advantage_fn=math.estimator,
        kl_in_reward=in_reward,
        kl_kind=kl.kind if kl is not None else "k1",
        correct=math.correct,
        whiten=math.whiten,
    )[0]


def _annotated(math: StepMath, world: SmallWorld, batches: Batches, index: Tensor) -> Annotated:
    """The rows at `index` with all columns from models; values outside the mask are invalid on purpose."""
    from fppo.batch import Annotated, Column

    p, s, n = batches.prompts[index], batches.responses[index], len(index)
    mask, none = world.mask[s], Column([None] * n)
    coef = math.kl.coef if math.kl is not None and math.kl.where == "reward" else 0.0

    def at(x: Tensor) -> Tensor:
        return x[p, s].where(mask, OUTSIDE)

    policy, ref, sampled = (at(world.log_probs(x)) for x in (world.logits, world.ref_logits, world.sampler_logits))
    scores = world.scores[p, s]
    inside = (mask * torch.arange(1, mask.shape[1] + 1)).amax(1, keepdim=True) > torch.arange(mask.shape[1])
    return Annotated(
        tokens=torch.cat([torch.ones(n, 1, dtype=torch.int64), world.tokens[s]], 1),
        attention_mask=torch.cat([torch.ones(n, 1, dtype=torch.bool), inside], 1),
        response_mask=mask,
        rollout_log_probs=sampled,
        sampling_log_probs=sampled,
        row_ids=torch.arange(n),
        groups=batches.numbers[index] * len(world.logits) + p,
        versions=torch.zeros(n, dtype=torch.int64),
        finish=Column(["stop"] * n),
        ids=none,
        ground_truth=none,
        source=none,
        extras=none,
        scores=scores,
        named_scores={SCORE: scores},
        baselines=world.baselines()[p],
        teacher_log_probs=ref,  # one world has one other policy
        old_log_probs=policy if math.old_log_probs == "pass" else sampled,
        ref_log_probs=ref,
        values=at(world.values(coef)),
        sum_squared_probs=at(world.squares()),
    )


def _objective_slope(
    math: StepMath, world: SmallWorld, batches: Batches, experience: Experience, weights: Tensor
) -> Tensor:
    """The gradient of the library's objective, with the `weights` [R, W] of tokens in it, by the policy's log-prob of
    each token, [R, W]: each row holds its share of the gradient of its own batch."""
    from fppo.steps.actor import PolicyObjective, PolicyTerms
    from fppo.steps.outputs import TokenOutputs

    kl = math.kl
    policy = world.log_probs(world.logits)[batches.prompts, batches.responses]
    leaf = policy.where(experience.response_mask, OUTSIDE).requires_grad_()
    if kl is None or kl.where == "reward":
        terms, more = PolicyTerms(), 0.0
    elif kl.kind == "k1":  # refused in a run: its expected gradient is 0
        assert experience.ref_log_probs is not None
        term = losses.kl_estimate(leaf, experience.ref_log_probs, "k1", mask=experience.response_mask)
        terms, more = PolicyTerms(), kl.coef * (weights * term).sum()
    else:
        terms, more = PolicyTerms(kl_coef=kl.coef, kl_kind=kl.kind), 0.0
    outputs = TokenOutputs(log_probs=leaf, entropy=torch.zeros_like(leaf))
    loss, _ = PolicyObjective(loss_fn=math.loss_fn, terms=terms)(outputs, experience, weights)
    return torch.autograd.grad(loss + more, leaf)[0]


def _weights(mask: Tensor, batches: Batches, mode: str, horizon: int) -> Tensor:
    """Compute `losses.loss_weights` of every batch [R, W], in one call for all batches with equal totals."""
    counts = [mask.sum(1), mask.any(1)]
    totals = torch.stack(
        [torch.zeros(batches.count).double().index_add(0, batches.numbers, x.double()) for x in counts], 1
    )
    pairs, which = totals.unique(dim=0, return_inverse=True)
    result = mask.new_zeros(mask.shape, dtype=torch.float64)
    given = {"horizon": horizon} if mode == "seq-mean-token-sum-norm" else {}
    for number, (tokens, sequences) in enumerate(pairs):
        own = (which == number)[batches.numbers]
        weights = losses.loss_weights(mask, mode, totals=Totals(tokens, sequences), **given)
        result = torch.where(own[:, None], weights, result)
    return result
