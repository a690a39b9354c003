"""The settings of meshes of processes, and of where roles run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from fppo.fields import (
    MOST_RANKS,
    MOST_SECONDS,
    MOST_WORKERS,
    Problem,
    Problems,
    Table,
    above,
    at_least,
    at_most,
    nonempty,
    setting,
    wrong_values,
)
from fppo.settings.values import read_section

HERE = "here"  # the process that reads the settings
AXES = ("pipeline", "replicate", "shard", "expert", "sequence", "context", "tensor")
MACHINE = ("processes", "local")  # clusters of one machine


@attrs.frozen(kw_only=True)
class AxesSettings:
    """The axes of a mesh of processes."""

    replicate: int = setting(1, at_least(1))
    """Groups of ranks with the same parameters and other rows."""
    shard: int | None = setting(None, at_least(1))
    """Ranks over which parameters, gradients and moments are cut (FSDP); None: all that the other axes leave."""
    expert: int = setting(1, at_least(1))
    """Ranks with other rows over which a mixture's experts are cut, and which send each other tokens."""
    sequence: int = setting(1, at_least(1))
    """Ranks over which packed sequences are cut (Ulysses); it must divide the attention heads."""
    context: int = setting(1, at_least(1))
    """Ranks to which packed sequences are dealt in blocks of equal work; they may be more than the attention heads."""
    ring: bool = setting(False)
    """Hand keys and values around the context axis, for less memory and more time; else gather them for each layer."""
    tensor: int = setting(1, at_least(1))
    """Ranks over which heads, inner widths and the vocabulary are cut; it must divide all but the last."""
    pipeline: int = setting(1, at_least(1))
    """Ranks over which a model's layers are cut: each runs a stage of them, and sends what comes out to the next."""
    virtual_stages: int = setting(1, at_least(1))
    """Stages of each pipeline rank, run by turns: with more it waits less and sends more; the layers must suffice."""

    @property
    def others(self) -> int:
        """The ranks of all axes but shard."""
        return self.pipeline * self.replicate * self.expert * self.sequence * self.context * self.tensor

    def sizes(self, shard: int) -> dict[str, int]:
        """Every axis and its size, with the given size of `shard`. Ranks of the last axis are neighbours."""
        inside = {"expert": self.expert, "sequence": self.sequence, "context": self.context, "tensor": self.tensor}
        return {"pipeline": self.pipeline, "replicate": self.replicate, "shard": shard, **inside}


@attrs.frozen(kw_only=True)
class MeshSettings(AxesSettings):
    """How a run is spread over processes: `fppo train --nproc N` or torchrun starts pipeline * replicate * shard *
    expert * sequence * context * tensor."""

    stage: Literal[1, 2, 3] = setting(3)
    """When layers are gathered: 3, for each use; 2, kept until the backward pass; 1, once for a mini-batch."""
    reduce_dtype: Literal["float32", "bfloat16"] = setting("float32")
    """The dtype in which gradients are added up over ranks."""
    prefetch: bool = setting(True)
    """Gather the next layer while one runs, and embeddings and head once for all passes of a mini-batch."""
    timeout: float = setting(600.0, above(0), at_most(MOST_SECONDS))
    """Seconds that a collective waits for the other ranks before the run ends with an error."""

    @property
    def least_ranks(self) -> int:
        """The smallest number of processes for this mesh, where a `shard` that is not set counts as 1."""
        return self.others * (self.shard or 1)


@attrs.frozen(kw_only=True)
class RoleSettings:
    """The pool of each role."""

    actor: str = setting(HERE, nonempty("give a pool, or here"))
    """The pool that trains the policy, and samples from it; here: the controller's own process."""
    critic: str = setting(HERE, nonempty("give a pool, or here"))
    """The pool that trains the critic."""
    reference: str | None = setting(None)
    """The pool of the reference; None: the actor's."""
    teacher: str = setting(HERE, nonempty("give a pool, or here"))
    """The pool of the teacher."""
    rollout: str | None = setting(None)
    """The pool that samples, of which each rank is an engine of its own; None: where the actor is."""
    reward: str = setting(HERE, nonempty("give a pool, or here"))
    """The pool of the reward model."""


@attrs.frozen(kw_only=True)
class EngineSettings:
    """How the engines of the pool that samples share their work."""

    rows: int = setting(64, at_least(1))
    """Rows that an engine answers together: fewer are dealt more evenly, more decode faster. Bits depend on them."""
    restarts: int = setting(3, at_least(0))
    """How often engines that were lost are started again, while the others go on."""


