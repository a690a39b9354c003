"""The layout law: an update on many ranks equals that of one process, however its rows and parameters are distributed.

The ranks form a mesh simulated in this process, so the law needs no launcher.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

import attrs
import torch
from torch import Tensor

from fppo import tree
from fppo.laws._search import Law, LawExample, check, fn_name
from fppo.laws.updates import HORIZON, PROMPT, VOCAB, _actor_update, _batch, _example, _outcomes_differ, _UpdateOutcome
from fppo.losses import MODES
from fppo.metrics import Metrics

if TYPE_CHECKING:  # models import transformers, which the other laws do not need
    from fppo.models.model import HeadKind
    from fppo.steps.actor import PolicyTerms, SelectiveLoss

Recompute = Literal["selective"] | bool
SIZES = ((1, 1), (2, 2), (3, 3), (6, 4))
MINI = 4  # rows of a mini-batch, at most
AXES = ("replicate", "shard", "expert", "sequence", "context", "tensor", "pipeline")
HEADS = LAYERS = EXPERTS = 4
SHARDINGS = (3, 2, 1, None)  # stages; None: whole parameters on every rank
RECOMPUTES: tuple[Recompute, ...] = (False, True, False, "selective")
TOLERANCE = 1e-10


@attrs.frozen
class MeshCase:
    """A mesh and the sharding on it (`stage`), a model's layers, and the options and micro-batches of its passes."""

    axes: Mapping[str, int]
    stage: int | None = None
    checkpoint_layers: Recompute = False
    virtual_stages: int = 1
    layers: int = 2
    size: int | None = None
    token_budget: int | None = None
    remove_padding: bool = True
    ring: bool = False
    share_prompts: bool = False

    def __str__(self) -> str:
        mesh = " x ".join(f"{name} {size}" for name, size in self.axes.items())
        sharded = "whole parameters" if self.stage is None else f"sharding stage {self.stage}"
        cut = f"of {self.size}" if self.token_budget is None else f"of at most {self.token_budget} tokens"
        words = f"on a mesh of {mesh}, {sharded}, micro-batches {cut}"
        extras = ", packed" if self.remove_padding else ", padded"
        extras += {"selective": ", all but attention recomputed", True: ", layers recomputed", False: ""}[
            self.checkpoint_layers
        ]
        extras += ", keys around a ring" * self.ring + ", prompts shared" * self.share_prompts
        return words + extras + f", {self.virtual_stages} stages on each rank" * (self.virtual_stages > 1)


# a layout: axes, stage of the sharding, recomputation of layers, pipeline stages on each rank
Settings = tuple[Mapping[str, int], int | None, Recompute, int]
# (example, layout, number of the model) -> the update's result on every rank
Run = Callable[[LawExample, MeshCase, int], list[_UpdateOutcome]]


def meshes(max_ranks: int) -> list[dict[str, int]]:
    """All meshes of axes of 1, 2 or 4 ranks with at most `max_ranks` ranks, and more than one; small ones first.

    The sequence and tensor axes divide the heads between them, the pipeline has a layer for each rank, and one of the
    sequence and context axes is one rank wide.
    """
    sizes = sorted(product((1, 2, 4), repeat=len(AXES)), key=lambda sizes: (math.prod(sizes), sizes[::-1]))
    every: list[dict[str, int]] = [dict(zip(AXES, counts, strict=True)) for counts in sizes]
    fitting = [axes for axes in every if HEADS % (axes["sequence"] * axes["tensor"]) == 0]
    fitting = [axes for axes in fitting if 1 in (axes["sequence"], axes["context"])]
    return [axes for axes in fitting if 1 < _ranks(axes) <= max_ranks]


def _ranks(axes: Mapping[str, int]) -> int:
    return math.prod(axes.values())


def _shards(axes: Mapping[str, int]) -> int:
    """The number of ranks over which dense parameters can be sharded."""
    return axes["shard"] * axes["expert"]


def _models(head: HeadKind, outputs: int, layers: int) -> list[tuple[Any, dict[str, Tensor]]]:
    """Three models in float64, with sizes that not all meshes divide: a Qwen2 with tied embeddings, a Llama without,
    and a GLM-4-MoE with experts from the second layer on, and biases of their routers."""
    from transformers import Glm4MoeConfig, LlamaConfig, Qwen2Config

    from fppo import models
    from fppo.key import Key

    shared: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 12,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,  # far from uniform probabilities
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    of_experts: dict[str, Any] = {
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 4,
        "first_k_dense_replace": 1,
        "head_dim": 4,
    }
    configs = (
        Qwen2Config(**shared, tie_word_embeddings=True),
        LlamaConfig(**shared, tie_word_embeddings=False),
        Glm4MoeConfig(**shared, **of_experts, tie_word_embeddings=False),
    )
    built = [models.build(config, head=head, outputs=outputs) for config in configs]
    return [(model, models.init_params(model, Key(0), torch.float64)) for model in built]


