"""Updates with every option at once, against one written out in plain torch: mini-batch by mini-batch, padded."""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import settings as draws
from hypothesis import strategies as st
from torch import Tensor

from fppo import batch as batches
from fppo import losses, metrics, tree
from fppo.batch import Column, Experience
from fppo.key import Key
from fppo.steps.actor import PolicyTerms, SelectiveLoss, UpdateActor, rollout_gap
from fppo.steps.critic import UpdateCritic
from fppo.steps.forward import Forward, forward_micro_batch
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import sgd
from fppo.steps.schedules import schedule
from fppo.steps.train_state import init_state
from tests import tiny

ACTOR, ACTOR_PARAMS = tiny.model_and_params("lm", layers=1)
CRITIC, CRITIC_PARAMS = tiny.model_and_params("value", seed=1, layers=1)
RATE, CLIP, MOMENTUM = schedule("linear", 0.2, total_steps=9, warmup_steps=2), 0.3, 0.8
OPTIMIZER = sgd(RATE, momentum=MOMENTUM, max_grad_norm=CLIP)
COV = SelectiveLoss(losses.clip_cov, partial(losses.select_clip_cov, ratio=0.3, low=-50.0, high=50.0))
LOSSES = {"ppo_clip": losses.ppo_clip, "gspo": partial(losses.gspo, clip_low=0.1, clip_high=0.2), "clip_cov": COV}
HORIZON = 9


@attrs.frozen
class How:
    """The options of an update."""

    seed: int
    rows: int
    key: int | None
    by_prompt: bool
    episodes: bool
    size: int
    epochs: int
    cut: MicroBatching
    packed: bool
    share: Any
    again: bool
    mode: str
    corrected: bool
    explored: bool
    donate: bool

    def loop(self) -> Loop:
        horizon = HORIZON if self.mode == "seq-mean-token-sum-norm" else None
        return Loop(
            mini_batch_size=self.size,
            micro_batching=self.cut,
            epochs=self.epochs,
            weight_mode=self.mode,
            horizon=horizon,
            by_prompt=self.by_prompt,
        )

    def forward(self, model: Any) -> Forward:
        share = self.share if self.packed else False
        return Forward(
            attrs.evolve(model, checkpoint_layers=self.again), remove_padding=self.packed, share_prompts=share
        )

    def batch(self) -> Experience:
        """Rows of which pairs share a prompt, some of several in an episode, with the columns of every option."""
        batch, g = tiny.experience(self.seed, self.rows), torch.Generator().manual_seed(self.seed)
        pairs, shape = torch.arange(self.rows) // 2 * 2, batch.response_mask.shape
        tokens, attention = batch.tokens.clone(), batch.attention_mask.clone()
        tokens[:, :5], attention[:, :5] = tokens[pairs, :5], attention[pairs, :5]
        more = {
            "row_ids": 7 + 3 * torch.randperm(self.rows, generator=g),
            "tokens": tokens,
            "attention_mask": attention,
        }
        more["groups"] = 40 - torch.arange(self.rows) // 2
        more["outcomes"] = torch.randn(self.rows, generator=g)
        if self.corrected:
            more["correction_weights"] = torch.rand(shape, generator=g, dtype=torch.float64)
        if self.explored:
            more["entropy_mask"] = torch.rand(shape, generator=g) < 0.6
        if self.episodes:
            more["episodes"] = 50 - torch.arange(self.rows) % max(self.rows - 1, 1)
            more["observed"] = Column([[] for _ in range(self.rows)])
        return attrs.evolve(batch, **more)


HOW = st.builds(
    How,
    seed=st.integers(0, 999),
    rows=st.integers(4, 6),
    key=st.sampled_from([3, 4, None]),
    by_prompt=st.booleans(),
    episodes=st.booleans(),
    size=st.sampled_from([2, 1, 3]),
    epochs=st.sampled_from([2, 1]),
    cut=st.sampled_from(
        [MicroBatching(size=1), MicroBatching(size=2), MicroBatching(token_budget=17), MicroBatching(size=9)]
    ),
    packed=st.sampled_from([True, True, False]),
    share=st.sampled_from([True, "auto", False]),
    again=st.booleans(),
    mode=st.sampled_from(losses.MODES),
    corrected=st.booleans(),
    explored=st.booleans(),
    donate=st.booleans(),
)


