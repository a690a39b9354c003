"""Training runs as values, and the protocol's verbs as pure functions of them.

    run = create_run(base, Adapters(rank=8, seed=0))
    run, outputs = forward_backward(run, data, Loss("cross_entropy"))
    run, metrics = optim_step(run, StepParams(learning_rate=1e-4))

A run is never changed: a verb returns another one, which shares what did not change. So a snapshot is the run itself,
and runs over one base do not touch each other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import attrs
import torch
from torch import Tensor

from fppo.key import Key
from fppo.metrics import report
from fppo.models import heads, lora
from fppo.models.adapted import Lora
from fppo.models.model import Model, Params
from fppo.runtime.mesh import device_of
from fppo.serve.tinker.data import DataRows, Datum, rows_of
from fppo.serve.tinker.losses import Loss
from fppo.serve.tinker.passes import PassResult, run_data
from fppo.serve.tinker.together import RunPass, hindrance, run_together
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.muon import muon
from fppo.steps.optimizers import Optimizer, adamw
from fppo.steps.outputs import Forward
from fppo.steps.schedules import schedule
from fppo.steps.train_state import TrainState, init_state, optimizer_step
from fppo_kernels.table import Kernels

PASS_TOKENS = 16384  # of a forward and backward pass, as in `fppo train`
F32 = torch.float32  # the dtype of what is trained, unless the base is wider
_ATTENTION = ("attn", "attention", "mixer")  # parts of the paths of weights that mix tokens


@attrs.frozen(eq=False)
class BaseModel:
    """A model that is held once for all its runs, with how passes over it run.

    `params` are those of `model`, plain or quantised. `tokenizer_id` names its tokenizer to clients; data have at most
    `limit` tokens. Passes run by `kernels`, in micro-batches that change no result but the order of sums.
    """

    name: str
    model: Model
    params: Params
    tokenizer_id: str
    limit: int | None = None
    kernels: Kernels = attrs.field(factory=Kernels.named)
    micro_batching: MicroBatching = attrs.field(factory=lambda: MicroBatching(token_budget=PASS_TOKENS))


@attrs.frozen
class Adapters:
    """A choice of trained weights: low-rank adapters on some kinds of weights, scaled by alpha / rank; rank 0: all
    weights.

    `unembed` is the vocabulary head. If the head is tied to the embeddings, both have the adapter. Raises ValueError
    for a rank below 0, and for adapters of no kind of weights.
    """

    rank: int
    seed: int = 0
    attention: bool = True
    mlp: bool = True
    unembed: bool = True
    alpha: float = 32.0

    def __attrs_post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"rank={self.rank}: give 1 or more, or 0 to train all weights")
        if self.rank and not (self.attention or self.mlp or self.unembed):
            raise ValueError("train_attn, train_mlp and train_unembed are all false: nothing would be trained")


@attrs.frozen(eq=False)
class TrainingRun:
    """A run: a base, the trained parameters with their optimizer, and gradients since the last step, if any."""

    base: BaseModel
    model: Model  # the base's, adapted if adapters are trained
    state: TrainState
    grads: Params | None
    adapters: Adapters
    optimizer: str


@attrs.frozen(eq=False)
class PassOutputs:
    """Results of a pass: tensors for each datum, and the request's metrics.

    Each datum has "logprobs", of all its targets, [T] or [T, K] float32; cross_entropy also "elementwise_loss". Metrics
    are named with how they combine over requests: "loss:sum", and "custom/...:sum" or ":mean" of custom losses.
    """

    per_datum: Sequence[Mapping[str, Tensor]]
    metrics: Mapping[str, float]


@attrs.frozen
class StepParams:
    """The numbers of one optimizer step, with the protocol's defaults; `grad_clip_norm` 0 does not clip.

    Raises ValueError for numbers that are not finite, or out of range.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def __attrs_post_init__(self) -> None:
        for name, value in attrs.asdict(self).items():
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name}={value}: give a finite number, 0 or more")
        for name in ("beta1", "beta2"):
            if getattr(self, name) >= 1:
                raise ValueError(f"{name}={getattr(self, name)}: give less than 1")
        if self.eps == 0:
            raise ValueError("eps=0: give more than 0, as 1e-12")


def adamw_of(step: StepParams, base: BaseModel) -> Optimizer:
    """torch.optim.AdamW with a step's numbers, its norm clipped before."""
    return adamw(
        schedule("constant", step.learning_rate),
        betas=(step.beta1, step.beta2),
        eps=step.eps,
        weight_decay=step.weight_decay,
        max_grad_norm=step.grad_clip_norm or None,
        kernel=base.kernels.adamw,
    )