def _runner(make: Callable[..., Any], head: HeadKind, outputs: int = 1) -> Run:
    """The update that `make(forward=, loop=, optimizer=)` returns on the ranks of a layout, for a model with this head
    of `outputs` outputs, as a function of the batch; it returns the whole state.

    With beta_1 = 0 the first moment is the gradient; with eps = 1 the step is smooth where a gradient is near 0.
    """
    from fppo import models
    from fppo.runtime.mesh import Mesh, Sharding
    from fppo.runtime.simulate import simulate
    from fppo.steps.forward import Forward
    from fppo.steps.loop import Loop
    from fppo.steps.micro_batching import MicroBatching
    from fppo.steps.optimizers import adamw
    from fppo.steps.train_state import init_state
    from fppo_kernels.collectives import Axis

    built = {layers: _models(head, outputs, layers) for layers in (2, LAYERS)}
    optimizer = adamw(lambda step: 0.1, betas=(0.0, 0.9), eps=1.0, max_grad_norm=1.0)

    @functools.cache
    def prepared(number: int, layers: int, tensor: int, expert: int) -> models.Prepared:
        return models.prepare(built[layers][number][0], Mesh({"tensor": Axis(tensor), "expert": Axis(expert)}))

    def on_rank(example: LawExample, layout: MeshCase, number: int, mesh: Mesh) -> _UpdateOutcome:
        model, params = built[layout.layers][number]
        model = attrs.evolve(model, checkpoint_layers=layout.checkpoint_layers)
        sharding = None if layout.stage is None else Sharding(stage=layout.stage)
        mesh = attrs.evolve(mesh, sharding=sharding, virtual_stages=layout.virtual_stages, ring=layout.ring)
        cut = prepared(number, layout.layers, mesh["tensor"].size, mesh["expert"].size)  # once, not on every rank
        model = cut.like(model).on(mesh)
        loop = Loop(
            mini_batch_size=min(MINI, len(example.mask)),
            micro_batching=MicroBatching(size=layout.size, token_budget=layout.token_budget),
            weight_mode=example.mode or MODES[0],
            horizon=HORIZON if example.mode == "seq-mean-token-sum-norm" else None,
            balance_rate=0.1 if head == "lm" and model.buffers else 0.0,
        )
        share = "auto" if layout.share_prompts else False
        forward = Forward(model, mesh=mesh, remove_padding=layout.remove_padding, share_prompts=share)
        update = make(forward=forward, loop=loop, optimizer=optimizer)
        state, metrics = update(init_state(models.own_params(model, params, mesh), optimizer), _batch(example))
        grads, params = (models.whole_params(model, x, mesh) for x in (state.opt.mu, state.params))
        return _UpdateOutcome(grads, params, metrics)

    def run(example: LawExample, layout: MeshCase, number: int) -> list[_UpdateOutcome]:
        prepared(number, layout.layers, layout.axes["tensor"], layout.axes["expert"])  # before threads start
        return simulate(layout.axes, partial(on_rank, example, layout, number))

    return run


def _draw(
    axes: Mapping[str, int],
    stage: int | None,
    checkpoint_layers: Recompute,
    virtual_stages: int,
    example: LawExample,
    generator: torch.Generator,
) -> MeshCase:
    """Draw, for a mesh of these `axes` and with a sharding `stage` if they shard, a cut into micro-batches and the
    options of a pass; rows are packed or, if no axis cuts them, maybe padded."""

    def draw(count: int) -> int:
        return int(torch.randint(count, (), generator=generator))

    tokens = example.inputs["attention_mask"].sum().item()
    budget = draw(2) == 1
    return MeshCase(
        axes=axes,
        stage=stage if _shards(axes) > 1 else None,
        checkpoint_layers=checkpoint_layers,
        virtual_stages=virtual_stages,
        layers=LAYERS if axes["pipeline"] * virtual_stages > 2 else 2,
        size=None if budget else 1 + draw(2),
        token_budget=1 + draw(max(int(tokens), 1)) if budget else None,
        remove_padding=axes["sequence"] * axes["context"] * axes["tensor"] > 1 or draw(2) == 1,
        ring=axes["context"] > 1 and draw(2) == 1,
        share_prompts=draw(4) > 0,
    )


def _of_prompts(modes: Sequence[str], rows: int, width: int, seed: int) -> LawExample:
    """Draw ragged rows, up to three of which share a prompt; the seed chooses one of the weight `modes`."""
    example = _example(modes, rows, width, seed)
    first = torch.arange(rows) // 3 * 3
    tokens, attention = (example.inputs[name].clone() for name in ("tokens", "attention_mask"))
    for x in (tokens, attention):
        x[:, :PROMPT] = x[first, :PROMPT]
    return example.put(tokens=tokens, attention_mask=attention)


def _turns(layouts: Sequence[Settings], each: int):
    """Make a function that returns the next `each` layouts, in a cycle, and the number of its call."""
    count = 0

    def turn() -> tuple[int, list[Settings]]:
        nonlocal count
        count += 1
        return count, [layouts[i % len(layouts)] for i in range((count - 1) * each, count * each)]

    return turn


def _one_process(run: Run, example: LawExample, number: int, layers: int = 2) -> _UpdateOutcome:
    axes: dict[str, int] = dict.fromkeys(AXES, 1)
    return run(example, MeshCase(axes, layers=layers, size=len(example.mask)), number)[0]


