"""What is wrong with settings of where roles run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs

from fppo._errors import did_you_mean
from fppo.settings.mesh import MeshSettings
from fppo.settings.placement import AXES, HERE, Pool, fields_of, places_of, pools_of
from fppo.settings.problems import Problems, problem, unread
from fppo.settings.train import TrainSettings

OnMesh = Callable[[TrainSettings, int], Problems]  # what is wrong with settings on so many ranks of their mesh


def placement_problems(s: TrainSettings, *, critic: bool, reference: bool, on_mesh: OnMesh) -> Problems:
    """What keeps roles from running where the settings want them, in a run that has a critic and a reference or not."""
    placement = s.placement
    places = places_of(placement)
    broken = [*_broken(placement.pools)]
    yield from broken
    for role, there in (("critic", critic), ("reference", reference)):
        if not there and getattr(placement.roles, role) not in (HERE, None):
            advice = f"the run has no {role}; leave it out"
            yield problem(f"placement.roles.{role}", getattr(placement.roles, role), advice)
    for role, name in places.items():
        own = role != "reference" or placement.roles.reference is not None
        if name not in placement.pools and own:
            hint = did_you_mean(name, [*placement.pools, HERE])
            yield problem(f"placement.roles.{role}", name, f"there is no such pool; {hint}")
    for name, pool in placement.pools.items():
        if name not in places.values():
            yield problem(f"placement.pools.{name}", pool, "no role is in it; name it in placement.roles")
    if not places:
        for field in ("cluster", "patience", "restarts"):
            default = attrs.fields_dict(type(placement))[field].default
            yield from unread(f"placement.{field}", getattr(placement, field), default, "roles in pools")
        return
    if s.mesh.others * (s.mesh.shard or 1) > 1:
        axes = {name: getattr(s.mesh, name) for name in AXES}
        yield problem("mesh", axes, "with placement each pool has axes of its own; give them there")
    if placement.roles.reference == HERE and placement.roles.actor != HERE:
        yield problem("placement.roles.reference", HERE, "it is where the actor is, or in a pool")
    if s.rollout.engine == "vllm" and placement.roles.actor != HERE:
        yield problem("rollout.engine", "vllm", "an actor in a pool samples by the embedded engine; give embedded")
    if not broken:
        yield from _pools(s, places, pools_of(placement), on_mesh)


def _broken(pools: Mapping[str, object]) -> Problems:
    for name, table in pools.items():
        path = f"placement.pools.{name}"
        if not isinstance(table, Mapping):
            yield problem(path, table, "must be a table, as {ranks = 2}")
        elif name == HERE:
            yield problem(path, dict(table), "here is the controller's process; give the pool another name")
        elif wrong := fields_of(table):
            yield from (problem(f"{path}.{field}", value, text) for field, value, text in wrong)


def _pools(s: TrainSettings, places: Mapping[str, str], pools: Mapping[str, Pool], on_mesh: OnMesh) -> Problems:
    for name, pool in pools.items():
        path = f"placement.pools.{name}"
        if pool.problem is not None:
            yield f"{path}: {pool.problem}; give other axes, or other ranks"
            continue
        if pool.gpus and s.placement.cluster == "processes":
            yield problem(f"{path}.gpus", pool.gpus, 'GPUs are dealt out by Ray; give placement.cluster = "local"')
        if name in places.values() and pool.ranks > 1:
            mesh = attrs.evolve(MeshSettings(), **pool.sizes)
            yield from (f"{path}: {text}" for text in on_mesh(attrs.evolve(s, mesh=mesh), pool.ranks))
