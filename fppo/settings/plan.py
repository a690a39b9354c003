"""The settings of `fppo plan` beside those of the run that is planned; no torch, so that its help answers at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import attrs
import tyro

from fppo.fields import Problem, above, at_least, flag_problems, nonempty, output_file, place, setting
from fppo.settings import checks, files, placement
from fppo.settings.placement import MeshSettings
from fppo.settings.train import TrainSettings
from fppo.settings.values import words_given

HERE, USUAL = "here", "h200"  # the device of the run, as this machine has it; and what is planned without one
_UNREAD = (
    "data.path = []",
    "reward.functions = []",
)  # what a run needs, and a plan without a file does not
_LENGTH = "--data.max-prompt-tokens and --rollout.max-tokens"
_OF_MODEL = ("compute_dtype", "checkpoint_layers", "log_probs", "offload", "offload_activations", "graphs")
_OF_VLLM = ("memory_share", "max_rows", "dtype", "tensor_parallel", "sleep", "host", "bucket_mb")
# what flags of a plan are called since it takes those of a run
RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "model": "--model.path",
        "tokens": "--actor.token-budget",
        "length": _LENGTH,
        "response": _LENGTH,
        "micro_batches": "--rollout.batch-size",
        "mini_batch": "--actor.mini-batch-size",
        "forward_tokens": "--model.forward-token-budget",
        "critic": "--algorithm.advantage gae, or another estimator that reads values,",
        "reference": "--actor.kl-coef, above 0,",
        "lora": "--model.lora.rank",
        "lora_targets": "--model.lora.targets",
        "lora_base": "--model.lora.base",
        "critic_lora": "--model.lora.critic-rank",
        "reward_model": "--reward.model.path",
        "critic_tokens": "--critic.token-budget",
        "ref_dtype": "--model.ref-dtype",
        "ref_offload": "--model.ref-offload",
        "reward_tokens": "--reward.model.token-budget",
        "rollout.apart": "--rollout.vllm.devices",
        **{f"critic_{name}": f"--critic.{name}" for name in ("compute_dtype", "checkpoint_layers", "offload")},
        **{f"reward_{name}": f"--reward.model.{name}" for name in ("dtype", "offload")},
        **{name: f"--model.{name}" for name in _OF_MODEL},
        **{f"rollout.{name}": f"--rollout.vllm.{name}" for name in _OF_VLLM},
    }
)


def _named(gpu: str | None) -> str | None:
    return None if gpu is None else nonempty("give a GPU, as h200")(gpu)


@attrs.frozen(kw_only=True)
class PlanSettings:
    """Says what a run will need, before there is one: memory of a rank by kind, bytes on the wire, time and MFU."""

    gpu: str | None = setting(None, _named)
    """What a rank runs on: a100-80, h100, h200, b200, cpu (this machine), or custom with the numbers below; None: what
    is here for the run of a file, and h200 for flags alone and for a search."""
    gpus: int | None = setting(None, at_least(1))
    """GPUs in all; None: as many as the mesh has ranks."""
    memory: float | None = setting(None, above(0))
    """In place of the GPU's own: its memory in GiB."""
    flops: float | None = setting(None, above(0))
    """In place of the GPU's own: dense bfloat16 FLOPs per second, as 989e12."""
    bandwidth: float | None = setting(None, above(0))
    """In place of the GPU's own: bytes per second of its memory, as 4.8e12."""
    node_bandwidth: float | None = setting(None, above(0))
    """In place of the GPU's own: bytes per second to another GPU of its node, one way, as 450e9."""
    network_bandwidth: float | None = setting(None, above(0))
    """In place of the GPU's own: bytes per second to GPUs of other nodes, one way, as 50e9."""
    per_node: int | None = setting(None, at_least(1))
    """In place of the GPU's own: GPUs of a node."""
    expert_load: float = setting(1.0, at_least(1))
    """On an expert axis: the fullest rank's tokens over the mean (of 8 a run's actor/expert_load/of_8_ranks)."""
    sampling: bool = setting(True)
    """Plan the rollout beside the updates; without it, as if it were sampled elsewhere."""
    full: bool = setting(False)
    """Run every layer; else a few, where all are alike, from which the others follow exactly."""
    search: int | None = setting(None, at_least(1))
    """In place of a mesh: the meshes of so many GPUs with the shortest steps that fit, and why the others are not."""
    tries: bool = setting(True)
    """Where it does not fit, find settings with which it would."""
    json: str | None = setting(None, place, output_file)
    """Write everything to this JSON file; -: print it in place of the table."""


