"""Checks of settings on a mesh, and of the places of roles."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from fppo._errors import did_you_mean
from fppo.fields import Problem, Problems, cluster_problems, problem_at, unread_problems, value_at
from fppo.settings.checks_rollout import vllm_on_ranks
from fppo.settings.placement import AXES, HERE, places_of, pool_problems, pools_of
from fppo.settings.train import TrainSettings

PASS_AXES = ("pipeline", "expert", "sequence", "context", "tensor")  # axes whose ranks exchange what a pass computes

_OWN = {"actor": ("actor.", "rollout."), "critic": ("critic.",)}  # settings of a role alone


def mesh_rules(s: TrainSettings, world: int) -> Problems:
    """Yield the problems of the settings on `world` ranks, which make a mesh of theirs."""
    mesh, critic = s.mesh, s.algorithm.uses_critic
    if mesh.sequence > 1 and not s.model.remove_padding:
        yield problem_at(s, "mesh.sequence", "a sequence axis cuts packed rows; set model.remove_padding")
    if mesh.pipeline == 1 and mesh.virtual_stages > 1:
        text = "its stages are those of a pipeline rank; give mesh.pipeline 2 or more, or leave it out"
        yield problem_at(s, "mesh.virtual_stages", text)
    if mesh.pipeline > 1 and s.model.compile_layers:
        text = "torch.compile has not been tried on the layers of a stage; leave out model.compile_layers"
        yield problem_at(s, "mesh.pipeline", text)
    yield from _context_axis(s)
    if mesh.expert > 1:
        yield from _cutting_axis(s, "mesh.expert")
    if mesh.tensor > 1:
        if not s.model.remove_padding:
            yield problem_at(s, "mesh.tensor", "a tensor axis cuts packed rows; set model.remove_padding")
        if s.model.log_probs in ("compiled", "liger"):
            text = "it cannot split the vocabulary over mesh.tensor; give chunked, triton or reference"
            yield problem_at(s, "model.log_probs", text)
        yield from _cutting_axis(s, "mesh.tensor")
    if s.rollout.engine == "vllm":
        yield from vllm_on_ranks(s, "rollout.vllm", world)
    if s.reward.judge.on_vllm:
        yield from vllm_on_ranks(s, "reward.judge.vllm", world)
    ranks = world // (mesh.pipeline * mesh.sequence * mesh.context * mesh.tensor)
    for name in ("actor", "critic") if critic else ("actor",):
        together = [axis for axis in PASS_AXES if getattr(mesh, axis) > 1]
        if value_at(s, name).token_budget == "auto" and together:
            text = f"ranks of mesh.{together[0]} exchange what they compute within a pass: none can repeat it alone"
            yield problem_at(s, f"{name}.token_budget", f"{text}; give a number, or only mesh.replicate and mesh.shard")
        size = value_at(s, name).mini_batch(s.rollout.batch_size, s.rollout.n)
        if size < ranks:
            advice = f"give at least as many sequences as there are data ranks, {ranks}, or a longer mesh.context"
            yield Problem(f"{name}.mini_batch_size", size, f"some ranks would have nothing to do; {advice}")


def _context_axis(s: TrainSettings) -> Problems:
    """Yield the conflicts with a context axis, and the settings that do nothing without one."""
    context, sequence = s.mesh.context, s.mesh.sequence
    if context == 1:
        yield from unread_problems(s, ["mesh.ring"], "mesh.context > 1")
        return
    if not s.model.remove_padding:
        yield problem_at(s, "mesh.context", "a context axis deals packed rows; set model.remove_padding")
    if sequence > 1:
        text = f"mesh.sequence = {sequence} cuts the same rows; give one of them, of {sequence * context} ranks"
        yield problem_at(s, "mesh.context", text)


def _cutting_axis(s: TrainSettings, axis: str) -> Problems:
    """Yield the conflicts with an axis that cuts parameters inside layers."""
    if s.model.compile_layers:
        yield problem_at(
            s, axis, "its layers exchange tokens, which torch.compile does not; leave out model.compile_layers"
        )
    for name in ("actor", "critic") if s.algorithm.uses_critic else ("actor",):
        if value_at(s, name).optimizer.name == "muon":
            text = f"it needs whole parameters, which {axis} cuts; give adamw or sgd, or {axis} = 1"
            yield problem_at(s, f"{name}.optimizer.name", text)


def placement_problems(s: TrainSettings) -> Problems:
    """Yield the problems of the placement of roles in pools."""
    placement = s.placement
    places = places_of(placement)
    broken = [*_broken(placement.pools)]
    yield from broken
    for role, used, name in (
        ("critic", s.algorithm.uses_critic, "critic"),
        ("reference", s.uses_reference, "reference"),
        ("teacher", s.loads_teacher, "teacher"),
        ("reward", s.reward.model.path is not None, "reward model"),
    ):
        if not used and getattr(placement.roles, role) not in (HERE, None):
            yield problem_at(s, f"placement.roles.{role}", f"the run has no {name}; leave it out")
    yield from cluster_problems(s, "placement.cluster", ("processes", "local"))
    for role, name in places.items():
        own = role != "reference" or placement.roles.reference is not None
        if name not in placement.pools and own:
            hint = did_you_mean(name, [*placement.pools, HERE])
            yield Problem(f"placement.roles.{role}", name, f"there is no such pool; {hint}")
    for name, pool in placement.pools.items():
        if name not in places.values():
            yield Problem(f"placement.pools.{name}", pool, "no role is in it; name it in placement.roles")
    if not places:
        names = ("cluster", "patience", "restarts")
        yield from unread_problems(s, (f"placement.{name}" for name in names), "roles in pools")
        return
    if s.log.memory_steps and placement.roles.actor != HERE:
        yield problem_at(s, "log.memory_steps", "the updates run in a pool, whose memory is not traced; leave it out")
    if s.mesh.least_ranks > 1:
        axes = {name: getattr(s.mesh, name) for name in AXES}
        yield Problem("mesh", axes, "with placement each pool has axes of its own; give them there")
    if placement.roles.reference == HERE and placement.roles.actor != HERE:
        yield problem_at(s, "placement.roles.reference", "it is where the actor is, or in a pool")
    yield from _engines(s, places)
    if not broken:
        yield from _pools(s, places)


def _engines(s: TrainSettings, places: Mapping[str, str]) -> Problems:
    """Yield the problems of the placement of engines."""
    roles, name, path = s.placement.roles, places.get("rollout"), "placement.roles.rollout"
    if name is None:
        if roles.rollout is not None and roles.actor not in (roles.rollout, HERE):
            yield problem_at(s, path, "it is where the actor is, or in a pool")
        if s.rollout.engine == "vllm" and roles.actor != HERE:
            text = "an actor in a pool samples by the embedded engine; give embedded, or vLLM a pool of its own with "
            yield problem_at(s, "rollout.engine", text + path)
        yield from unread_problems(s, ["placement.engines"], "engines in a pool")
        return
    others = [role for role, pool in places.items() if pool == name and role != "rollout"]
    if others:
        yield problem_at(s, path, f"{others[0]} is there; engines have a pool of their own")
    if s.rollout.from_ is not None and not s.has_held_out:
        yield problem_at(s, path, "nobody asks an engine where rollout.from has it all; leave it out")
    table = s.placement.pools.get(name)
    if isinstance(table, Mapping):
        for axis in (axis for axis in (*AXES, "virtual_stages", "ring") if axis in table):
            text = "each rank is an engine of its own; leave it out"
            yield Problem(f"placement.pools.{name}.{axis}", table[axis], text)
        vllm, gpus = s.rollout.vllm, table.get("gpus", 0)
        yield from unread_problems(s, ["rollout.vllm.devices", "rollout.vllm.sleep"], "vLLM beside what trains")
        if s.rollout.engine == "vllm" and vllm.host == "ray":
            yield problem_at(s, "rollout.vllm.host", "an engine in a pool has its process; give local or process")
        if s.rollout.engine == "vllm" and gpus and gpus < vllm.tensor_parallel:
            text = f"an engine cuts its model over rollout.vllm.tensor_parallel = {vllm.tensor_parallel}; give as many"
            yield Problem(f"placement.pools.{name}.gpus", gpus, text)


def _broken(pools: Mapping[str, object]) -> Problems:
    for name, table in pools.items():
        path = f"placement.pools.{name}"
        if not isinstance(table, Mapping):
            yield Problem(path, table, "must be a table, as {ranks = 2}")
        elif name == HERE:
            yield Problem(path, dict(table), "here is the controller's process; give the pool another name")
        else:
            yield from pool_problems(table, f"{path}.")


def _pools(s: TrainSettings, places: Mapping[str, str]) -> Problems:
    """Yield the problems of pools, and of settings on their meshes."""
    pools = pools_of(s.placement)
    if "rollout" in places:  # others' ranks run no vLLM
        s = attrs.evolve(s, rollout=attrs.evolve(s.rollout, engine="embedded"))
    for name, pool in pools.items():
        path = f"placement.pools.{name}"
        if pool.problem is not None:
            yield Problem(path, attrs.NOTHING, f"{pool.problem}; give other axes, or other ranks")
            continue
        if name not in {pool for role, pool in places.items() if role != "rollout"}:
            continue
        gpus = s.placement.pools[name].get("gpus", 0)
        if gpus > 1:
            yield Problem(f"{path}.gpus", gpus, "a rank works on one GPU; give 1")
        if 0 < gpus < 1 and pool.ranks > 1:
            yield Problem(f"{path}.gpus", gpus, "two ranks of one mesh cannot share a GPU; give 1, or one rank")
        mixed = s.device == "auto" and any(x.gpus for own, x in pools.items() if own != places.get("rollout"))
        kind = s.device.partition(":")[0]
        if not gpus and (kind not in ("auto", "cpu") or mixed):
            advice = f"device = {s.device!r}, and a rank without a GPU works on its CPU; give gpus = 1, or device cpu"
            yield Problem(f"{path}.gpus", gpus, advice)
        if gpus and kind not in ("auto", "cuda"):
            yield Problem(f"{path}.gpus", gpus, f"device = {kind!r}, and its ranks work on GPUs; give device cuda")
        others = ["reward.", *(x for role, own in _OWN.items() if places.get(role) != name for x in own)]
        others += (
            [] if {role for role, pool in places.items() if pool == name} - {"reward", "teacher"} else ["model.lora."]
        )
        found = mesh_rules(attrs.evolve(s, mesh=attrs.evolve(s.mesh, **pool.mesh)), pool.ranks)
        own = (problem for problem in found if not problem.path.startswith(tuple(others)))
        yield from (Problem(path, attrs.NOTHING, str(problem)) for problem in own)
