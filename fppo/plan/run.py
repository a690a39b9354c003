"""The case of a run, from its settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs
import torch

from fppo._errors import json_of
from fppo.models.adapted import Lora
from fppo.plan.case import GIB, NUMBERS, Case, PlannedSampling, Role, config_of, hardware_of, with_sequences
from fppo.plan.passes import LOG_PROBS
from fppo.rollout.embedded import EmbeddedEngine
from fppo.runtime.mesh import Sharding
from fppo.settings import resolve
from fppo.settings.learning import ActorSettings, CriticSettings
from fppo.settings.model import LoraSettings
from fppo.settings.placement import MeshSettings, pools_of
from fppo.settings.plan import PlanSettings, sizes_of
from fppo.settings.train import TrainSettings


def case_of(of: TrainSettings, options: PlanSettings) -> Case:
    """The case of a run. Raises ValueError for a model or a GPU that is not known."""
    return with_sequences(budgeted(of, options), of.actor.mini_batch(of.rollout.batch_size))


def budgeted(of: TrainSettings, options: PlanSettings) -> Case:
    """The case of a run, with passes of as many tokens as the actor's may have."""
    numbers = {name: getattr(options, name) for name in NUMBERS}
    hardware = hardware_of(options.gpu, numbers | {"memory": options.memory and options.memory * GIB})
    name, config = config_of(of.model.path, changes=of.model.config)
    machine = resolve.Machine(device="cuda", capability=(8, 0)) if hardware.on_gpu else resolve.CPU
    of, _ = resolve.resolved(of, machine)
    model, mesh, lora, length = of.model, of.mesh, of.model.lora, of.data.max_prompt_tokens + of.rollout.max_tokens
    own = lora.critic_rank if of.model.lora.used else 0
    return Case(
        name=name,
        config=config,
        hardware=hardware,
        mesh=sizes_of(mesh, options.gpus),
        virtual_stages=mesh.virtual_stages,
        ring=mesh.ring,
        load=options.expert_load,
        sharding=Sharding(mesh.stage, getattr(torch, mesh.reduce_dtype), mesh.prefetch),
        tokens=_tokens(of.actor, length),
        length=length,
        response=of.rollout.max_tokens / length,
        critic=of.uses_critic_model,
        reference=of.uses_reference,
        reward_model=None if of.reward.model.path is None else config_of(of.reward.model.path, "reward.model.path")[1],
        lora=_lora(lora, _rank(lora)),
        critic_lora=_lora(lora, _rank(lora) if own is None else own),
        lora_base=None if lora.base == "float" else lora.base,
        compute_dtype=None if model.compute_dtype == "float32" else getattr(torch, model.compute_dtype),
        checkpoint_layers=model.checkpoint_layers,
        log_probs=model.log_probs if model.log_probs in LOG_PROBS else "chunked",
        graphs=model.graphs is True,
        offload=model.offload,
        offload_activations=model.offload_activations,
        forward_tokens=model.forward_token_budget,
        roles=_roles(of, length),
        sampling=_sampling(of) if options.sampling else None,
        full=options.full,
    )


def _tokens(section: ActorSettings | CriticSettings, length: int) -> int:
    """The most tokens of a pass of an update, whose rows have so many each."""
    size, tokens = section.passes
    return max(length, tokens or (size or 1) * length)


def _sampling(of: TrainSettings) -> PlannedSampling:
    rollout, vllm = of.rollout, of.rollout.vllm
    own = rollout.engine == "vllm"
    cache = vllm.cache_gb if own else rollout.cache_gb
    return PlannedSampling(
        engine=rollout.engine,
        sequences=rollout.batch_size,
        n=rollout.n,
        max_rows=vllm.max_rows if own else attrs.fields(EmbeddedEngine).max_rows.default,
        cache=None if cache is None or vllm.memory_share is not None else cache * GIB,
        share=vllm.memory_share,
        dtype=None if vllm.dtype is None else getattr(torch, vllm.dtype),
        tensor=vllm.tensor_parallel,
        apart=bool(vllm.devices) or vllm.tensor_parallel > 1 or vllm.transport == "nccl",
        sleeps=vllm.sleep,
        bucket=vllm.bucket_mb << 20,
        shared=own and (vllm.host == "process" or vllm.tensor_parallel > 1),
    )


def _rank(lora: LoraSettings) -> int:
    """The rank of the policy's adapter; 0 without one."""
    if lora.path is None:
        return lora.rank
    return json_of((Path(lora.path) / "adapter_config.json").read_text(encoding="utf-8"))["r"]


def _lora(lora: LoraSettings, rank: int) -> Lora | None:
    return Lora(rank, 1.0, lora.targets) if rank else None


def _roles(of: TrainSettings, length: int) -> dict[str, Role]:
    """Overrides for the models beside the actor, by role."""

    def place(offload: bool | None) -> str | None:
        return None if offload is None else "all" if offload else "none"

    critic, reward, tokens = of.critic, of.reward.model, _tokens(of.critic, length)
    roles = {}
    if of.uses_critic_model:
        roles["critic"] = Role(
            tokens=None if tokens == _tokens(of.actor, length) else tokens,
            compute_dtype=critic.compute_dtype,
            checkpoint_layers=critic.checkpoint_layers,
            offload=critic.offload,
        )
    if of.uses_reference:
        roles["reference"] = Role(offload=place(of.model.ref_offload), dtype=getattr(torch, of.model.ref_dtype))
    if reward.path is not None:
        rows = reward.micro_batch_size
        tokens = reward.token_budget if rows is None else rows * length
        roles["reward model"] = Role(tokens=tokens, offload=place(reward.offload), dtype=getattr(torch, reward.dtype))
    return {name: role for name, role in roles.items() if role != Role()}


def part_of(case: Case, models: Sequence[str]) -> Case:
    """The case of a pool that has these models alone."""
    return attrs.evolve(
        case,
        only=tuple(models),
        critic="critic" in models,
        reference="reference" in models,
        reward_model=case.reward_model if "reward model" in models else None,
        roles={name: role for name, role in case.roles.items() if name in models},
    )


def engines_of(of: TrainSettings, options: PlanSettings, pool: str, columns: float) -> Case:
    """The case of a run's engines in a pool of their own, each of which answers requests as it is free."""
    case = case_of(attrs.evolve(of, mesh=MeshSettings(shard=1)), attrs.evolve(options, gpus=None))
    sampling = _sampling(of)
    rows = of.placement.engines.rows if of.rollout.engine == "embedded" else sampling.max_rows
    ranks = pools_of(of.placement)[pool].ranks
    sampling = attrs.evolve(sampling, pool=ranks, max_rows=max(rows, sampling.n), shared=True)
    return attrs.evolve(case, sampling=sampling, only=(), columns=float(columns))