def mini_batches(batch: Experience, how: How, epoch: int) -> list[list[int]]:
    """The rows of each mini-batch: episodes in order, or drawn by the key, by themselves or by prompts."""
    items = [[row] for row in range(how.rows)]
    ids = batch.row_ids.tolist()
    if batch.episodes is not None:
        numbers = list(dict.fromkeys(batch.episodes.tolist()))
        items = [[row for row in range(how.rows) if batch.episodes[row] == number] for number in numbers]
        ids = numbers
    order = list(range(len(items)))
    if how.key is not None:
        key = Key(how.key).fold("epoch", epoch)
        draw = lambda number: float(key.uniform(torch.tensor([number]), 1)[0, 0])  # noqa: E731
        groups = [int(batch.groups[own[0]]) for own in items]
        first = [min(i for i, group in zip(ids, groups, strict=True) if group == own) for own in groups]
        order.sort(key=lambda i: (draw(first[i]), first[i], ids[i]) if how.by_prompt else draw(ids[i]))
    parts = [order[i : i + how.size] for i in range(0, len(order), how.size)]
    return [[row for i in part for row in items[i]] for part in parts]


def weights_of(mask: Tensor, mode: str) -> Tensor:
    counts, rows = mask.sum(1, keepdim=True).double(), mask.any(1).sum().clamp(min=1)
    each = {
        "token-mean": 1 / counts.sum().clamp(min=1),
        "token-sum": 1.0,
        "seq-mean-token-sum": 1 / rows,
        "seq-mean-token-mean": 1 / (rows * counts.clamp(min=1)),
        "seq-mean-token-sum-norm": 1 / (rows * HORIZON),
    }[mode]
    return mask.double() * each


class Written:
    """An update written out: parameters, momentum, and the metrics of each mini-batch."""

    def __init__(self, params: dict[str, Tensor]) -> None:
        self.params = {name: x.clone() for name, x in params.items()}
        self.momentum = {name: torch.zeros_like(x) for name, x in params.items()}
        self.reports: list[dict[str, metrics.Metric]] = []

    def step(self, loss: Tensor, leaves: dict[str, Tensor], report: dict[str, metrics.Metric], prefix: str) -> None:
        found = (
            torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
            if loss.requires_grad
            else [None] * len(leaves)
        )
        grads = {
            name: torch.zeros_like(x) if g is None else g for (name, x), g in zip(leaves.items(), found, strict=True)
        }
        norm = torch.cat([g.flatten() for g in grads.values()]).norm()
        rate = RATE(len(self.reports))
        for name, g in grads.items():
            g = g / max(1.0, (float(norm) + 1e-6) / CLIP)
            self.momentum[name] = MOMENTUM * self.momentum[name] + g
            self.params[name] = self.params[name] - rate * self.momentum[name]
        of_step = {"grad_norm": float(norm), "lr": rate, "skipped": 0.0}
        self.reports.append(report | {f"{prefix}/{name}": metrics.mean(x) for name, x in of_step.items()})