@attrs.frozen(kw_only=True)
class PlacementSettings:
    """Roles on processes of their own, under one controller: pools of ranks, and who is in which."""

    cluster: str = setting("processes", nonempty("give processes, local, or the address of a Ray cluster"))
    """Where pools are: processes, of this machine; local, a Ray cluster made here; or the address of a Ray cluster."""
    patience: float = setting(600.0, above(0), at_most(MOST_SECONDS))
    """Seconds that a call to a pool may take, and that the cluster has to make room for it."""
    restarts: int = setting(3, at_least(0))
    """How often the pools are started again, from the last checkpoint, after one has lost a rank."""
    pools: Table = setting(dict)
    """Pools by name, each a mesh of its own: {value = {ranks = 2, gpus = 1, shard = 2}}."""
    roles: RoleSettings = setting(RoleSettings)
    """Who runs where."""
    engines: EngineSettings = setting(EngineSettings)
    """How engines share their work."""


@attrs.frozen(kw_only=True)
class Pool(AxesSettings):
    """Ranks of one mesh, as the settings describe them."""

    ranks: int = setting(1, at_least(1), at_most(MOST_RANKS))
    """Its processes."""
    gpus: float = setting(0.0, at_least(0))
    """GPUs of each rank."""
    threads: int | None = setting(None, at_least(1), at_most(MOST_WORKERS))
    """Threads of each rank, on which bits depend; None: all of a machine share its cores."""

    @property
    def axes(self) -> dict[str, int]:
        """Every axis and its size. Ranks of the last axis are neighbours."""
        return self.sizes(self.shard or max(1, self.ranks // self.others))

    @property
    def mesh(self) -> dict[str, Any]:
        """The pool's settings of its mesh (sizes of axes, virtual stages, ring), by the names of `MeshSettings`."""
        return {**self.axes, "virtual_stages": self.virtual_stages, "ring": self.ring}

    @property
    def problem(self) -> str | None:
        """A text if the sizes of the pool's axes do not multiply to its ranks; None if they do."""
        if math.prod(self.axes.values()) == self.ranks:
            return None
        axes = ", ".join(f"{name} {getattr(self, name) or 'unset'}" for name in AXES)
        return f"its axes ({axes}) do not multiply to its {self.ranks} ranks"


def pools_of(placement: PlacementSettings) -> dict[str, Pool]:
    """The pools by name; their tables in the settings must be valid."""
    return {name: read_section(Pool, table)[0] for name, table in placement.pools.items()}


def places_of(placement: PlacementSettings) -> dict[str, str]:
    """The pool of each role that is in one, not in the controller's process."""
    roles = placement.roles
    places = {"actor": roles.actor, "critic": roles.critic, "reference": roles.reference or roles.actor}
    if (engines := engines_in(placement)) is not None:
        places["rollout"] = engines
    places |= {"teacher": roles.teacher, "reward": roles.reward}
    return {role: pool for role, pool in places.items() if pool != HERE}


def engines_in(placement: PlacementSettings) -> str | None:
    """The name of the pool whose ranks are engines; None if the actor's own ranks sample."""
    roles = placement.roles
    return None if roles.rollout in (None, roles.actor) else roles.rollout


def ranks_without_gpus(placement: PlacementSettings) -> bool:
    """Whether any pool that is not one of engines has no GPUs."""
    return any(not pool.gpus for name, pool in pools_of(placement).items() if name != engines_in(placement))


def pools_here(placement: PlacementSettings) -> list[Pool]:
    """The valid pools, if all ranks are on this machine; empty for a cluster at an address."""
    tables = [x for x in placement.pools.values() if isinstance(x, Mapping) and not any(pool_problems(x))]
    return [read_section(Pool, table)[0] for table in tables if placement.cluster in MACHINE]


def threads_of(placement: PlacementSettings, cores: int) -> dict[str, int]:
    """The number of threads of a rank in each pool. On one machine, pools without a number of their own share those of
    the `cores` that are left by the other pools. On a cluster at an address, each rank of such a pool has `cores`
    threads, the number of cores here."""
    pools = pools_of(placement)
    if placement.cluster not in MACHINE:
        return {name: pool.threads or cores for name, pool in pools.items()}
    left = cores - sum(pool.ranks * (pool.threads or 0) for pool in pools.values())
    ranks = sum(pool.ranks for pool in pools.values() if pool.threads is None)
    return {name: pool.threads or max(1, left // ranks) for name, pool in pools.items()}


def pool_problems(table: Mapping[str, Any], prefix: str = "") -> Problems:
    """Yield the problems of a pool's table: wrong or missing entries."""
    pool, problems = read_section(Pool, table, prefix)
    yield from problems
    yield from wrong_values(pool, prefix)
    if "ranks" not in table:
        yield Problem(f"{prefix}ranks", None, "is not set; give how many processes it has")
