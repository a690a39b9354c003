"""The law that compares a whole update with transformers: its gradient is the expected reward's, computed apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fppo.laws._search import LawViolation, fn_name
from fppo.laws.updates import TINY
from fppo.laws.worlds import all_responses

if TYPE_CHECKING:  # models import transformers, which the other laws do not need
    from fppo.batch import Experience
    from fppo.steps.outputs import Forward

PROMPTS = ((2, 3), (1, 2, 0, 3))
WORDS, END, HORIZON = 4, 1, 2
RESPONSES = all_responses(WORDS, HORIZON, end=END)
CLOSE = 1e-6  # transformers' norms and rotary positions compute in float32
CUTS = ((True, 3), (False, 26))  # whether rows are packed, and the rows of a micro-batch


def check_update_gradient(
    make: Callable[..., Any] | None = None,
    *,
    temperature: float = 1.0,
    kl_coef: float = 0.0,
    name: str | None = None,
) -> None:
    """Compare a whole update with transformers: `laws.check_update_gradient(partial(UpdateActor, loss_fn=my_loss))`.

    `make(*, forward, loop, optimizer)` returns the update, and `update(state, batch)` returns (TrainState, Metrics), as
    for `check_update_fn`; None is `UpdateActor` with `losses.ppo_clip`. Bind its terms, and give their `temperature`
    and `kl_coef` here as well; the kind of the KL term must have the gradient of KL(policy || reference).

    A tiny Qwen2 in float64 is updated on all responses of at most two tokens to two prompts, each weighted by its
    probability (`correction_weights`). The update's gradient must be that of -sum over responses of pi * score (with a
    KL term, + kl_coef * the KL of every token's distribution), which autograd computes through transformers' module,
    prefix by prefix. So the law covers the shift of labels, packing, temperature, kernels, micro-batches, weights and
    the sign. It takes half a second. Raises LawViolation for log-probs that differ from the module's, and for the first
    parameter whose gradient differs.
    """
    from functools import partial

    from fppo import losses
    from fppo.steps.actor import PolicyTerms, UpdateActor

    if make is None:
        terms = PolicyTerms(temperature=temperature, kl_coef=kl_coef, kl_kind="k2")
        make = partial(UpdateActor, loss_fn=losses.ppo_clip, terms=terms)
    title = name or fn_name(make)
    config, forward, params = _tiny()
    ref = {key: x + 0.1 * torch.cos(torch.arange(x.numel()).view_as(x)) for key, x in params.items()}
    module = _PlainModule(config, temperature)
    log_ref = module.distributions(ref)
    leaves = {key: x.clone().requires_grad_() for key, x in params.items()}
    log_p = module.distributions(leaves)
    objective, chances = _objective(log_p, log_ref, kl_coef)
    gradient = dict(zip(leaves, torch.autograd.grad(-objective, list(leaves.values())), strict=True))
    batch = _batch(log_p.detach(), log_ref.detach(), chances.detach())
    for packed, size in CUTS:
        _check_cut(title, make, batch, (forward, params, gradient), packed=packed, size=size, temperature=temperature)


def _check_cut(
    title: str,
    make: Callable[..., Any],
    batch: Experience,
    of: tuple[Forward, dict[str, Tensor], dict[str, Tensor]],
    *,
    packed: bool,
    size: int,
    temperature: float,
) -> None:
    """Raise LawViolation, which begins with `title`, if log-probs, or gradients by the update from `make`, in
    micro-batches of `size` rows, `packed` or padded, differ from transformers' (`of`)."""
    import attrs

    from fppo.steps.forward import compute_log_probs
    from fppo.steps.loop import Loop
    from fppo.steps.micro_batching import MicroBatching
    from fppo.steps.optimizers import adamw
    from fppo.steps.train_state import init_state

    forward, params, gradient = of
    forward, micro = attrs.evolve(forward, remove_padding=packed), MicroBatching(size=size)
    shown = {"tokens": batch.tokens, "attention_mask": batch.attention_mask, "scores": batch.scores}
    how = f"{'packed' if packed else 'padded'}, in micro-batches of {size} rows, {len(batch.tokens)} rows in all"
    found = compute_log_probs(params, batch, forward=forward, micro_batching=micro, temperature=temperature)
    if (place := _worst(found, batch.old_log_probs)) is not None:
        text = f"the log-probs of a pass are those of transformers' module at the temperature {temperature}"
        raise LawViolation(_text(title, text, how, "the log-prob of row and token", place), "log-probs", shown)
    # with beta_1 = 0 the first moment is the gradient
    optimizer = adamw(lambda step: 0.1, betas=(0.0, 0.9), eps=1.0, max_grad_norm=None)
    loop = Loop(mini_batch_size=len(batch.tokens), micro_batching=micro, weight_mode="token-sum")
    update = make(forward=forward, loop=loop, optimizer=optimizer)
    state, _ = update(init_state(params, optimizer), batch)
    for key, wanted in gradient.items():
        if (place := _worst(state.opt.mu[key], wanted)) is not None:
            text = "the gradient of an update is that of the expected score through transformers' module"
            message = _text(title, text, how, f"the gradient of {key} at", place)
            raise LawViolation(message, "expectation", {**shown, "expected": wanted, "found": state.opt.mu[key]})


