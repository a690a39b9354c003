"""Sizes and rates of a step, by the names that verl logs."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from fppo import devices, metrics
from fppo.batch import Experience
from fppo.key import Key
from fppo.metrics import Metric, Metrics
from fppo.models import flops
from fppo.pipeline.pretrain import explained_variance
from fppo.pipeline.program import UpdateStage
from fppo.pipeline.timing import now
from fppo.runtime.mesh import AXES, Mesh, gather_objects, ranks_on
from fppo.runtime.watch import Traffic
from fppo.steps.forward import row_lengths
from fppo.steps.outputs import Forward
from fppo.steps.train_state import TrainState

GIB = 1024**3


@attrs.frozen(kw_only=True)
class Measured:
    """Update by another stage, and report the FLOPs per second that its model's arithmetic needs, and their share of
    the device's peak.

    Every rank holds the whole batch. perf/tflops/ROLE is in 1e12 per second and rank. perf/mfu/ROLE is nan, a mean of
    nothing, if the peak is unknown. Both count the work that is done: tokens that rows share count once.
    """

    stage: UpdateStage
    role: str
    forward: Forward
    epochs: int

    def __call__(self, state: TrainState, batch: Experience, *, key: Key, donate: bool) -> tuple[TrainState, Metrics]:
        lengths, heads, role = row_lengths(batch), int(batch.response_mask.sum()), self.role
        start = now()
        after, report = self.stage(state, batch, key=key, donate=donate)
        seconds = now() - start
        saved = report.get(f"perf/shared_flops/{role}", metrics.mean(0.0))
        assert isinstance(saved, metrics.Mean)
        needed = self.epochs * flops.train_flops(self.forward.model, lengths, head_tokens=heads)
        needed *= 1.0 - (saved.total / saved.count).item()
        done = needed / ranks_on(self.forward.mesh, AXES)
        share = flops.mfu(done, seconds, batch.tokens.device)
        rates = {
            f"perf/tflops/{role}": metrics.mean(done / seconds / 1e12),
            f"perf/mfu/{role}": metrics.mean(share or 0.0, float(share is not None)),
        }
        return after, report | rates


def batch_metrics(batch: Experience, *, max_tokens: int) -> Metrics:
    """Rewards, advantages, returns, values and lengths of a batch of episodes. `max_tokens` is the response limit.

    critic/... cover what the losses learn from: the tokens in the loss mask, and the whole rewards of rows with such a
    token. Lengths are of all rows.
    """
    mask = batch.response_mask
    width = mask.shape[1]
    prompt = batch.attention_mask[:, :-width].sum(1)
    response = batch.attention_mask[:, -width:].sum(1)
    rewards, learned = batch.token_rewards.sum(1), mask.any(1)
    cut = torch.tensor([reason == "length" for reason in batch.finish], device=mask.device)
    report = {
        **_spread("critic/rewards", rewards, learned),
        **_spread("critic/advantages", batch.advantages, mask),
        **_spread("critic/returns", batch.returns, mask),
        **_spread("response_length", response),
        **_spread("prompt_length", prompt),
        "response_length/clip_ratio": metrics.masked_mean(cut.double(), torch.ones_like(cut)),
        "response_length/limit": metrics.mean(float(max_tokens)),
        "rollout/repeated": _repeated(batch.tokens[:, -width:], mask),
        **_alike(batch.outcome, batch.groups),
    }
    if batch.values is not None:
        report |= _spread("critic/values", batch.values, mask)
        report["critic/vf_explained_var"] = explained_variance(batch.values, batch.returns, mask)
    return report


def _repeated(tokens: Tensor, mask: Tensor) -> Metric:
    """The share of runs of three tokens [B, T], all in the mask, that were in their row before."""
    three = torch.stack([tokens[:, :-2], tokens[:, 1:-1], tokens[:, 2:]], 2).long()
    whole = mask[:, :-2] & mask[:, 1:-1] & mask[:, 2:]
    apart = -1 - torch.arange(whole.shape[1], device=tokens.device).expand_as(whole)  # not equal to any other
    names = (three[..., 0] << 42 | three[..., 1] << 21 | three[..., 2]).where(whole, apart).sort(1).values
    return metrics.Mean((names[:, 1:] == names[:, :-1]).sum().double(), whole.sum().double())


def _alike(scores: Tensor, groups: Tensor) -> Metrics:
    """The share of groups of several scored rows whose scores [B] are all equal; no metric without such a group."""
    known = ~scores.isnan()
    names, place = groups[known].unique(return_inverse=True)
    ends = {
        how: scores.new_zeros(len(names)).scatter_reduce(0, place, scores[known], how, include_self=False)
        for how in ("amin", "amax")
    }
    several = place.bincount(minlength=len(names)) > 1
    if not several.any():
        return {}
    return {"rollout/groups/alike": metrics.masked_mean(ends["amin"] == ends["amax"], several)}


def token_metrics(batch: Experience) -> Metrics:
    """The number of tokens that a step's passes read."""
    return {"perf/total_num_tokens": metrics.mean(batch.attention_mask.sum())}


def _spread(name: str, x: Tensor, mask: Tensor | None = None) -> Metrics:
    mask = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
    return {
        f"{name}/mean": metrics.masked_mean(x, mask),
        f"{name}/max": metrics.masked_max(x, mask),
        f"{name}/min": metrics.masked_min(x, mask),
    }


def memory_metrics() -> dict[str, float]:
    """Peak memory so far in GiB: of this process, and of its accelerator where there is one."""
    unit = 1 if sys.platform == "darwin" else 1024
    report = {"perf/cpu_memory_used_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB}
    if devices.in_use() is not None:
        report["perf/max_memory_allocated_gb"] = torch.accelerator.max_memory_allocated() / GIB
        report["perf/max_memory_reserved_gb"] = torch.accelerator.max_memory_reserved() / GIB
    return report


def gauges(*, mesh: Mesh, device: torch.device, traffic: Callable[[], dict[str, Traffic]]) -> dict[str, float]:
    """Memory, and the traffic on each axis: the largest of all ranks; with several ranks also the memory of each.

    perf/comm_s/AXIS are the seconds that a rank waited in collectives, perf/comm_gb/AXIS the GiB that it sent.
    """
    memory = memory_metrics()
    comm = {axis: (sent.seconds, sent.bytes / GIB) for axis, sent in traffic().items()}
    sizes = {f"perf/comm_gb/{axis}": size for axis, (_, size) in comm.items()}
    waits = {f"perf/comm_s/{axis}": seconds for axis, (seconds, _) in comm.items()}
    every = gather_objects(memory | waits | sizes, mesh, AXES, device)
    largest = {name: max(each[name] for each in every) for name in every[0]}
    if len(every) == 1:
        return largest
    return largest | {f"{name}/rank_{rank}": each[name] for rank, each in enumerate(every) for name in memory}