def _number(axes: Mapping[str, int], count: int) -> int:
    """The index of the model for a layout: the model with experts if the mesh cuts experts, else each model in turn."""
    return 2 if axes["expert"] > 1 else count % 3


def _laws(layouts: Sequence[Settings], each: int, seed: int) -> tuple[Law, ...]:
    turn, again = _turns(layouts, each), _turns(layouts, 1)

    def same_as_one(run: Run, example: LawExample, generator: torch.Generator) -> str | None:
        count, chosen = turn()
        expected = functools.cache(partial(_one_process, run, example))
        for settings in chosen:
            layout, number = _draw(*settings, example, generator), _number(settings[0], count)
            wanted = expected(number, layout.layers)
            try:
                outcomes = run(example, layout, number)
            except Exception as error:
                return f"{layout} (seed {seed}): it raised {type(error).__name__}: {error}"
            for rank, outcome in enumerate(outcomes):
                if reason := _outcomes_differ(wanted, outcome, TOLERANCE):
                    return f"{layout} (seed {seed}): rank {rank}: {reason}, as in one process"
        return None

    def same_bits(run: Run, example: LawExample, generator: torch.Generator) -> str | None:
        count, (settings,) = again()
        if count % 4:  # each runs twice
            return None
        layout, number = _draw(*settings, example, generator), _number(settings[0], count)
        first, second = ([tree.digest(outcome) for outcome in run(example, layout, number)] for _ in range(2))
        for what, bits, others in (
            ("when run again", first, second),
            ("than on rank 0", first, first[:1] * len(first)),
        ):
            for rank, (own, other) in enumerate(zip(bits, others, strict=True)):
                wrong = [path for path, digest in own.items() if other[path] != digest]
                if wrong:
                    return f"{layout} (seed {seed}): rank {rank}: {wrong[0]} has other bits {what}"
        return None

    return (
        Law("layout", "ranks that share rows and parameters in any way do the update of one process", same_as_one),
        Law("same bits", "the same layout gives the same bits, on all ranks", same_bits),
    )


def check_layout_fn(
    make: Callable[..., Any],
    *,
    head: HeadKind = "lm",
    outputs: int = 1,
    modes: Sequence[str] = MODES,
    max_ranks: int = 8,
    each: int | None = 4,
    seed: int = 0,
    name: str | None = None,
) -> None:
    """Check a whole update by the laws of layouts: `laws.check_layout_fn(UpdateCritic, head="value")`.

    `make` is as in `check_update_fn`, on any mesh of at most `max_ranks` ranks: replicate, shard, expert, sequence,
    context, tensor and pipeline axes of 1, 2 and 4 ranks, with whole parameters or every stage of sharding, with layers
    kept, recomputed, or recomputed except for their attention, and with the stages of a pipeline of 2 ranks interleaved
    or not. All ranks have all rows. These are ragged, and some share a prompt, which passes compute once or not. The
    update distributes them over ranks, some of which may get none, and cuts them into any micro-batches.

    In every weight mode of `modes`, gradients, new state and metrics on every rank must equal those of one process, in
    float64, to 1e-10, for dense models and for one with experts. Each example tries the next `each` layouts in an order
    drawn from `seed`; with None all layouts are tried. Raises LawViolation for the first broken law, with the layout
    and the seed.
    """
    layouts: list[Settings] = [
        (axes, stage, RECOMPUTES[(number + place) % len(RECOMPUTES)], virtual)
        for place, stage in enumerate(SHARDINGS)
        for number, axes in enumerate(meshes(max_ranks))
        if _shards(axes) > 1 or stage is None
        for virtual in ((1, 2) if axes["pipeline"] == 2 else (1,))
    ]
    random.Random(seed).shuffle(layouts)  # so that small and large examples meet all kinds
    run = _runner(make, head, outputs)
    examples, seeds = partial(_of_prompts, tuple(modes)), max(3, len(modes))
    each = -(-len(layouts) // (len(SIZES) * seeds)) if each is None else each
    check(
        run,
        _laws(layouts, each, seed),
        examples,
        sizes=SIZES,
        seeds=seeds,
        name=name or fn_name(make),
    )


def check_layout(
    loss_fn: Callable[..., tuple[Tensor, Metrics]] | SelectiveLoss,
    *,
    modes: Sequence[str] = MODES,
    max_ranks: int = 8,
    each: int | None = 4,
    seed: int = 0,
    terms: PolicyTerms | None = None,
) -> None:
    """Check `UpdateActor` with a policy loss by the laws of layouts: `laws.check_layout(my_loss)`.

    `loss_fn(log_probs, old_log_probs, advantages, mask)` returns the loss per token [B, T] and metrics, its scalars
    bound; or it is a `SelectiveLoss`. The default `terms` have one of each kind; routers' choices are replayed or not.
    See `check_layout_fn`. Takes some tens of seconds.
    """
    make, name = _actor_update(loss_fn, terms)
    check_layout_fn(make, modes=modes, max_ranks=max_ranks, each=each, seed=seed, name=name)
