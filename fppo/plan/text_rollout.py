"""The rollout of a plan and the host's memory, as text, and as what JSON holds."""

from __future__ import annotations

import textwrap
from typing import Any

from fppo.plan.case import PlannedSampling
from fppo.plan.host import HostMemory
from fppo.plan.plan import Engines, Plan
from fppo.plan.rollout import PlannedRollout
from fppo.plan.text_values import gib, seconds, table
from fppo.plan.values import GIB

ROLLOUT = (
    "All responses are as long as they may be, each step is launched at once, and decoding reads weights, keys and "
    "values at the memory's rate: estimates."
)
HOST = (
    "Weights on their way and copies for the checkpoint may be there together. The process itself is a usual size; a "
    "node has as many as it has GPUs, and its controller a batch of columns more."
)


def rollout_lines(plan: Plan | Engines, *, width: int) -> list[str]:
    """The rollout of a plan, for a terminal."""
    sampling, rollout = plan.case.sampling, plan.rollout
    if sampling is None or rollout is None:
        return []
    return [*_head(sampling, rollout, width), *_memory(rollout), *_times(sampling, rollout, width)]


def _head(sampling: PlannedSampling, rollout: PlannedRollout, width: int) -> list[str]:
    kind = "vLLM" if sampling.engine == "vllm" else "the embedded engine"
    gpus = f" on {rollout.gpus} GPUs each" if rollout.gpus > 1 else ""
    each = "engine has" if rollout.engines == 1 else f"of {rollout.engines:,} engines{gpus} has"
    words = f"rollout by {kind}: {'the' if rollout.engines == 1 else 'each'} {each} {rollout.rows:,} rows, of which "
    return textwrap.wrap(f"{words}{rollout.together:,} decode together", width)


def _memory(rollout: PlannedRollout) -> list[str]:
    rows = [(kind, [gib(size)]) for kind, size in rollout.memory.items()]
    lines = ["memory of a GPU that samples, GiB", *table(["rollout"], rows, ("together", [gib(rollout.total)]))]
    return [*lines, f"{gib(rollout.stays)} GiB of it stay beside updates"] if rollout.stays else lines


def _times(sampling: PlannedSampling, rollout: PlannedRollout, width: int) -> list[str]:
    tokens = f"prompts {seconds(rollout.prefill)} s, responses {seconds(rollout.decode)} s"
    gathered = f"a rank sends others {gib(rollout.gathered)} GiB" if rollout.gathered else ""
    sent = f"an engine is sent {gib(rollout.sent)} GiB" if rollout.sent else ""
    weights = " and ".join(x for x in (gathered, sent) if x) or "the engine has those that are trained"
    took = f" ({seconds(rollout.sending)} s)" if rollout.sending else ""
    return textwrap.wrap(f"estimated: {tokens}; weights: {weights}{took}. {ROLLOUT}", width)


def host_lines(host: HostMemory | None, *, width: int) -> list[str]:
    """The memory of the host, for a terminal."""
    if host is None:
        return []
    columns = (host.rest, {**host.rest, **host.starting}, {**host.rest, **host.meanwhile})
    kinds = dict.fromkeys(kind for each in columns for kind, size in each.items() if size)
    rows = [(kind, [gib(each[kind]) if kind in each else "" for each in columns]) for kind in kinds]
    lines = table(["at rest", "starting", "saving"], rows, ("together", [gib(sum(x.values())) for x in columns]))
    return ["host memory of a rank's process, GiB", *lines, *textwrap.wrap(HOST, width)]


def engines_report(engines: Engines, *, width: int = 100) -> str:
    """What the engines of a pool do and hold, for a terminal."""
    rollout, memory = engines.rollout, engines.case.hardware.memory
    fits = "It fits" if engines.fits else "It does not fit"
    verdict = f"{fits}: {rollout.total / GIB:,.1f} of {memory / GIB:,.1f} GiB."
    sent = f"The controller sends the policy after each update: to {rollout.engines:,} engines "
    sent += f"{rollout.engines * rollout.sent / GIB:,.1f} GiB."
    lines = [*rollout_lines(engines, width=width), verdict, *textwrap.wrap(sent, width), ""]
    return "\n".join([*lines, *host_lines(engines.host, width=width)])


def engines_summary(engines: Engines) -> dict[str, Any]:
    """Summary as JSON, in bytes and seconds."""
    return {
        "fits": engines.fits,
        "parameter_bytes": engines.rollout.sent,
        "sent_bytes": engines.rollout.engines * engines.rollout.sent,
        "rollout": rollout_summary(engines.rollout),
        "host": host_summary(engines.host),
    }


def host_summary(host: HostMemory | None) -> dict[str, Any] | None:
    """The host as JSON, in bytes."""
    if host is None:
        return None
    return {
        "rest_bytes": host.rest,
        "starting_bytes": host.starting,
        "saving_bytes": host.meanwhile,
        "needs_bytes": host.needs,
    }


def rollout_summary(rollout: PlannedRollout | None) -> dict[str, Any] | None:
    """Summary as JSON, in bytes and seconds."""
    if rollout is None:
        return None
    return {
        "engines": rollout.engines,
        "gpus": rollout.gpus,
        "rows": rollout.rows,
        "together": rollout.together,
        "memory_bytes": rollout.memory,
        "total_bytes": rollout.total,
        "stays_bytes": rollout.stays,
        "prefill_seconds": rollout.prefill,
        "decode_seconds": rollout.decode,
        "gathered_bytes": rollout.gathered,
        "sent_bytes": rollout.sent,
        "sending_seconds": rollout.sending,
    }