def load(file: str | None, arguments: Sequence[str]) -> tuple[TrainSettings, PlanSettings]:
    """The run of a file (None: the defaults) and of flags, and what else these say of its plan.

    Raises SettingsError with every problem.
    """
    words, _ = words_given(arguments)
    if old := [name for name in words if name in RENAMED]:
        lines = [" ".join([f"--{name.replace('_', '-')}", *words[name]]) for name in old]
        now = [RENAMED[name].replace("_", "-") for name in old]
        raise files.SettingsError([f"{a}: it is {b} now" for a, b in zip(lines, now, strict=True)])
    options, rest = tyro.cli(PlanSettings, args=arguments, prog="fppo plan [FILE.toml]", return_unknown_args=True)
    if options.gpu is None:
        options = attrs.evolve(options, gpu=USUAL if file is None or options.search is not None else HERE)
    run, wrong = run_of(file, rest)
    if wrong := [*wrong, *problems(run, options)]:
        raise files.SettingsError(list(dict.fromkeys(wrong)))
    return run, options


def run_of(
    file: str | None, arguments: Sequence[str], unread: tuple[str, ...] = _UNREAD
) -> tuple[TrainSettings, list[Problem]]:
    """The run of a file (None: the defaults) and of flags, and problems with flags but for those of what is `unread`.
    Raises SettingsError with every problem of a file."""
    if file is not None:
        return files.load(file, arguments), []
    run, wrong = files.override(TrainSettings(), arguments)
    return run, [*wrong, *(problem for problem in checks.problems(run) if not str(problem).startswith(unread))]


def sizes_of(mesh: MeshSettings, gpus: int | None = None) -> dict[str, int]:
    """The axes of a mesh on so many GPUs (None: no more than it says)."""
    return mesh.sizes(mesh.shard or max(1, (gpus or 1) // mesh.others))


def problems(run: TrainSettings, options: PlanSettings) -> list[str]:
    """List the problems of a plan of a run, one line each."""
    lines = flag_problems(options)
    search, gpus, sizes = options.search, options.gpus, sizes_of(run.mesh, options.gpus)
    if search is not None:
        own = [name for name, size in run.mesh.sizes(run.mesh.shard or 1).items() if size > 1]
        own += ["virtual-stages"] if run.mesh.virtual_stages > 1 else []
        if names := [f"--mesh.{name}" for name in own] + (["--gpus"] if gpus is not None else []):
            lines.append(f"--search {search}: it looks for the mesh of so many GPUs; leave out {' '.join(names)}")
        if run.model.lora.used:
            lines.append(f"--search {search}: it does not know adapters; give a mesh")
        if placement.places_of(run.placement):
            lines.append(f"--search {search}: it looks for one mesh, and the run has pools; leave it out")
    elif gpus is not None and (world := math.prod(sizes.values())) != gpus:
        shape = " * ".join(f"{name} {size}" for name, size in sizes.items())
        lines.append(f"--gpus {gpus}: the mesh has {world} ranks, {shape}; give a mesh of {gpus}")
    return lines


def pools_of_run(run: TrainSettings) -> dict[str, tuple[MeshSettings, list[str]]]:
    """The mesh of each pool of a run, and which models are in it, or "rollout": the last, if it is one of engines. None
    without pools. What is in no pool is "here"."""
    places, pools = placement.places_of(run.placement), placement.pools_of(run.placement)
    models = {
        "actor": True,
        "critic": run.uses_critic_model,
        "reference": run.uses_reference,
        "teacher": run.loads_teacher,
        "reward": run.reward.model.path is not None,
        "rollout": "rollout" in places,
    }
    found: dict[str, tuple[MeshSettings, list[str]]] = {}
    for role in (role for role, there in models.items() if there and places):
        name = places.get(role, placement.HERE)
        mesh = run.mesh if name not in pools else attrs.evolve(run.mesh, **pools[name].mesh)
        found.setdefault(name, (mesh, []))[1].append("reward model" if role == "reward" else role)
    return found
