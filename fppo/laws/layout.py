"""The layout law: an update on many ranks, its rows and parameters spread over them in any way, is that of one process.

The ranks are those of a mesh simulated in this process, so the law needs no launcher.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from fppo import tree
from fppo.laws._search import Example, Law, check, fn_name
from fppo.laws.updates import HORIZON, VOCAB, _batch, _example, _Outcome, _outcomes_differ
from fppo.losses import MODES
from fppo.metrics import Metrics

if TYPE_CHECKING:  # a model needs transformers; the other laws do without it
    from fppo.models.model import HeadKind

SIZES = ((1, 1), (2, 2), (3, 3), (6, 4))
MINI = 4  # rows of a mini-batch
AXES = ("replicate", "shard", "sequence")
SHARDINGS = (3, 2, 1, None)  # stages; None: whole parameters on every rank
TOLERANCE = 1e-10


@attrs.frozen
class Layout:
    """A mesh, what is sharded on it, and how a batch is spread over it and cut."""

    axes: Mapping[str, int]
    stage: int | None = None
    checkpoint_layers: bool = False
    shares: tuple[tuple[int, ...], ...] = ((),)  # the rows of each data rank
    size: int | None = None
    token_budget: int | None = None
    remove_padding: bool = True
    whole_batch: bool = False  # every rank is given all rows, and the update shares them out

    def __str__(self) -> str:
        mesh = " x ".join(f"{name} {size}" for name, size in self.axes.items())
        sharded = "whole parameters" if self.stage is None else f"sharding stage {self.stage}"
        cut = f"of {self.size}" if self.token_budget is None else f"of at most {self.token_budget} tokens"
        rows = "rows shared out" if self.whole_batch else f"rows {[list(share) for share in self.shares]}"
        words = f"on a mesh of {mesh}, {sharded}, {rows}, micro-batches {cut}"
        extras = (", packed" if self.remove_padding else ", padded") + (", layers recomputed" * self.checkpoint_layers)
        return words + extras


# (example, layout, number of the model) -> what the update gave on every rank
Run = Callable[[Example, Layout, int], list[_Outcome]]


def meshes(max_ranks: int) -> list[dict[str, int]]:
    """All meshes of replicate, shard and sequence axes of 1, 2 or 4 ranks that have at most `max_ranks`, and more
    than one; the small ones first."""
    sizes = sorted(product((1, 2, 4), repeat=3), key=lambda sizes: (sizes[0] * sizes[1] * sizes[2], sizes[::-1]))
    found: list[dict[str, int]] = [dict(zip(AXES, counts, strict=True)) for counts in sizes]
    return [axes for axes in found if 1 < _ranks(axes) <= max_ranks]


def _ranks(axes: Mapping[str, int]) -> int:
    return axes["replicate"] * axes["shard"] * axes["sequence"]


def _models(head: HeadKind) -> list[tuple[Any, dict[str, Tensor]]]:
    """A Qwen2 with tied embeddings and a Llama without, in float64, whose sizes the meshes do not all divide."""
    from transformers import LlamaConfig, Qwen2Config

    from fppo import models
    from fppo.key import Key

    shared: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 10,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,  # so that probabilities are far from uniform
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    built = [
        models.build(config(**shared, tie_word_embeddings=tied), head=head)
        for config, tied in ((Qwen2Config, True), (LlamaConfig, False))
    ]
    return [(model, models.init_params(model, Key(0), torch.float64)) for model in built]


def _runner(update: Callable[..., Any], head: HeadKind) -> Run:
    """`update` on the ranks of a layout, as a function of the batch; the state comes back whole.

    With beta_1 = 0 the first moment is the gradient; with eps = 1 the step is smooth where a gradient is near 0.
    """
    from fppo import batch as batches
    from fppo.runtime import fsdp
    from fppo.runtime.mesh import DATA_AXES, Mesh, Sharding, place_on
    from fppo.runtime.simulate import simulate
    from fppo.steps.micro_batching import MicroBatching
    from fppo.steps.optimizer import Optimizer
    from fppo.steps.train_state import init_state
    from fppo_kernels.record import Kernels

    built = _models(head)
    optimizer = Optimizer(schedule=lambda step: 0.1, betas=(0.0, 0.9), eps=1.0, max_grad_norm=1.0)
    kernels = Kernels.named()

    def on_rank(example: Example, layout: Layout, number: int, mesh: Mesh) -> _Outcome:
        model, params = built[number]
        model = attrs.evolve(model, checkpoint_layers=layout.checkpoint_layers)
        mesh = attrs.evolve(mesh, sharding=None if layout.stage is None else Sharding(stage=layout.stage))
        share = layout.shares[place_on(mesh, DATA_AXES)]
        state, metrics = update(
            init_state(fsdp.shard(params, mesh)),
            _batch(example) if layout.whole_batch else batches.rows(_batch(example), list(share)),
            model=model,
            optimizer=optimizer,
            kernels=kernels,
            mesh=mesh,
            mini_batch_size=MINI,
            micro_batching=MicroBatching(size=layout.size, token_budget=layout.token_budget),
            weight_mode=example.mode,
            horizon=HORIZON if example.mode == "seq-mean-token-sum-norm" else None,
            remove_padding=layout.remove_padding,
            whole_batch=layout.whole_batch,
        )
        grads, params = (fsdp.gather(x, model.shapes, mesh) for x in (state.opt.mu, state.params))
        return _Outcome(grads, params, metrics)

    def run(example: Example, layout: Layout, number: int) -> list[_Outcome]:
        return simulate(layout.axes, partial(on_rank, example, layout, number))

    return run


def _draw(
    axes: Mapping[str, int],
    stage: int | None,
    checkpoint_layers: bool,
    example: Example,
    generator: torch.Generator,
    whole_batch: bool | None = None,
) -> Layout:
    """Every row on some data rank, a split into micro-batches, and packed rows or, without a sequence axis, any."""

    def draw(count: int) -> int:
        return int(torch.randint(count, (), generator=generator))

    rows, ranks = len(example.mask), axes["replicate"] * axes["shard"]
    owners = [draw(ranks) for _ in range(rows)]
    tokens = example.inputs["attention_mask"].sum().item()
    budget = draw(2) == 1
    return Layout(
        axes=axes,
        stage=stage if axes["shard"] > 1 else None,
        checkpoint_layers=checkpoint_layers,
        shares=tuple(tuple(row for row in range(rows) if owners[row] == rank) for rank in range(ranks)),
        size=None if budget else 1 + draw(2),
        token_budget=1 + draw(max(int(tokens), 1)) if budget else None,
        remove_padding=axes["sequence"] > 1 or draw(2) == 1,
        whole_batch=draw(2) == 1 if whole_batch is None else whole_batch,
    )


def _turns(layouts: Sequence[tuple[Mapping[str, int], int | None, bool]], each: int):
    """The next `each` of the layouts at every call, and the number of the call; round and round."""
    count = 0

    def turn() -> tuple[int, list[tuple[Mapping[str, int], int | None, bool]]]:
        nonlocal count
        count += 1
        return count, [layouts[i % len(layouts)] for i in range((count - 1) * each, count * each)]

    return turn


def _one_process(run: Run, example: Example, number: int) -> _Outcome:
    rows = len(example.mask)
    axes = {"replicate": 1, "shard": 1, "sequence": 1}
    return run(example, Layout(axes, shares=(tuple(range(rows)),), size=rows), number)[0]


def _laws(
    layouts: Sequence[tuple[Mapping[str, int], int | None, bool]], each: int, whole_batch: bool | None
) -> tuple[Law, ...]:
    turn, again = _turns(layouts, each), _turns(layouts, 1)

    def same_as_one(run: Run, example: Example, generator: torch.Generator) -> str | None:
        count, chosen = turn()
        number = count % 2
        expected = _one_process(run, example, number)
        for settings in chosen:
            layout = _draw(*settings, example, generator, whole_batch)
            for rank, outcome in enumerate(run(example, layout, number)):
                if reason := _outcomes_differ(expected, outcome, TOLERANCE):
                    return f"{layout}: rank {rank}: {reason}, as in one process"
        return None

    def same_bits(run: Run, example: Example, generator: torch.Generator) -> str | None:
        count, (settings,) = again()
        if count % 4:  # each is run twice
            return None
        layout = _draw(*settings, example, generator, whole_batch)
        first, second = ([tree.digest(outcome) for outcome in run(example, layout, count % 2)] for _ in range(2))
        for what, bits, others in (
            ("when run again", first, second),
            ("than on rank 0", first, first[:1] * len(first)),
        ):
            for rank, (own, other) in enumerate(zip(bits, others, strict=True)):
                wrong = [path for path, digest in own.items() if other[path] != digest]
                if wrong:
                    return f"{layout}: rank {rank}: {wrong[0]} has other bits {what}"
        return None

    return (
        Law("layout", "ranks that share rows and parameters in any way do the update of one process", same_as_one),
        Law("same bits", "the same layout gives the same bits, on all ranks", same_bits),
    )


def check_layout_fn(
    update: Callable[..., Any],
    *,
    head: HeadKind = "lm",
    modes: Sequence[str] = MODES,
    max_ranks: int = 8,
    each: int = 4,
    whole_batch: bool | None = None,
    name: str | None = None,
) -> None:
    """Put a whole update through the laws of layouts: `laws.check_layout_fn(update_critic, head="value")`.

    `update` is as in `check_update_fn`, takes `whole_batch` too, and the mesh it is given: replicate, shard and
    sequence axes of 1, 2 and 4 ranks, `max_ranks` at most, with whole parameters or sharded ones of every stage, the
    layers recomputed or not. Ragged rows are spread anyhow, over ranks some of which get none, or given to all ranks,
    for the update to share out (`whole_batch` None: both), and cut into micro-batches anyhow. In every
    weight mode of `modes` the gradient tree, the new state and the metrics on every rank must be those of one process,
    in float64, to 1e-10. Each example tries the next `each` layouts. LawViolation for the first law that fails.
    """
    layouts = [
        (axes, stage, (number + place) % 2 == 1)
        for place, stage in enumerate(SHARDINGS)
        for number, axes in enumerate(meshes(max_ranks))
        if axes["shard"] > 1 or stage is None
    ]
    random.Random(0).shuffle(layouts)  # so that small and large examples meet all kinds
    run = _runner(update, head)
    examples = partial(_example, tuple(modes))
    check(
        run,
        _laws(layouts, each, whole_batch),
        examples,
        sizes=SIZES,
        seeds=max(3, len(modes)),
        name=name or fn_name(update),
    )


def check_layout(
    loss_fn: Callable[..., tuple[Tensor, Metrics]],
    *,
    select_fn: Callable[..., Tensor] | None = None,
    modes: Sequence[str] = MODES,
    max_ranks: int = 8,
    each: int = 4,
    entropy_coef: float = 0.01,
    kl_coef: float = 0.1,
    temperature: float = 0.9,
) -> None:
    """Put `update_actor` with a policy loss through the laws of layouts: `laws.check_layout(my_loss)`.

    `loss_fn(log_probs, old_log_probs, advantages, mask)` returns the loss per token [B, T] and metrics, its scalars
    bound; `select_fn` is its selection of tokens over a mini-batch, if it has one. See `check_layout_fn`. Takes some
    tens of seconds.
    """
    from fppo.steps.update import update_actor

    scalars = {"entropy_coef": entropy_coef, "kl_coef": kl_coef, "temperature": temperature}
    update = partial(update_actor, loss_fn=loss_fn, select_fn=select_fn, **scalars)
    whole = None if select_fn is None else True
    name = f"update_actor with {fn_name(loss_fn)}"
    check_layout_fn(update, modes=modes, max_ranks=max_ranks, each=each, whole_batch=whole, name=name)
