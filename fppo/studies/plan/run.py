"""Derive the case to plan from a run's settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import attrs
import torch

from fppo._errors import json_of
from fppo.fields import only
from fppo.models.adapted import Lora
from fppo.models.model import build
from fppo.rollout.embedded import EmbeddedEngine
from fppo.runtime.mesh import Sharding
from fppo.settings import resolve
from fppo.settings.learning import ActorSettings, CriticSettings, OptimizerSettings
from fppo.settings.model import LoraSettings, whole_teachers
from fppo.settings.placement import MeshSettings, pools_of
from fppo.settings.plan import USUAL, PlanSettings, sizes_of
from fppo.settings.train import TrainSettings
from fppo.steps.packed import LEAST_SAVED
from fppo.studies.plan.case import GIB, NUMBERS, Case, PlannedSampling, Role, config_of, hardware_of, with_sequences
from fppo.studies.plan.passes import LOG_PROBS


def case_of(of: TrainSettings, options: PlanSettings) -> Case:
    """The case to plan for a run: one update's mini-batch in as few passes as the token budget allows. Raises
    ValueError for an unknown model or GPU."""
    case = budgeted(of, options)
    return with_sequences(case, of.actor.mini_batch(of.rollout.batch_size, of.rollout.n))


def budgeted(of: TrainSettings, options: PlanSettings) -> Case:
    """The case to plan for a run, with passes of the actor's full token budget whatever the size of a mini-batch."""
    numbers = {name: getattr(options, name) for name in NUMBERS}
    hardware = hardware_of(options.gpu or USUAL, numbers | {"memory": options.memory and options.memory * GIB})
    name, config = config_of(of.model.path, changes=of.model.config)
    machine = resolve.Machine(device="cuda", capability=(8, 0)) if hardware.on_gpu else resolve.CPU
    of, _ = resolve.resolved(of, machine)
    model, mesh, lora, length = of.model, of.mesh, of.model.lora, of.data.max_prompt_tokens + of.rollout.max_tokens
    one = model.teacher_path or next(iter(whole_teachers(model).values()), model.path)  # of several
    teacher, reward = one if of.loads_teacher else None, of.reward.model.path
    own = lora.critic_rank if lora.critic_path is None else _rank_in(lora.critic_path)
    own = own if lora.used else 0
    together = _together(of)
    if together != (1.0, 1.0) and build(config).stateful:
        together = (1.0, 1.0)
    tokens = _tokens(of.actor, of, together[0])
    return Case(
        name=name,
        config=config,
        hardware=hardware,
        mesh=sizes_of(mesh, options.gpus),
        **only(mesh, "virtual_stages", "ring"),
        load=options.expert_load,
        sharding=Sharding(mesh.stage, getattr(torch, mesh.reduce_dtype), mesh.prefetch),
        tokens=tokens,
        budget=tokens,
        together=together[0],
        forward_together=together[1],
        length=length,
        response=of.rollout.max_tokens / length,
        critic=of.uses_critic_model,
        reference=of.uses_reference,
        reward_model=None if reward is None else config_of(reward, "reward.model.path")[1],
        teacher=None if teacher is None else config_of(teacher, "model.teacher_path", model.config)[1],
        lora=_lora(lora, _rank(lora)),
        critic_lora=_lora(lora, _rank(lora) if own is None else own),
        lora_base=None if lora.base == "float" else lora.base,
        compute_dtype=None if model.compute_dtype == "float32" else getattr(torch, model.compute_dtype),
        **only(model, "checkpoint_layers", "mlp_slice_tokens", "offload", "offload_activations"),
        optimizer=_optimizer(of.actor),
        moments_in_files=model.moments_directory is not None,
        log_probs=model.log_probs if model.log_probs in LOG_PROBS else "chunked",
        packs=not (hardware.on_gpu or of.rollout.exact) and model.linear in ("onednn", "cpp"),
        graphs=model.graphs is True,
        forward_tokens=model.forward_token_budget,
        roles=_roles(of, length, together[0]),
        sampling=_sampling(of) if options.sampling else None,
        full=options.full,
    )


def _tokens(section: ActorSettings | CriticSettings, of: TrainSettings, together: float) -> int:
    """The largest number of distinct tokens in one pass of an update, if all rows have the maximal length: the
    section's token budget or, without one, the tokens of its micro-batch, where each `together` rows share a prompt."""
    size, tokens = section.passes
    rows, prompt, response = size or 1, of.data.max_prompt_tokens, of.rollout.max_tokens
    return max(prompt + response, tokens or math.ceil(rows / together) * prompt + rows * response)