def _worst(found: Tensor, wanted: Tensor) -> tuple[list[int], float, float] | None:
    """The index at which `found` differs most from `wanted`, and both numbers; None if they agree."""
    gap = (found.detach() - wanted).abs().nan_to_num(nan=torch.inf)
    if gap.max() <= CLOSE * (1 + wanted.abs().max()):
        return None
    place = [int(i) for i in torch.unravel_index(gap.argmax(), gap.shape)]
    return place, float(found[tuple(place)]), float(wanted[tuple(place)])


def _text(title: str, law: str, how: str, what: str, at: tuple[list[int], float, float]) -> str:
    place, found, wanted = at
    lines = [
        f'{title} breaks the law "expectation": {law}.',
        f"  {what} {place} is {found:.6g}, expected {wanted:.6g}",
        f"  The rows, all responses of at most {HORIZON} of {WORDS} tokens to the prompts {PROMPTS}, ran {how}.",
    ]
    return "\n".join(lines)


def _tiny() -> tuple[Any, Forward, dict[str, Tensor]]:
    """A tiny Qwen2 in float64: its config, fppo's model, and parameters far from uniform."""
    from transformers import Qwen2Config

    from fppo import models
    from fppo.key import Key
    from fppo.steps.outputs import Forward

    config = Qwen2Config(**TINY, vocab_size=WORDS, num_hidden_layers=2, tie_word_embeddings=True)
    model = models.build(config)
    return config, Forward(model), models.init_params(model, Key(0), torch.float64)


class _PlainModule:
    """The distributions of transformers' own module, without any code of fppo."""

    def __init__(self, config: Any, temperature: float) -> None:
        from transformers import Qwen2ForCausalLM

        self.module = Qwen2ForCausalLM(config).double()
        self.temperature = temperature

    def distributions(self, params: dict[str, Tensor]) -> Tensor:
        """Log-probs of all tokens at each position of all responses, [P, S, HORIZON, V], prefix by prefix; 0 after a
        response's end."""
        prefixes = sorted({y[:t] for y in RESPONSES for t in range(len(y))})
        rows: list[Tensor] = []
        for prompt in PROMPTS:
            at = {prefix: self._next((*prompt, *prefix), params) for prefix in prefixes}
            nothing = torch.zeros_like(at[()])
            rows += [torch.stack([at[y[:t]] if t < len(y) else nothing for t in range(HORIZON)]) for y in RESPONSES]
        return torch.stack(rows).view(len(PROMPTS), -1, HORIZON, WORDS)

    def _next(self, tokens: tuple[int, ...], params: dict[str, Tensor]) -> Tensor:
        out = torch.func.functional_call(self.module, params, (torch.tensor([tokens]),), tie_weights=True)
        return (out.logits[0, -1] / self.temperature).log_softmax(-1)


def _scores() -> Tensor:
    count = len(RESPONSES)
    return torch.sin(1.0 + torch.arange(len(PROMPTS) * count, dtype=torch.float64)).view(len(PROMPTS), count)


def _taken(log_p: Tensor) -> Tensor:
    """Log-probs of the responses' own tokens, [P, S, HORIZON]."""
    return torch.stack(
        [
            torch.stack([log_p[p, s, t, y[t]] if t < len(y) else log_p.new_zeros(()) for t in range(HORIZON)])
            for p in range(len(PROMPTS))
            for s, y in enumerate(RESPONSES)
        ]
    ).view(len(PROMPTS), len(RESPONSES), HORIZON)


def _objective(log_p: Tensor, log_ref: Tensor, kl_coef: float) -> tuple[Tensor, Tensor]:
    """The sum over prompts and responses of pi * score, minus kl_coef * the KL at every position, whose weights are
    constants; and the probabilities pi of the responses, [P, S]."""
    chances = _taken(log_p).sum(-1).exp()
    at_place = (log_p.exp() * (log_p - log_ref)).sum(-1)  # 0 after the end
    return (chances * _scores()).sum() - kl_coef * (chances.detach()[..., None] * at_place).sum(), chances


def _batch(log_p: Tensor, log_ref: Tensor, chances: Tensor) -> Experience:
    """Make one batch of all responses, each weighted by its probability (`chances`)."""
    from fppo.batch import Column, Experience

    rows = [(prompt, y) for prompt in PROMPTS for y in RESPONSES]
    width, n = max(map(len, PROMPTS)), len(rows)
    padded = [[(0, False)] * (width - len(prompt)) + [(x, True) for x in (*prompt, *y)] for prompt, y in rows]
    filled = torch.tensor([row + [(0, False)] * (width + HORIZON - len(row)) for row in padded])
    attention, zeros = filled[..., 1].bool(), torch.zeros(n, HORIZON, dtype=torch.float64)
    mask, column, scores = attention[:, width:], Column([None] * n), _scores().flatten()
    old = _taken(log_p).flatten(0, 1)
    return Experience(
        tokens=filled[..., 0],
        attention_mask=attention,
        response_mask=mask,
        rollout_log_probs=old,
        sampling_log_probs=old,
        row_ids=torch.arange(n),
        groups=torch.arange(n) // (n // len(PROMPTS)),
        versions=torch.zeros(n, dtype=torch.int64),
        finish=Column(["stop"] * n),
        ids=column,
        ground_truth=column,
        source=column,
        extras=column,
        scores=scores,
        named_scores={},
        old_log_probs=old,
        ref_log_probs=_taken(log_ref).flatten(0, 1),
        token_rewards=zeros,
        advantages=scores[:, None].where(mask, 0.0),
        returns=zeros,
        correction_weights=chances.flatten()[:, None].where(mask, 0.0),
    )
