"""The settings of where roles run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from fppo.settings.fields import (
    MOST_RANKS,
    MOST_SECONDS,
    MOST_WORKERS,
    Table,
    above,
    at_least,
    at_most,
    nonempty,
    setting,
)
from fppo.settings.mesh import MeshSettings

HERE = "here"  # the process that reads the settings
AXES = ("pipeline", "replicate", "shard", "expert", "sequence", "context", "tensor")
MACHINE = ("processes", "local")  # clusters of one machine


@attrs.frozen(kw_only=True)
class RoleSettings:
    """The pool of each role."""

    actor: str = setting(HERE, nonempty("give a pool, or here"))
    """The pool that trains the policy, and samples from it; here: the controller's own process."""
    critic: str = setting(HERE, nonempty("give a pool, or here"))
    """The pool that trains the critic."""
    reference: str | None = setting(None)
    """The pool of the reference; None: the actor's."""
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
class Pool:
    """Ranks of one mesh, as the settings describe them."""

    ranks: int
    gpus: float = 0  # of each rank
    threads: int | None = None  # of each rank, on which bits depend; without, all of a machine share its cores
    pipeline: int = 1
    virtual_stages: int = 1
    replicate: int = 1
    shard: int | None = None  # all that the other axes leave
    expert: int = 1
    sequence: int = 1
    context: int = 1
    ring: bool = False
    tensor: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        """Every axis and its size, from the slowest."""
        mesh = MeshSettings(**{name: getattr(self, name) for name in AXES})
        return mesh.sizes(self.shard or max(1, self.ranks // mesh.others))

    @property
    def mesh(self) -> dict[str, Any]:
        """All that it says of its mesh, by the names of `MeshSettings`."""
        return {**self.sizes, "virtual_stages": self.virtual_stages, "ring": self.ring}

    @property
    def problem(self) -> str | None:
        """What is wrong with its axes."""
        if math.prod(self.sizes.values()) == self.ranks:
            return None
        axes = ", ".join(f"{name} {getattr(self, name) or 'unset'}" for name in AXES)
        return f"its axes ({axes}) do not multiply to its {self.ranks} ranks"


def pools_of(placement: PlacementSettings) -> dict[str, Pool]:
    """The pools by name. They must have been found to be right."""
    return {name: Pool(**table) for name, table in placement.pools.items()}


def places_of(placement: PlacementSettings) -> dict[str, str]:
    """The pool of each role that is not here."""
    roles = placement.roles
    places = {"actor": roles.actor, "critic": roles.critic, "reference": roles.reference or roles.actor}
    if (engines := engines_in(placement)) is not None:
        places["rollout"] = engines
    places["reward"] = roles.reward
    return {role: pool for role, pool in places.items() if pool != HERE}


def engines_in(placement: PlacementSettings) -> str | None:
    """The pool whose ranks are engines; None where the actor samples itself."""
    roles = placement.roles
    return None if roles.rollout in (None, roles.actor) else roles.rollout


def ranks_without_gpus(placement: PlacementSettings) -> bool:
    """Whether models are in pools without GPUs."""
    return any(not pool.gpus for name, pool in pools_of(placement).items() if name != engines_in(placement))


def gpus_in(placement: PlacementSettings) -> float:
    """The GPUs that all pools want together, as far as they say what pools may say."""
    tables = [table for table in placement.pools.values() if isinstance(table, Mapping) and not fields_of(table)]
    return sum(table["ranks"] * table.get("gpus", 0) for table in tables)


def pools_here(placement: PlacementSettings) -> list[Pool]:
    """The pools whose ranks are on this machine, as far as they say what pools may say."""
    tables = [table for table in placement.pools.values() if isinstance(table, Mapping) and not fields_of(table)]
    return [Pool(**table) for table in tables if placement.cluster in MACHINE]


def threads_of(placement: PlacementSettings, cores: int) -> dict[str, int]:
    """The threads of each rank of every pool, where this process has as many threads as there are `cores`: those of one
    machine share what pools that say theirs leave; those of a cluster at an address have as many as this process."""
    pools = pools_of(placement)
    if placement.cluster not in MACHINE:
        return {name: pool.threads or cores for name, pool in pools.items()}
    left = cores - sum(pool.ranks * (pool.threads or 0) for pool in pools.values())
    ranks = sum(pool.ranks for pool in pools.values() if pool.threads is None)
    return {name: pool.threads or max(1, left // ranks) for name, pool in pools.items()}


def fields_of(table: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    """What a pool's table holds that it cannot: name, value, and what is to be done."""
    known = sorted(field.name for field in attrs.fields(Pool))
    hint = f"there is no such setting of a pool; there are {', '.join(known)}"
    wrong = [(name, value, hint) for name, value in table.items() if name not in known]
    for name in (name for name in known if name in table):
        if (text := _value_problem(name, table[name])) is not None:
            wrong.append((name, table[name], text))
    if "ranks" not in table:
        wrong.append(("ranks", None, "is not set; give how many processes it has"))
    return wrong


def _value_problem(name: str, value: Any) -> str | None:
    """What is wrong with the value of a pool's setting."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if name == "gpus":
        return None if number and 0 <= value < math.inf else "must be a number, 0 or more"
    if name == "ring":
        return None if isinstance(value, bool) else "must be true or false"
    most = MOST_WORKERS if name == "threads" else MOST_RANKS
    if number and isinstance(value, int) and 1 <= value <= most:
        return None
    return f"must be a whole number, {'1 or more' if not number or value < 1 else f'{most} or less'}"