def _together(of: TrainSettings) -> tuple[float, float]:
    """Mean number of rows that share a prompt, in the passes of an update and in passes over the whole batch; 1 if the
    run does not share prompts.

    If mini-batches of m rows are drawn by rows from B rows, with n for each prompt, a mini-batch has none of a prompt's
    rows with probability C(B - n, m) / C(B, m).
    """
    rows, n, share = of.rollout.batch_size, of.rollout.n, of.model.share_prompts
    if n == 1 or not share or resolve.sharing_hindrances(of) or (share == "auto" and of.model.graphs is True):
        return 1.0, 1.0
    mini = of.actor.mini_batch(rows, n)
    update = float(n)
    if of.actor.draw_by == "row":
        update = mini / (rows / n * (1 - math.comb(rows - n, mini) / math.comb(rows, mini)))
    prompt, least = of.data.max_prompt_tokens, LEAST_SAVED if share == "auto" else 0.0

    def worth(together: float) -> float:
        return together if (1 - 1 / together) * prompt / (prompt + of.rollout.max_tokens) > least else 1.0

    return worth(update), worth(float(n))


def _sampling(of: TrainSettings) -> PlannedSampling:
    rollout, vllm = of.rollout, of.rollout.vllm
    own = rollout.engine == "vllm"
    cache = (None if vllm.cache_gb is None else vllm.cache_gb * GIB) if own else rollout.cache_bytes
    return PlannedSampling(
        engine=rollout.engine,
        sequences=rollout.batch_size,
        n=rollout.n,
        max_rows=vllm.max_rows if own else attrs.fields(EmbeddedEngine).max_rows.default,
        cache=None if vllm.memory_share is not None else cache,
        share=vllm.memory_share,
        dtype=None if vllm.dtype is None else getattr(torch, vllm.dtype),
        tensor=vllm.tensor_parallel,
        apart=bool(vllm.devices) or vllm.tensor_parallel > 1 or vllm.transport == "nccl",
        sleeps=vllm.sleep,
        bucket=vllm.bucket_mb << 20,
        shared=own and (vllm.host == "process" or vllm.tensor_parallel > 1),
    )


def _rank(lora: LoraSettings) -> int:
    """The rank (size) of the policy's adapter, read from its files if the settings name any; 0 without an adapter."""
    return lora.rank if lora.path is None else _rank_in(lora.path)


def _rank_in(path: str) -> int:
    return json_of((Path(path) / "adapter_config.json").read_text(encoding="utf-8"))["r"]


def _lora(lora: LoraSettings, rank: int) -> Lora | None:
    return Lora(rank, 1.0, lora.targets, exclude=lora.exclude) if rank else None


def _optimizer(section: ActorSettings | CriticSettings) -> OptimizerSettings:
    """The optimizer of a section, without its rates, which change no plan."""
    return OptimizerSettings(name=section.optimizer.name, keywords=section.optimizer.keywords)


def _roles(of: TrainSettings, length: int, together: float) -> dict[str, Role]:
    """Overrides for the models other than the actor, by role."""

    def place(offload: bool | None) -> str | None:
        return None if offload is None else "all" if offload else "none"

    critic, reward, tokens = of.critic, of.reward.model, _tokens(of.critic, of, together)
    roles = {}
    if of.uses_critic_model:
        roles["critic"] = Role(
            tokens=None if tokens == _tokens(of.actor, of, together) else tokens,
            optimizer=None if _optimizer(critic) == _optimizer(of.actor) else _optimizer(critic),
            **only(critic, "compute_dtype", "checkpoint_layers", "offload"),
        )
    if of.uses_reference:
        roles["reference"] = Role(offload=place(of.model.ref_offload), dtype=getattr(torch, of.model.ref_dtype))
    if of.loads_teacher:
        roles["teacher"] = Role(offload=place(of.model.teacher_offload), dtype=getattr(torch, of.model.teacher_dtype))
    if reward.path is not None:
        rows = reward.micro_batch_size
        tokens = reward.token_budget if rows is None else rows * length
        roles["reward model"] = Role(tokens=tokens, offload=place(reward.offload), dtype=getattr(torch, reward.dtype))
    return {name: role for name, role in roles.items() if role != Role()}


def part_of(case: Case, models: Sequence[str]) -> Case:
    """The part of a case that runs in a pool: only the `models` of these names."""
    return attrs.evolve(
        case,
        only=tuple(models),
        critic="critic" in models,
        reference="reference" in models,
        reward_model=case.reward_model if "reward model" in models else None,
        teacher=case.teacher if "teacher" in models else None,
        roles={name: role for name, role in case.roles.items() if name in models},
    )


def engines_of(of: TrainSettings, options: PlanSettings, pool: str, columns: float) -> Case:
    """The case to plan for a run's engines in the pool of this name, where an engine takes a new request whenever it is
    free. `columns` are the bytes of the batch's columns."""
    case = case_of(attrs.evolve(of, mesh=MeshSettings(shard=1)), attrs.evolve(options, gpus=None))
    sampling = _sampling(of)
    rows = of.placement.engines.rows if of.rollout.engine == "embedded" else sampling.max_rows
    ranks = pools_of(of.placement)[pool].ranks
    sampling = attrs.evolve(sampling, pool=ranks, max_rows=max(rows, sampling.n), shared=True)
    return attrs.evolve(case, sampling=sampling, only=(), columns=float(columns))