def muon_of(step: StepParams, base: BaseModel) -> Optimizer:
    """`steps.muon`, whose momentum of matrices is beta1; AdamW with the step's numbers for other parameters."""
    return muon(
        schedule("constant", step.learning_rate),
        momentum=step.beta1,
        betas=(step.beta1, step.beta2),
        eps=step.eps,
        weight_decay=step.weight_decay,
        max_grad_norm=step.grad_clip_norm or None,
        kernel=base.kernels.adamw,
    )


OPTIMIZERS: Mapping[str, Callable[[StepParams, BaseModel], Optimizer]] = MappingProxyType(
    {"adamw": adamw_of, "muon": muon_of}
)


def targets_of(model: Model, adapters: Adapters) -> tuple[str, ...]:
    """The paths of the weights that adapters are on, by their kinds.

    Raises ValueError for a model without weights of a kind, if nothing else is trained.
    """
    head = heads.vocabulary_head(model)[0]
    linear = [name for name in lora.linear_weights(model) if name != head]
    mixing = [name for name in linear if any(part in name for part in _ATTENTION)]
    chosen = [name for name in linear if (adapters.attention if name in mixing else adapters.mlp)]
    chosen += [head] if adapters.unembed else []
    if not chosen:
        raise ValueError(f"model type {model.config.model_type!r} has no weights of the kinds that are to be trained")
    return tuple(name.removesuffix(".weight") for name in chosen)


def create_run(base: BaseModel, adapters: Adapters, optimizer: str = "adamw") -> TrainingRun:
    """Begin a run. Adapters are drawn by their seed, and add nothing before the first step; the base is shared.

    With rank 0 all weights are trained, in float32 or wider; they are the base's own until the first step. Raises
    ValueError for an unknown optimizer, and for what adapters or full training do not support.
    """
    if optimizer == "dimuon":
        raise ValueError(
            "optimizer 'dimuon': its formula is not published, and fppo does not guess it; give 'adamw', or 'muon' for "
            "fppo's Muon"
        )
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {optimizer!r}; there are {', '.join(OPTIMIZERS)}")
    model, params = base.model, base.params
    if adapters.rank:
        spec = Lora(adapters.rank, adapters.alpha, targets_of(model, adapters))
        wide = functools.reduce(torch.promote_types, (x.dtype for x in params.values() if x.is_floating_point()), F32)
        model, params = lora.adapt(model, params, spec, key=Key(adapters.seed), dtype=wide)
    elif model.forms:
        raise ValueError(f"base {base.name!r} is quantised: train adapters, of rank 1 or more")
    else:
        params = {name: x.to(torch.promote_types(x.dtype, F32)) for name, x in params.items()}
    state = init_state(params, OPTIMIZERS[optimizer](StepParams(), base))
    return TrainingRun(base, model, state, None, adapters, optimizer)


def forward_of(run: TrainingRun) -> Forward:
    """The `Forward` of a run: its model, with the base's kernels."""
    return Forward(run.model, run.base.kernels)


def forward(run: TrainingRun, data: Sequence[Datum], loss: Loss) -> PassOutputs:
    """Log-probs of the data's targets, and their loss. Raises ValueError, naming the datum, for data that no pass
    takes."""
    rows, result, _ = _run(run, data, loss, backward=False)
    return _outputs(data, loss, rows, result)


def forward_backward(run: TrainingRun, data: Sequence[Datum], loss: Loss) -> tuple[TrainingRun, PassOutputs]:
    """Add the gradient of the data's summed loss to the run's. Returns the run and what `forward` returns.

    Gradients are summed over all data since the last step: request by request, and within a request over micro-batches
    in a fixed order. Raises ValueError as `forward` does.
    """
    rows, result, grads = _run(run, data, loss, backward=True)
    return attrs.evolve(run, grads=grads), _outputs(data, loss, rows, result)


def forward_backward_together(
    asked: Sequence[tuple[TrainingRun, Sequence[Datum], Loss]],
) -> list[tuple[TrainingRun, PassOutputs]]:
    """`forward_backward` of several runs of one base, in joint passes: products with the base's weights are computed
    once for all data. Results are those of each run alone, up to rounding.

    Raises ValueError as `forward` does, and for a run that takes part in no joint pass (`together_hindrance`).
    """
    base = asked[0][0].base
    for run, _, _ in asked:
        if run.base is not base:
            raise ValueError(f"runs of two bases, {base.name!r} and {run.base.name!r}, have no joint pass")
        if (why := together_hindrance(run)) is not None:
            raise ValueError(f"a run has no joint pass, since {why}: call forward_backward")
    rows = [_rows(run, data, loss) for run, data, loss in asked]
    results = run_together(
        [
            RunPass(run.model, run.state.params, data, own, loss, run.grads)
            for (run, data, loss), own in zip(asked, rows, strict=True)
        ],
        forward=Forward(base.model, base.kernels),
        params=base.params,
        micro_batching=base.micro_batching,
    )
    return [
        (attrs.evolve(run, grads=grads), _outputs(data, loss, own, result))
        for (run, data, loss), own, (result, grads) in zip(asked, rows, results, strict=True)
    ]


