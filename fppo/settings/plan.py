"""The settings of `fppo plan`; no torch, so that its help answers at once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import attrs

from fppo._errors import json_of
from fppo.fields import above, at_least, at_most, nonempty, setting, wrong_values
from fppo.settings import placement, plan_rollout, resolve
from fppo.settings.learning import ActorSettings, CriticSettings
from fppo.settings.placement import PlanMeshSettings
from fppo.settings.plan_rollout import PlanRolloutSettings
from fppo.settings.train import TrainSettings


@attrs.frozen(kw_only=True)
class PlanSettings:
    """Says what a run will need, before there is one: memory of a rank by kind, bytes on the wire, time and MFU."""

    model: str = setting("", nonempty("give a directory with a config.json, or a name, as qwen2.5-7b"))
    """The model: a directory with its config.json, or a name, as qwen2.5-7b, llama-3.1-70b, quickstart."""
    mesh: PlanMeshSettings = setting(PlanMeshSettings)
    """How the run is spread over GPUs."""
    rollout: PlanRolloutSettings = setting(PlanRolloutSettings)
    """How responses are sampled, as in a run."""
    gpus: int | None = setting(None, at_least(1))
    """GPUs in all; None: as many as the mesh has ranks."""
    gpu: str = setting("h200", nonempty("give a GPU, as h200"))
    """What a rank runs on: a100-80, h100, h200, b200, cpu (this machine), or custom with the numbers below."""
    tokens: int = setting(16384, at_least(2))
    """Tokens of one forward and backward pass of a data rank (a run's token_budget); sequence and context cut them."""
    length: int | None = setting(None, at_least(2))
    """Tokens of each sequence, prompt and response; None: 4096, or --tokens if that is less."""
    expert_load: float = setting(1.0, at_least(1))
    """On an expert axis: the fullest rank's tokens over the mean (of 8 a run's actor/expert_load/of_8_ranks)."""
    response: float = setting(0.5, above(0), at_most(1))
    """The part of a sequence that is response: only these tokens reach the head."""
    micro_batches: int = setting(4, at_least(1))
    """Passes of each data rank for one optimizer update; a step has one update."""
    mini_batch: int | None = setting(None, at_least(1))
    """In place of --micro-batches: sequences of an optimizer update over all ranks."""
    forward_tokens: int | None = setting(None, at_least(2))
    """Tokens of a pass without a gradient (a run's model.forward_token_budget); None: as --tokens."""
    critic: bool = setting(False)
    """Plan a critic of the same size beside the actor, as PPO has it."""
    reference: bool = setting(False)
    """Plan a frozen reference of the same size, as a KL term needs it."""
    lora: int = setting(0, at_least(0))
    """Plan adapters of this rank (a run's model.lora.rank) on one base, the reference too; 0: train all weights."""
    lora_targets: tuple[str, ...] = setting(("all-linear",), nonempty("give names of weights, or all-linear"))
    """The weights that have adapters."""
    critic_lora: int | None = setting(None, at_least(0))
    """The rank of the critic's adapter; None: as --lora; 0: the critic is trained whole."""
    lora_base: Literal["float", "int8", "nf4"] = setting("float")
    """How the base keeps the weights of its linear layers: as they are, or quantised (a run's model.lora.base)."""
    reward_model: str | None = setting(None)
    """Plan a reward model beside them: a directory or a name, as for --model; it reads the same tokens."""
    critic_tokens: int | None = setting(None, at_least(2))
    """Tokens of a pass of the critic's update; None: as --tokens."""
    critic_compute_dtype: Literal["float32", "bfloat16", "float16"] | None = setting(None)
    """The dtype of the critic's passes; None: as --compute-dtype."""
    critic_checkpoint_layers: Literal["selective"] | bool | None = setting(None)
    """Recompute the critic's layers; None: as --checkpoint-layers."""
    critic_offload: Literal["none", "moments", "all"] | None = setting(None)
    """What of the critic is on the host between uses; None: as --offload."""
    ref_dtype: Literal["float32", "bfloat16"] = setting("float32")
    """The dtype that the reference is kept in, and runs in."""
    ref_offload: bool | None = setting(None)
    """Keep the reference on the host between uses; None: where --offload is all."""
    reward_dtype: Literal["float32", "bfloat16"] = setting("float32")
    """The dtype that the reward model is kept in, and runs in."""
    reward_tokens: int | None = setting(None, at_least(2))
    """Tokens of a pass of the reward model; None: as --forward-tokens."""
    reward_offload: bool | None = setting(None)
    """Keep the reward model on the host between uses; None: where --offload is all."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting("auto")
    """The dtype of forward and backward passes; auto: bfloat16, and float32 on a cpu. State is always float32."""
    checkpoint_layers: Literal["selective"] | bool = setting(False)
    """Recompute each layer in the backward pass; selective: all of it but its attention."""
    log_probs: Literal["auto", "chunked", "reference", "triton"] = setting("auto")
    """The kernel for log-probs and entropy from hidden states; auto: the one that fppo train takes there."""
    offload: Literal["none", "moments", "all"] = setting("none")
    """What of the state is on the host between uses: nothing, the moments, or all of it."""
    offload_activations: bool = setting(False)
    """What waits for the backward pass does so on the host (a run's model.offload_activations)."""
    graphs: Literal["auto"] | bool = setting("auto")
    """Run passes of few tokens as CUDA graphs, on one GPU; auto: where fppo train does (a run's model.graphs)."""
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
    full: bool = setting(False)
    """Run every layer; else a few, where all are alike, from which the others follow exactly."""
    search: int | None = setting(None, at_least(1))
    """In place of a mesh: the meshes of so many GPUs with the shortest steps that fit, and why the others are not."""
    tries: bool = setting(True)
    """Where it does not fit, find settings with which it would."""
    json: str | None = setting(None)
    """Write everything to this JSON file; -: print it in place of the table."""

    @property
    def sizes(self) -> dict[str, int]:
        """The axes of the mesh."""
        mesh = self.mesh
        return mesh.sizes(mesh.shard or max(1, (self.gpus or 1) // mesh.others))


def of_run(run: TrainSettings) -> PlanSettings:
    """What a run's settings say to plan: its longest rows, and each role as it has it."""
    mesh = {field.name: getattr(run.mesh, field.name) for field in attrs.fields(PlanMeshSettings)}
    length = run.data.max_prompt_tokens + run.rollout.max_tokens

    def budget(section: ActorSettings | CriticSettings) -> int:
        size, tokens = section.passes
        return max(length, tokens or (size or 1) * length)

    tokens, critic, reward = budget(run.actor), budget(run.critic), run.reward.model
    rows = reward.micro_batch_size
    return PlanSettings(
        model=run.model.path,
        mesh=PlanMeshSettings(**mesh),
        rollout=plan_rollout.of_run(run.rollout),
        tokens=tokens,
        length=length,
        response=run.rollout.max_tokens / length,
        mini_batch=run.actor.mini_batch(run.rollout.batch_size),
        forward_tokens=run.model.forward_token_budget,
        critic=run.uses_critic_model,
        reference=run.uses_reference,
        lora=_rank(run),
        lora_targets=run.model.lora.targets,
        critic_lora=run.model.lora.critic_rank,
        lora_base=run.model.lora.base,
        reward_model=reward.path,
        critic_tokens=None if critic == tokens else critic,
        critic_compute_dtype=run.critic.compute_dtype,
        critic_checkpoint_layers=run.critic.checkpoint_layers,
        critic_offload=run.critic.offload,
        ref_dtype=run.model.ref_dtype,
        ref_offload=run.model.ref_offload,
        reward_dtype=reward.dtype,
        reward_tokens=reward.token_budget if rows is None else rows * length,
        reward_offload=reward.offload,
        compute_dtype=run.model.compute_dtype,
        checkpoint_layers=run.model.checkpoint_layers,
        log_probs=run.model.log_probs if run.model.log_probs in ("auto", "reference", "triton") else "chunked",
        offload=run.model.offload,
        offload_activations=run.model.offload_activations,
        graphs=resolve.resolved(run, resolve.Machine(device="cuda", capability=(8, 0)))[0].model.graphs,
    )


def pools_of_run(run: TrainSettings) -> dict[str, tuple[PlanMeshSettings, list[str]]]:
    """The mesh of each pool of a run, and which models are in it, or "rollout": the last, if it is one of engines. None
    without pools. What is in no pool is "here"."""
    places = placement.places_of(run.placement)
    if not places:
        return {}
    pools, planned = placement.pools_of(run.placement), of_run(run)
    models = {
        "actor": True,
        "critic": planned.critic,
        "reference": planned.reference,
        "reward": planned.reward_model is not None,
        "rollout": "rollout" in places,
    }
    found: dict[str, tuple[PlanMeshSettings, list[str]]] = {}
    for role in (role for role, there in models.items() if there):
        name = places.get(role, placement.HERE)
        mesh = planned.mesh if name not in pools else attrs.evolve(planned.mesh, **pools[name].mesh)
        found.setdefault(name, (mesh, []))[1].append("reward model" if role == "reward" else role)
    return found


def problems(settings: PlanSettings) -> list[str]:
    """What is wrong with the settings, one line for each thing."""
    lines = [f"--{name.replace('_', '-')} {value!r}: {text}" for name, value, text in wrong_values(settings)]
    if lines:
        return lines
    lines += _of_adapters(settings) + _of_rollout(settings)
    world = math.prod(settings.sizes.values())
    own = [name for name, size in settings.mesh.sizes(settings.mesh.shard or 1).items() if size > 1]
    own += ["virtual-stages"] if settings.mesh.virtual_stages > 1 else []
    if settings.search is not None and (own or settings.gpus is not None):
        names = " ".join([f"--mesh.{name}" for name in own] + (["--gpus"] if settings.gpus is not None else []))
        lines.append(f"--search {settings.search}: it looks for the mesh of so many GPUs; leave out {names}")
    if settings.gpus is not None and world != settings.gpus:
        shape = " * ".join(f"{name} {size}" for name, size in settings.sizes.items())
        lines.append(f"--gpus {settings.gpus}: the mesh has {world} ranks, {shape}; give a mesh of {settings.gpus}")
    if settings.length is not None and settings.length > settings.tokens:
        lines.append(f"--length {settings.length}: a pass of --tokens {settings.tokens} holds no such sequence")
    return lines


def _rank(run: TrainSettings) -> int:
    """The rank of the policy's adapter; 0 without one."""
    if (path := run.model.lora.path) is None:
        return run.model.lora.rank
    return json_of((Path(path) / "adapter_config.json").read_text(encoding="utf-8"))["r"]


def _of_rollout(settings: PlanSettings) -> list[str]:
    """What does nothing without an engine."""
    if settings.rollout.engine is not None:
        return []
    given = attrs.asdict(settings.rollout, recurse=False)
    names = [name for name, usual in attrs.asdict(PlanRolloutSettings()).items() if given[name] != usual]
    return [f"--rollout.{x.replace('_', '-')}: nothing reads it without --rollout.engine" for x in names]


def _of_adapters(settings: PlanSettings) -> list[str]:
    """What does not go with adapters, and what does nothing without them."""
    if not settings.lora:
        given = {"--lora-targets": settings.lora_targets != ("all-linear",), "--critic-lora": settings.critic_lora}
        given["--lora-base"] = settings.lora_base != "float"
        return [f"{name}: nothing reads it without --lora" for name, value in given.items() if value]
    lines = [] if settings.search is None else [f"--search {settings.search}: it does not know adapters; give a mesh"]
    offloads = {"--offload": settings.offload, "--critic-offload": settings.critic_offload}
    whole = [name for name, value in offloads.items() if value == "all"]
    return lines + [f"{name} all: the base of adapters stays on the device; give moments" for name in whole]
