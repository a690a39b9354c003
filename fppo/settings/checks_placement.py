"""What is wrong with settings of where roles run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs

from fppo._errors import did_you_mean
from fppo.settings.checks_data import has_held_out
from fppo.settings.placement import AXES, HERE, Pool, fields_of, places_of, pools_of
from fppo.settings.problems import Problems, cluster_problems, problem, unread
from fppo.settings.train import TrainSettings

_OWN = {"actor": ("actor.", "rollout."), "critic": ("critic.",)}  # settings of a role alone
OnMesh = Callable[[TrainSettings, int], Problems]  # what is wrong with settings on so many ranks of their mesh


def placement_problems(s: TrainSettings, *, critic: bool, reference: bool, on_mesh: OnMesh) -> Problems:
    """What keeps roles from running where the settings want them, in a run that has a critic and a reference or not."""
    placement = s.placement
    places = places_of(placement)
    broken = [*_broken(placement.pools)]
    yield from broken
    model = s.reward.model.path is not None
    for role, there, name in (
        ("critic", critic, "critic"),
        ("reference", reference, "reference"),
        ("reward", model, "reward model"),
    ):
        if not there and getattr(placement.roles, role) not in (HERE, None):
            advice = f"the run has no {name}; leave it out"
            yield problem(f"placement.roles.{role}", getattr(placement.roles, role), advice)
    yield from cluster_problems("placement.cluster", placement.cluster, ("processes", "local"))
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
    yield from _engines(s, places)
    if not broken:
        yield from _pools(s, places, pools_of(placement), on_mesh)


def _engines(s: TrainSettings, places: Mapping[str, str]) -> Problems:
    """What is wrong with who samples."""
    section, name = s.placement, places.get("rollout")
    if name is None:
        path, asked = "placement.roles.rollout", section.roles.rollout
        if asked is not None and section.roles.actor not in (asked, HERE):
            yield problem(path, asked, "it is where the actor is, or in a pool")
        if s.rollout.engine == "vllm" and section.roles.actor != HERE:
            advice = "an actor in a pool samples by the embedded engine"
            yield problem("rollout.engine", "vllm", f"{advice}; give embedded, or vLLM a pool of its own with {path}")
        for field in attrs.fields(type(section.engines)):
            value = getattr(section.engines, field.name)
            yield from unread(f"placement.engines.{field.name}", value, field.default, "engines in a pool")
        return
    others = [role for role, pool in places.items() if pool == name and role != "rollout"]
    if others:
        yield problem("placement.roles.rollout", name, f"{others[0]} is there; engines have a pool of their own")
    if s.rollout.from_ is not None and not has_held_out(s):
        yield problem(
            "placement.roles.rollout", name, "nobody asks an engine where rollout.from has it all; leave it out"
        )
    table = section.pools.get(name)
    if isinstance(table, Mapping):
        for axis in (axis for axis in (*AXES, "virtual_stages", "ring") if axis in table):
            yield problem(
                f"placement.pools.{name}.{axis}", table[axis], "each rank is an engine of its own; leave it out"
            )
        vllm, gpus = s.rollout.vllm, table.get("gpus", 0)
        reader = "vLLM beside what trains"
        yield from unread("rollout.vllm.devices", vllm.devices, (), reader)
        yield from unread("rollout.vllm.sleep", vllm.sleep, False, reader)
        if s.rollout.engine == "vllm" and vllm.host == "ray":
            yield problem("rollout.vllm.host", "ray", "an engine in a pool has its process; give local or process")
        if s.rollout.engine == "vllm" and gpus and gpus < vllm.tensor_parallel:
            advice = (
                f"an engine cuts its model over rollout.vllm.tensor_parallel = {vllm.tensor_parallel}; give as many"
            )
            yield problem(f"placement.pools.{name}.gpus", gpus, advice)


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
    if "rollout" in places:  # others' ranks run no vLLM
        s = attrs.evolve(s, rollout=attrs.evolve(s.rollout, engine="embedded"))
    for name, pool in pools.items():
        path = f"placement.pools.{name}"
        if pool.problem is not None:
            yield f"{path}: {pool.problem}; give other axes, or other ranks"
            continue
        if name not in {pool for role, pool in places.items() if role != "rollout"}:
            continue
        if pool.gpus > 1:
            yield problem(f"{path}.gpus", pool.gpus, "a rank works on one GPU; give 1")
        if 0 < pool.gpus < 1 and pool.ranks > 1:
            yield problem(f"{path}.gpus", pool.gpus, "two ranks of one mesh cannot share a GPU; give 1, or one rank")
        mixed = s.device == "auto" and any(x.gpus for own, x in pools.items() if own != places.get("rollout"))
        if not pool.gpus and (s.device.startswith("cuda") or mixed):
            advice = f"device = {s.device!r}, and a rank without a GPU works on its CPU; give gpus = 1, or device cpu"
            yield problem(f"{path}.gpus", pool.gpus, advice)
        if pool.gpus and s.device == "cpu":
            yield problem(f"{path}.gpus", pool.gpus, "device = 'cpu', and its ranks work on GPUs; give device cuda")
        others = ["reward.", *(x for role, own in _OWN.items() if places.get(role) != name for x in own)]
        others += [] if {role for role, pool in places.items() if pool == name} - {"reward"} else ["model.lora."]
        found = on_mesh(attrs.evolve(s, mesh=attrs.evolve(s.mesh, **pool.mesh)), pool.ranks)
        yield from (f"{path}: {text}" for text in found if not text.startswith(tuple(others)))