def together_hindrance(run: TrainingRun) -> str | None:
    """The reason why a run takes part in no joint pass; None if it does."""
    return hindrance(run.model)


def _rows(run: TrainingRun, data: Sequence[Datum], loss: Loss) -> DataRows:
    """The data as rows on the run's device."""
    if run.model.vision is None and (seeing := [i for i, datum in enumerate(data) if datum.images is not None]):
        raise ValueError(f"datum {seeing[0]} has images, and base {run.base.name!r} takes none")
    vocabulary = run.model.whole_shapes[heads.embedding_name(run.model)][0]
    device = device_of(run.state.params)
    return rows_of(data, loss, vocabulary=vocabulary, limit=run.base.limit, device=device)


def _run(
    run: TrainingRun, data: Sequence[Datum], loss: Loss, *, backward: bool
) -> tuple[DataRows, PassResult, Params | None]:
    rows = _rows(run, data, loss)
    result, grads = run_data(
        run.state.params,
        data,
        rows,
        loss,
        forward=forward_of(run),
        micro_batching=run.base.micro_batching,
        grads=run.grads,
        backward=backward,
    )
    return rows, result, grads


def _outputs(data: Sequence[Datum], loss: Loss, rows: DataRows, result: PassResult) -> PassOutputs:
    metrics = {"loss:sum": float(result.loss)}
    for key, total in result.sums.items():
        metrics[key] = float(total) / (len(data) if key.endswith(":mean") else 1)
    fields = {"logprobs": rows.of(result.log_probs.float().cpu(), data)}
    if loss.name == "cross_entropy" and result.per_token is not None:
        fields["elementwise_loss"] = rows.of(result.per_token.float().cpu(), data)
    each = zip(*fields.values(), strict=True)
    return PassOutputs([dict(zip(fields, values, strict=True)) for values in each], metrics)


def optim_step(run: TrainingRun, step: StepParams) -> tuple[TrainingRun, Mapping[str, float]]:
    """Update a run by its gradients, and drop them. Returns the run, and the metrics "grad_norm" (before clipping),
    "lr" and "skipped": 1 if the norm was not finite, so that nothing changed.

    Raises ValueError for a run without gradients.
    """
    if run.grads is None:
        raise ValueError("optim_step without gradients: call forward_backward first, and again after every step")
    optimizer = OPTIMIZERS[run.optimizer](step, run.base)
    state, metrics = optimizer_step(run.state, run.grads, optimizer=optimizer, fixed=run.model.untrained_params)
    return attrs.evolve(run, state=state, grads=None), report(metrics)


def with_weights(run: TrainingRun, saved: TrainState, *, optimizer: bool) -> TrainingRun:
    """The run with saved weights, and with the saved optimizer's state or a fresh one; its gradients are dropped.

    Raises ValueError for weights of other names or shapes, and for the state of another optimizer.
    """
    own = {name: x.shape for name, x in run.state.params.items()}
    other = {name: x.shape for name, x in saved.params.items()}
    if own != other:
        wrong = sorted(name for name in own.keys() | other.keys() if own.get(name) != other.get(name))
        raise ValueError(
            f"the weights are of another run: {wrong[0]} is {_shape(other, wrong[0])} in them, {_shape(own, wrong[0])} "
            "in this one; load them into a run of the same base, rank and kinds of weights"
        )
    if not optimizer:
        state = init_state(dict(saved.params), OPTIMIZERS[run.optimizer](StepParams(), run.base))
        return attrs.evolve(run, state=state, grads=None)
    if type(saved.opt) is not type(run.state.opt):
        raise ValueError(f"the saved optimizer is not {run.optimizer!r}: load the weights without it")
    return attrs.evolve(run, state=saved, grads=None)


def _shape(shapes: Mapping[str, torch.Size], name: str) -> str:
    return str(list(shapes[name])) if name in shapes else "absent"


def sampling_params(run: TrainingRun) -> tuple[Model, Params]:
    """The model and the parameters that an engine decodes with: an adapter's factors, whose base the model holds, or
    all weights. They are the run's own, and do not change when it continues."""
    return run.model, run.state.params
