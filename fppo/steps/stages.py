"""Passes of a model on a pipeline axis, whose stages run micro-batches in the order of a schedule."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, get_args

import attrs
import torch
from torch import Tensor

from fppo import metrics
from fppo.metrics import Metric, Metrics
from fppo.models.codes import is_coded
from fppo.models.spans import stage_of
from fppo.runtime.offload import OnHost
from fppo.runtime.pipeline import StageFn, Wire, pipeline_forward, pipeline_value_and_grad
from fppo.runtime.schedule import MakeSchedule, all_forward
from fppo.steps.outputs import Forward
from fppo.steps.sharded import Gathered
from fppo.steps.train_state import Params
from fppo_kernels.collectives import Axis, broadcast

# fn(params, micro_batch, *, forward, received) of one stage: returns its output, or the result on the last stage
Pass = Callable[..., Any]


def stage_outputs(
    fn: Pass,
    params: Params | Gathered | OnHost,
    micro_batches: Sequence[Any],
    *,
    forward: Forward,
    lengths: Sequence[int],
    shapes: Sequence[Sequence[int]],
) -> list[Tensor]:
    """The outputs of the last stage for each micro-batch, on all ranks, without gradients; `shapes` are their shapes.

    `lengths` are the numbers of tokens whose hidden states pass from stage to stage, one for each micro-batch. Results
    are float32, or float64 for float64 hidden states.
    """
    axis, wires = forward.mesh["pipeline"], _wires(params, forward, lengths)
    schedule = all_forward(axis.size, len(micro_batches), len(forward.model.spans))
    run = _on_stages(fn, micro_batches, forward)
    results = pipeline_forward(run, params, schedule, axis=axis, wires=wires.__getitem__)
    sizes = [math.prod(shape) for shape in shapes]
    dtype = torch.promote_types(wires[0].dtype, torch.float32)
    flat = torch.empty(sum(sizes), dtype=dtype, device=wires[0].device)
    if results:
        flat = torch.cat([x.to(dtype).flatten() for x in results])
    every = broadcast(flat, axis, source=axis.size - 1).split(sizes)
    return [x.view(tuple(shape)) for x, shape in zip(every, shapes, strict=True)]


def stage_gradients(
    fn: Pass,
    params: Params | Gathered,
    micro_batches: Sequence[Any],
    *,
    forward: Forward,
    lengths: Sequence[int],
    make_schedule: MakeSchedule,
    dtypes: Sequence[torch.dtype],
) -> tuple[Any, Metrics]:
    """This rank's share of the gradient of the last stage's summed losses, in `dtypes`, and the metrics on all ranks.
    The last stage returns (0-d loss, metrics)."""
    axis, wires = forward.mesh["pipeline"], _wires(params, forward, lengths)
    reports, grads = pipeline_value_and_grad(
        _on_stages(fn, micro_batches, forward),
        params,
        make_schedule(axis.size, len(micro_batches), len(forward.model.spans)),
        axis=axis,
        wires=wires.__getitem__,
        dtypes=dtypes,
    )
    own = metrics.merge(*(report for _, report in reports))
    return grads, _metrics_of_last(own, axis, wires[0].device)


def _on_stages(fn: Pass, micro_batches: Sequence[Any], forward: Forward) -> StageFn:
    """Adapt a pass to a function of the stage and the index of the micro-batch."""
    ranks = forward.mesh["pipeline"].size
    own = [attrs.evolve(forward, model=stage_of(forward.model, number)) for number in range(len(forward.model.spans))]

    def run(params: Any, stage: int, received: Tensor | None, micro: int) -> Any:
        return fn(params, micro_batches[micro], forward=own[stage // ranks], received=received)

    return run


def _wires(params: Params | Gathered | OnHost, forward: Forward, lengths: Sequence[int]) -> list[Wire]:
    """The shapes, dtypes and devices of what passes between stages, one `Wire` for each micro-batch: hidden states [N,
    H], with N from `lengths`."""
    model = forward.model
    tensors = model.joined(params if isinstance(params, dict) else params.params)
    x = next(x for name, x in tensors.items() if name.startswith(model.prefix) and not is_coded(name))
    device = params.lane.device if isinstance(params, OnHost) else x.device
    return [Wire((length, model.config.hidden_size), model.compute_dtype or x.dtype, device) for length in lengths]


def _metrics_of_last(report: Metrics, axis: Axis, device: torch.device) -> Metrics:
    """The metrics of the axis's last rank, on all ranks. Their names travel as text."""
    source = axis.size - 1

    def shared(x: Tensor) -> Tensor:
        return broadcast(x.to(device), axis, source=source)

    named = [[name, type(metric).__name__, [list(x.shape) for x in metric]] for name, metric in report.items()]
    text = json.dumps(named).encode() if named else b""
    own = [value.to(device, torch.float64).flatten() for metric in report.values() for value in metric]
    size, count = shared(torch.tensor([len(text), sum(map(len, own))])).tolist()
    letters, values = torch.empty(size, dtype=torch.uint8), torch.empty(count, dtype=torch.float64)
    if axis.rank == source:
        letters = torch.tensor(list(text), dtype=torch.uint8)
        values = torch.cat(own) if own else values
    described = json.loads(bytes(shared(letters).tolist()) or b"[]")
    shapes = [torch.Size(shape) for _, _, each in described for shape in each]
    numbers = iter(shared(values).split([shape.numel() for shape in shapes]))
    kinds: dict[str, type[Metric]] = {kind.__name__: kind for kind in get_args(Metric)}
    return {name: kinds[kind](*(next(numbers).view(shape) for shape in each)) for name, kind, each in described}
