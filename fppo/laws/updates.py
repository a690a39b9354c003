"""Laws of whole updates: gradients do not depend on how a batch is cut, ordered, padded or packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs
import torch
from torch import Tensor

from fppo import tree
from fppo.laws._rows import metrics_differ
from fppo.laws._search import Breach, Law, LawExample, changed, check, differ, draw_mask, fn_name, normal, widen
from fppo.losses import MODES
from fppo.metrics import Metrics

if TYPE_CHECKING:  # models import transformers, which the other laws do not need
    from fppo.batch import Experience
    from fppo.models.model import HeadKind
    from fppo.steps.actor import PolicyTerms, SelectiveLoss
    from fppo.steps.forward import Forward
    from fppo.steps.loop import Loop
    from fppo.steps.optimizers import Optimizer

SIZES = ((1, 1), (2, 1), (1, 2), (2, 2), (3, 3), (5, 4))
PROMPT = 3  # columns
VOCAB = 11
HORIZON = 7
TINY: Mapping[str, Any] = MappingProxyType(  # sizes of a Qwen2
    {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,  # far from uniform probabilities
        "pad_token_id": 0,
    }
)


class _UpdateOutcome(NamedTuple):
    grads: dict[str, Tensor]
    params: dict[str, Tensor]
    metrics: Metrics


# (batch, mode, micro-batch size or None, token budget or None, remove_padding) -> the update's result
Run = Callable[["Experience", str, int | None, int | None, bool], _UpdateOutcome]


def _runner(make: Callable[..., Any], head: HeadKind, outputs: int = 1) -> Run:
    """The update that `make(forward=, loop=, optimizer=)` returns for a tiny Qwen2 in float64 with this head of
    `outputs` outputs, as a function of the batch and its cut.

    With beta_1 = 0 the first moment is the gradient; with eps = 1 the step is smooth where a gradient is near 0.
    """
    from transformers import Qwen2Config

    from fppo import models
    from fppo.key import Key
    from fppo.steps.forward import Forward
    from fppo.steps.loop import Loop
    from fppo.steps.micro_batching import MicroBatching
    from fppo.steps.optimizers import adamw
    from fppo.steps.train_state import init_state

    config = Qwen2Config(**TINY, vocab_size=VOCAB, num_hidden_layers=1, tie_word_embeddings=False)
    model = models.build(config, head=head, outputs=outputs)
    params = models.init_params(model, Key(0), torch.float64)
    optimizer = adamw(lambda step: 0.1, betas=(0.0, 0.9), eps=1.0, max_grad_norm=None)
    packed = Forward(model)

    def run(batch: Experience, mode: str, size: int | None, budget: int | None, remove_padding: bool) -> _UpdateOutcome:
        loop = Loop(
            mini_batch_size=len(batch.tokens),
            micro_batching=MicroBatching(size=size, token_budget=budget),
            weight_mode=mode,
            horizon=HORIZON if mode == "seq-mean-token-sum-norm" else None,
        )
        forward = attrs.evolve(packed, remove_padding=remove_padding)
        state, metrics = make(forward=forward, loop=loop, optimizer=optimizer)(init_state(params, optimizer), batch)
        return _UpdateOutcome(state.opt.mu, state.params, metrics)

    return run


def _remembered(run: Run) -> Run:
    """Cache the results of `run` by batch and cut, since all laws compare with the same run."""
    known: dict[object, _UpdateOutcome] = {}

    def remembered(batch: Experience, *cut: Any) -> _UpdateOutcome:
        key = (*tree.digest(batch).items(), *cut)
        if key not in known:
            known[key] = run(batch, *cut)
        return known[key]

    return remembered


def _batch(example: LawExample) -> Experience:
    """Convert the example to an Experience, the record that an update takes."""
    from fppo.batch import Column, Experience

    x, rows = example.inputs, len(example.mask)
    zeros = torch.zeros(rows, dtype=torch.int64)
    column = Column([None] * rows)
    return Experience(
        tokens=x["tokens"],
        attention_mask=x["attention_mask"],
        response_mask=x["mask"],
        rollout_log_probs=x["old_log_probs"],
        sampling_log_probs=x["old_log_probs"],
        row_ids=x["row_ids"],
        groups=zeros,
        versions=zeros,
        finish=column,
        ids=column,
        ground_truth=column,
        source=column,
        extras=column,
        scores=x["advantages"].where(x["mask"], 0.0).sum(1),
        named_scores={},
        old_log_probs=x["old_log_probs"],
        ref_log_probs=x["ref_log_probs"],
        values=x["values"],
        token_rewards=x["returns"],
        advantages=x["advantages"],
        returns=x["returns"],
    )


def _example(modes: Sequence[str], rows: int, width: int, seed: int) -> LawExample:
    """Draw ragged prompts and responses, with holes and empty rows in the mask; weight modes take turns."""
    generator = torch.Generator().manual_seed(1000 * rows + 100 * width + seed)
    mask = draw_mask(rows, width, seed + 2 * rows + width, generator)  # every mode meets every kind of mask
    last = (mask * torch.arange(1, width + 1)).amax(1, keepdim=True)
    first = torch.randint(PROMPT, (rows, 1), generator=generator)
    columns = torch.arange(PROMPT + width)
    attention = (columns >= first) & (columns < PROMPT + last)
    old = -normal(generator, rows, width).abs() - 0.5
    inputs = {
        "tokens": torch.randint(1, VOCAB, attention.shape, generator=generator).where(attention, 0),
        "attention_mask": attention,
        "mask": mask,
        "row_ids": torch.arange(rows),
        "old_log_probs": old,
        "ref_log_probs": old + 0.3 * normal(generator, rows, width),
        **{name: normal(generator, rows, width) for name in ("values", "advantages", "returns")},
    }
    return LawExample(inputs, {}, mask.double(), modes[seed % len(modes)])


def _run(run: Run, example: LawExample, *, size: int | None = None, budget: int | None = None, packed: bool = True):
    if size is None and budget is None:
        size = len(example.mask)
    assert example.mode is not None
    return run(_batch(example), example.mode, size, budget, packed)


def _outcomes_differ(expected: _UpdateOutcome, actual: _UpdateOutcome, tolerance: float = 1e-9) -> str | None:
    for what, wanted, got in (
        ("the gradient of", expected.grads, actual.grads),
        ("the new parameter", expected.params, actual.params),
    ):
        for name, x in wanted.items():
            if reason := differ(f"{what} {name}", x, got[name], tolerance):
                return reason
    return metrics_differ(_of_function(expected.metrics), _of_function(actual.metrics), tolerance)


def _of_function(metrics: Metrics) -> Metrics:
    """Leave out metrics of performance (perf/...), which depend on the cut into micro-batches."""
    return {name: x for name, x in metrics.items() if not name.startswith("perf/")}


def _finite(run: Run, example: LawExample, generator: torch.Generator) -> str | None:
    outcome = _run(run, example)
    for name, grad in outcome.grads.items():
        if not grad.isfinite().all():
            return f"the gradient of {name} is not finite"
    for name, metric in outcome.metrics.items():
        if name.endswith("grad_norm") and not metric[0].isfinite():  # the update was skipped: moments are unchanged
            return "the norm of the gradient is not finite"
    return None


def _micro_batches(run: Run, example: LawExample, generator: torch.Generator) -> str | None:
    whole, rows = _run(run, example), len(example.mask)
    tokens = example.inputs["attention_mask"].sum(1)
    for size in sorted({1, (rows + 1) // 2} - {rows}):
        if reason := _outcomes_differ(whole, _run(run, example, size=size)):
            return f"in micro-batches of {size}, {reason}, as in one"
    for budget in {1, max(int(tokens.max()), -(-int(tokens.sum()) // 2))} if rows > 1 else ():
        if reason := _outcomes_differ(whole, _run(run, example, budget=budget)):
            return f"in micro-batches of at most {budget} tokens, {reason}, as in one"
    return None


def _row_order(run: Run, example: LawExample, generator: torch.Generator) -> Breach | None:
    order = torch.randperm(len(example.mask), generator=generator)
    moved = example.map(lambda x: x[order])
    reason = _outcomes_differ(_run(run, example), _run(run, moved, size=2))
    words = f"with the rows in the order {order.tolist()}, which they have here, in micro-batches of 2, "
    return changed(reason, words, moved)


def _wide(example: LawExample, left: int, right: int) -> LawExample:
    """Add `left` columns of padding before prompts and `right` ones after responses, NaN in floating-point tensors."""
    wide = example.map(partial(widen, columns=right))
    prompts = {name: torch.nn.functional.pad(wide.inputs[name], (left, 0)) for name in ("tokens", "attention_mask")}
    return wide.put(**prompts)


def _padding(run: Run, example: LawExample, generator: torch.Generator) -> Breach | None:
    for left, right in ((0, 1), (2, 3)):
        wide = _wide(example, left, right)
        if reason := _outcomes_differ(_run(run, example), _run(run, wide)):
            words = f"with {left} more columns of padding before the prompts and {right} after the responses, {reason}"
            return Breach(words, wide)
    return None


def _packing(run: Run, example: LawExample, generator: torch.Generator) -> Breach | None:
    packed = _run(run, example)
    for columns in (0, 2):
        wide = _wide(example, columns, columns)
        if reason := _outcomes_differ(packed, _run(run, wide, packed=False)):
            words = f"with remove_padding=False and {columns} more columns of padding on each side, {reason}, as packed"
            return Breach(words, wide)
    return None


_LAWS = (
    Law("finite", "the gradient of finite inputs is finite", _finite),
    Law("micro-batch split", "micro-batches of any size or token budget give one gradient tree", _micro_batches),
    Law("row order", "the order of rows changes nothing", _row_order),
    Law("padding width", "columns outside the masks change nothing", _padding),
    Law("packing", "rows without padding and rows with it give one gradient tree", _packing),
)


def check_update_fn(
    make: Callable[..., Any],
    *,
    head: HeadKind = "lm",
    outputs: int = 1,
    modes: Sequence[str] = MODES,
    name: str | None = None,
) -> None:
    """Check a whole update: `laws.check_update_fn(UpdateCritic, head="value")`.

    `make(*, forward, loop, optimizer)` returns the update, and `update(state, batch)` returns (TrainState, Metrics);
    bind everything else with functools.partial. It trains a tiny Qwen2 in float64 on one mini-batch, with a vocabulary
    head ("lm") or a "value" head of `outputs` outputs. For every weight mode in `modes`, gradients, new parameters and
    metrics must be finite, and equal for any split into micro-batches, order of rows and width of padding, packed or
    padded. Raises LawViolation for the first broken law.
    """
    run = _remembered(_runner(make, head, outputs))
    examples = partial(_example, tuple(modes))
    check(run, _LAWS, examples, sizes=SIZES, seeds=max(3, len(modes)), name=name or fn_name(make))


def check_update(
    loss_fn: Callable[..., tuple[Tensor, Metrics]] | SelectiveLoss,
    *,
    modes: Sequence[str] = MODES,
    terms: PolicyTerms | None = None,
) -> None:
    """Check `UpdateActor` with a policy loss by the laws of updates: `laws.check_update(my_loss)`.

    `loss_fn(log_probs, old_log_probs, advantages, mask)` returns the loss per token [B, T] and metrics, its scalars
    bound; or it is a `SelectiveLoss`. The default `terms` have one of each kind. See `check_update_fn` for the laws;
    `check_policy_loss` has the laws of the loss alone, with smaller counter-examples. Takes some seconds.
    """
    make, name = _actor_update(loss_fn, terms)
    check_update_fn(make, modes=modes, name=name)


def _actor_update(
    loss_fn: Callable[..., tuple[Tensor, Metrics]] | SelectiveLoss, terms: PolicyTerms | None
) -> tuple[Callable[..., Any], str]:
    """`UpdateActor` with the loss, and its name in messages. By default (`terms` None) routers' losses are included for
    a model with routers, and choices are replayed if the number of rows is even."""
    from fppo import tree
    from fppo.steps.actor import PolicyTerms, SelectiveLoss, UpdateActor

    name = f"UpdateActor with {fn_name(loss_fn.loss_fn if isinstance(loss_fn, SelectiveLoss) else loss_fn)}"
    if terms is not None:
        return partial(UpdateActor, loss_fn=loss_fn, terms=terms), name
    every = PolicyTerms(temperature=0.9, entropy_coef=0.01, top_entropy_share=0.7, kl_coef=0.1, nll_coef=0.2)

    def make(*, forward: Forward, loop: Loop, optimizer: Optimizer) -> Callable[..., Any]:
        routers = forward.model.routers
        own = UpdateActor(forward=forward, loss_fn=loss_fn, loop=loop, optimizer=optimizer, terms=every)
        if not routers:
            return own

        def update(state: Any, batch: Experience) -> Any:
            again = len(batch.tokens) % 2 == 0
            terms = attrs.evolve(every, router_z_coef=0.05, balance_coef=0.2 * again)
            chosen = (
                batch.tokens[..., None, None] + torch.arange(len(routers))[:, None] + torch.arange(routers[0].chosen)
            )
            batch = tree.replace(batch, routed=(chosen % routers[0].experts).to(torch.uint8)) if again else batch
            return attrs.evolve(own, forward=attrs.evolve(forward, replay=again), terms=terms)(state, batch)

        return update

    return make, name
