"""This machine, as far as settings that say "auto" depend on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch

from fppo import models
from fppo.assembly.parts import device_of
from fppo.assembly.texts import config_of, config_place
from fppo.models import flops
from fppo.models.model import Model
from fppo.settings import resolve
from fppo.settings.learning import ActorSettings
from fppo.settings.model import ModelSettings, whole_teachers
from fppo.settings.resolve import Machine
from fppo.settings.rollout import RolloutSettings
from fppo.settings.train import DataSettings, TrainSettings
from fppo.workers.imports import import_modules
from fppo_kernels import _cpp
from fppo_kernels import table as tables
from fppo_kernels.linear.onednn import fast_on_this_processor

_WIDE = 256  # hidden size from which oneDNN's products are faster; below it, the cost of a call dominates
_ENOUGH = 1e13  # FLOPs: a hundred seconds or more on a few cores; C++ kernels then save more than compiling them costs


def resolved(settings: TrainSettings, device: torch.device | None = None) -> tuple[TrainSettings, list[str]]:
    """Replace every `auto` by its value on `device` (None: the one that the settings name), and describe the choices.

    Invalid settings are reported elsewhere; here they decide nothing.
    """
    kind, section = torch.device("cpu"), settings.model
    with contextlib.suppress(ValueError):
        import_modules(section.import_, settings.module_dirs)
    with contextlib.suppress(ValueError):
        kind = device or device_of(settings.device, settings.placement)
    paths = {"reward.model.path": settings.reward.model.path}
    paths["model.critic_path"] = section.critic_path if settings.algorithm.uses_critic else None
    paths["model.ref_path"] = section.ref_path if settings.uses_reference else None
    paths["model.teacher_path"] = section.teacher_path if settings.loads_teacher else None
    paths |= {f"model.teachers.{name}": path for name, path in whole_teachers(section).items()}
    policies = [*_built(section, {"model.path": section.path})]  # one, or none where there is no model
    if kind.type not in ("cpu", "cuda"):
        return resolve.resolved(settings, Machine(device=kind.type))
    if kind.type == "cuda":
        capability = torch.cuda.get_device_capability(kind)
        return resolve.resolved(settings, machine_of([*policies, *_built(section, paths)], capability))
    policy = policies[0] if policies else None
    onednn = policy is not None and _width(policy) >= _WIDE and fast_on_this_processor()
    wants = settings.rollout.exact or section.cpp
    if wants == resolve.AUTO:
        sections = settings.data, settings.rollout, settings.actor
        wants = policy is not None and work_of(policy, settings.steps, *sections) >= _ENOUGH
    if not wants:
        return resolve.resolved(settings, attrs.evolve(resolve.CPU, onednn=onednn))
    machine, why = machine_of([*policies, *_built(section, paths)], None), tables.needs_cpp() or _cpp.failure()
    if why is not None:
        machine = attrs.evolve(machine, refusals={**machine.refusals, **_without_cpp(why)})
    return resolve.resolved(settings, attrs.evolve(machine, compiles=True, no_compiler=why, onednn=onednn))


def _width(policy: Model) -> int:
    """The hidden size of the policy."""
    return policy.config.get_text_config().hidden_size


def work_of(policy: Model, steps: int, rows: DataSettings, rollout: RolloutSettings, actor: ActorSettings) -> float:
    """FLOPs of the policy's passes in `steps` steps, with rows as long as the settings allow.

    The number depends on the settings alone, so that the kernels chosen by it are the same whatever was compiled
    before.
    """
    length = rows.max_prompt_tokens + rollout.max_tokens
    forward = flops.forward_flops(policy, [length], head_tokens=rollout.max_tokens)
    return steps * rollout.batch_size * forward * (1 + 3 * actor.epochs)


def _without_cpp(reason: str) -> dict[str, str]:
    return {f"{op}/cpp": reason for op in tables.BUILTIN if "cpp" in tables.BUILTIN[op]}


def machine_of(built: Sequence[Model], capability: tuple[int, int] | None) -> Machine:
    """A description of the machine: a GPU of this compute capability, or a CPU if None, with the reason against each
    kernel that does not run here or not with the models in `built`."""
    refusals: dict[str, str] = {}
    needs = frozenset[str]().union(*map(models.attention_needs, built))
    for op in ("attention", "decode_attention", "log_probs", *resolve.LAYERS):
        for name, implementation in tables.BUILTIN[op].items():
            missing = sorted(implementation.lacks & needs)
            reason = implementation.refuse() or (f"has no {' and no '.join(missing)}" if missing else None)
            refusals |= {} if reason is None else {f"{op}/{name}": reason}
    for op in resolve.LAYERS:
        if not all(models.has_place(x.text_of(x.skeleton), op) for x in built):
            refusals |= dict.fromkeys((f"{op}/triton", f"{op}/cpp"), "has no place in some model")
    if capability is None:
        return Machine(refusals=refusals)
    return Machine(device="cuda", capability=capability, refusals=refusals)


def _built(section: ModelSettings, paths: Mapping[str, str | None]) -> Iterator[Model]:
    """The models, without parameters, at `paths` (by the settings that name them); unreadable ones are left out."""
    for name, path in paths.items():
        if path:
            with contextlib.suppress(ValueError, OSError):
                config = config_of(section, config_place(path, name))
                yield models.build(config, trust_remote_code=section.trust_remote_code)