def check(found: tuple, run: Written, state: Any, before: dict, donate: bool) -> None:
    after, report = found
    expected, numbers = metrics.report(metrics.merge(*run.reports)), metrics.report(report)
    shown = {name: x for name, x in numbers.items() if not name.startswith("perf/")}
    assert shown.keys() == expected.keys()
    for name, x in expected.items():
        assert shown[name] == pytest.approx(x, rel=1e-6, abs=1e-8, nan_ok=True), name
    for name, x in run.params.items():
        torch.testing.assert_close(after.params[name], x, rtol=1e-6, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")
        torch.testing.assert_close(after.opt.momentum[name], run.momentum[name], rtol=1e-6, atol=1e-8)
    assert after.step == len(run.reports)
    if donate:
        assert all(x.numel() == 0 for x in state.params.values())
    else:
        assert tree.digest(state) == before


def objective(
    part: Experience, out: Any, loss_fn: Any, terms: PolicyTerms, selected: Tensor | None, learned: Tensor, mode: str
) -> tuple:
    """The actor's objective of a mini-batch, term by term, with its metrics."""
    mask, weights = part.response_mask, weights_of(part.response_mask, mode)
    given_ = (out.log_probs, part.old_log_probs, part.advantages, mask)
    policy, report = loss_fn(*given_) if selected is None else COV.loss_fn(*given_, selected=selected)
    policy = policy * learned
    correction = 1.0 if part.correction_weights is None else part.correction_weights
    entropy = out.entropy if part.entropy_mask is None else out.entropy * part.entropy_mask
    sums = {"pg_loss": (weights * policy * correction).sum()}
    if terms.entropy_coef:
        sums["entropy_loss"] = -terms.entropy_coef * (weights * entropy).sum()
    if terms.kl_coef:
        ratio = (out.log_probs.detach() - part.old_log_probs).where(mask, 0.0).exp() * correction
        d = (out.log_probs - part.ref_log_probs).where(mask, 0.0)
        kl = {"k2": d.square() / 2, "k3": (-d).exp() - 1 + d, "abs": d.abs()}[terms.kl_kind]
        sums["kl_loss"] = terms.kl_coef * (weights * ratio * kl).sum()
    if terms.nll_coef:
        kept = mask & (part.outcomes > 0)[:, None]
        sums["nll_loss"] = -terms.nll_coef * (out.log_probs * kept).sum() / kept.sum().clamp(min=1)
    count = metrics.masked_mean(out.entropy, mask)
    return torch.stack(list(sums.values())).sum(), report | {"actor/entropy": count} | {
        f"actor/{name}": metrics.mean(x) for name, x in sums.items()
    }


def of_highest_entropy(entropy: Tensor, mask: Tensor, noise: Tensor, share: float) -> Tensor:
    """The tokens that have a policy loss: so many of the highest entropy, and of equal ones those of least noise."""
    order = sorted(mask.nonzero().tolist(), key=lambda at: (-round(float(entropy[*at]) * 1024), float(noise[*at])))
    kept = torch.zeros_like(mask)
    for at in order[: max(1, int(share * len(order)))]:
        kept[*at] = True
    return kept


TERMS = st.builds(
    PolicyTerms,
    temperature=st.sampled_from([1.3, 0.7]),
    entropy_coef=st.sampled_from([0.3, 0.0]),
    top_entropy_share=st.sampled_from([1.0, 0.4]),
    kl_coef=st.sampled_from([0.7, 0.0]),
    kl_kind=st.sampled_from(["k3", "k2", "abs"]),
    nll_coef=st.sampled_from([0.4, 0.0]),
)


@pytest.mark.slow
@draws(max_examples=24)
@given(how=HOW, terms=TERMS, name=st.sampled_from(["clip_cov", *LOSSES]), source=st.sampled_from(["engine", "pass"]))
def test_the_actors_update_is_the_one_written_out(how, terms, name, source):
    how = attrs.evolve(how, key=5) if name == "clip_cov" and how.key is None else how  # its choice takes a key
    batch, run = how.batch(), Written(ACTOR_PARAMS)
    padded = Forward(ACTOR, remove_padding=False, share_prompts=False)
    for epoch in range(how.epochs):
        for number, rows in enumerate(mini_batches(batch, how, epoch)):
            part = batches.rows(batch, rows)
            leaves = {key: x.clone().requires_grad_() for key, x in run.params.items()}
            wanted = ("log_probs", "entropy")
            out = forward_micro_batch(leaves, part, forward=padded, outputs=wanted, temperature=terms.temperature)
            selected, place = None, Key(how.key or 0).fold("select", epoch, number)
            noise = place.uniform(part.row_ids, part.response_mask.shape[1])
            learned = of_highest_entropy(out.entropy.detach(), part.response_mask, noise, terms.top_entropy_share)
            if name == "clip_cov":
                new = out.log_probs.detach()
                selected = COV.select_fn(new, part.old_log_probs, part.advantages, part.response_mask, noise=noise)
            loss, report = objective(part, out, LOSSES[name], terms, selected, learned, how.mode)
            if source == "engine" and not run.reports:
                report |= rollout_gap(out.log_probs, part.rollout_log_probs, part.response_mask)
            run.step(loss, leaves, report, "actor")
    state = init_state(tree.copy(ACTOR_PARAMS), OPTIMIZER)
    before = tree.digest(state)
    update = UpdateActor(
        forward=how.forward(ACTOR),
        loss_fn=LOSSES[name],
        loop=how.loop(),
        optimizer=OPTIMIZER,
        terms=terms,
        old_log_probs=source,
    )
    key = None if how.key is None else Key(how.key)
    check(update(state, batch, key=key, donate=how.donate), run, state, before, how.donate)


@pytest.mark.slow
@draws(max_examples=12)
@given(how=HOW, clip=st.sampled_from([0.2, None]))
def test_the_critics_update_is_the_one_written_out(how, clip):
    batch, run = how.batch(), Written(CRITIC_PARAMS)
    padded, loss_fn = Forward(CRITIC, remove_padding=False, share_prompts=False), partial(losses.value_loss, clip=clip)
    for epoch in range(how.epochs):
        for rows in mini_batches(batch, how, epoch):
            part = batches.rows(batch, rows)
            leaves = {key: x.clone().requires_grad_() for key, x in run.params.items()}
            values = forward_micro_batch(leaves, part, forward=padded, outputs=("values",)).values
            loss, report = loss_fn(values, part.values, part.returns, part.response_mask)
            total = (weights_of(part.response_mask, how.mode) * loss).sum()
            run.step(total, leaves, report | {"critic/vf_loss": metrics.mean(total)}, "critic")
    state = init_state(tree.copy(CRITIC_PARAMS), OPTIMIZER)
    before, key = tree.digest(state), None if how.key is None else Key(how.key)
    update = UpdateCritic(forward=how.forward(CRITIC), loss_fn=loss_fn, loop=how.loop(), optimizer=OPTIMIZER)
    check(update(state, batch, key=key, donate=how.donate), run, state, before, how.donate)
