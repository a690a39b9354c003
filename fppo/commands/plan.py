"""What `fppo plan` does, once its arguments are read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from transformers.utils import logging as transformers_logging

from fppo._errors import json_of
from fppo.assembly.parts import bare_model
from fppo.data.privileged import TRUTH_SIGNS
from fppo.models import hidden_width
from fppo.models.adapted import Lora
from fppo.plan import text
from fppo.plan.case import GIB, Case, PlannedSampling, Role, config_of, hardware_of, with_sequences
from fppo.plan.columns import Batch, ColumnCall, column_calls
from fppo.plan.passes import LOG_PROBS
from fppo.plan.plan import plan, plan_engines
from fppo.plan.search import TOKENS, Remedy, remedies, search
from fppo.rollout.embedded import EmbeddedEngine
from fppo.runtime.mesh import Sharding
from fppo.settings import checks, files, old_log_probs, placement, resolve
from fppo.settings.checks_lora import uses_lora
from fppo.settings.component import requires, value_of
from fppo.settings.critic import CriticSettings
from fppo.settings.lora import LoraSettings
from fppo.settings.mesh import MeshSettings
from fppo.settings.placement import places_of, pools_of
from fppo.settings.plan import PlanSettings, pools_of_run, sizes_of
from fppo.settings.tables import CORRECTIONS, ESTIMATORS
from fppo.settings.train import ActorSettings, TrainSettings

NUMBERS = ("flops", "bandwidth", "node_bandwidth", "network_bandwidth", "per_node")  # of the hardware, beside memory

Shown = tuple[list[text.Section], dict[str, Any], bool]  # text, numbers, and whether it fits


def run(of: TrainSettings, options: PlanSettings) -> int:
    """Prints the plan of a run, of each of its pools if it has any, or what a search has found, and writes JSON; 1 if
    nothing fits."""
    transformers_logging.set_verbosity_error()
    if places_of(of.placement):
        sections, numbers, fits = _pools(of, options)
    elif options.search is not None:
        sequences = files.mini_batch_size(of.actor, of.rollout.batch_size)
        found = search(_budgeted(of, options), options.search, sequences)
        sections, numbers, fits = text.of_search(found), text.numbers_of_search(found), bool(found.best)
    else:
        sections, numbers, fits = _planned(of, options, case_of(of, options))
    words = json.dumps(text.plain(numbers), indent=1)
    width = min(shutil.get_terminal_size((100, 24)).columns, 100)
    print(words if options.json == "-" else text.rendered(sections, width))
    if options.json not in (None, "-"):
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(words + "\n", encoding="utf-8")
    return 0 if fits else 1


def _planned(of: TrainSettings, options: PlanSettings, case: Case, pool: str | None = None) -> Shown:
    """The plan of a case, of a pool if it is one's, and what would make it fit, if it does not."""
    estimate, helping = plan(case), None
    if options.tries and not estimate.fits:
        helping = [attrs.evolve(x, pool=pool, flags=_flags(of, x)) for x in remedies(estimate)]
    return text.of_plan(estimate, helping), text.numbers_of_plan(estimate, helping), estimate.fits


def _pools(of: TrainSettings, options: PlanSettings) -> Shown:
    """The plan of each pool of a run; it fits if all do."""
    pools, calls = pools_of_run(of), calls_of_run(of)
    engines = any(models == ["rollout"] for _, models in pools.values())
    sections, numbers, fits = [], {}, True
    for name, (mesh, models) in pools.items():
        columns = max((sum(call.there.values()) for call in calls.get(name, ())), default=0)
        if models == ["rollout"]:
            planned = plan_engines(engines_of(of, options, name, columns))
            shown = text.of_engines(planned), text.plain(planned), planned.fits
        else:
            case = _part(case_of(attrs.evolve(of, mesh=mesh), attrs.evolve(options, gpus=None)), models)
            case = attrs.evolve(case, sampling=None if engines else case.sampling, columns=float(columns))
            shown = _planned(of, options, case, None if name == placement.HERE else name)
        sections += [[f"pool {name}: {', '.join(models)}"], *shown[0], *text.of_columns(calls.get(name, []))]
        numbers[name] = {**shown[1], **({"columns": calls[name]} if name in calls else {})}
        fits = fits and shown[2]
    return sections, numbers, fits


def _part(case: Case, models: Sequence[str]) -> Case:
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


def calls_of_run(run: TrainSettings) -> dict[str, list[ColumnCall]]:
    """What the calls of a step of a run send to each of its pools, and have back."""
    places, pools = places_of(run.placement), pools_of(run.placement)
    ranks = pools[places["actor"]].ranks if "actor" in places else 1
    calls = column_calls(_batch(run), places, ranks)
    return {name: [call for call in calls if places[call.role] == name] for name in sorted(set(places.values()))}


def _batch(run: TrainSettings) -> Batch:
    """The rows of a run's steps, as far as settings and configs tell of them."""
    algorithm, critic = run.algorithm, run.critic
    reader = None if not checks.uses_critic(run) else "model" if critic.reads == "tokens" else critic.reads
    replay, routers = algorithm.router_replay, ()
    if replay != "none":
        routers = bare_model(run).routers
    more = {"reward_model": run.reward.model.path, "judge": run.reward.judge.path}
    return Batch(
        prompts=run.rollout.batch_size // run.rollout.n,
        n=run.rollout.n,
        prompt=run.data.max_prompt_tokens,
        response=run.rollout.max_tokens,
        terms=[*run.reward.functions, *(name for name, path in more.items() if path is not None)],
        sampled=run.rollout.from_ is None,
        greedy=requires(algorithm.advantage, ESTIMATORS, "baselines"),
        old_log_probs=old_log_probs.source(run),
        sum_squared=requires(algorithm.advantage, ESTIMATORS, "sum_squared_probs"),
        critic=reader,
        members=critic.ensemble,
        hidden=hidden_width(bare_model(run)) if reader == "hidden" else 0,
        truth_signs=TRUTH_SIGNS if critic.privileged and reader in ("confidence", "hidden") else 0,
        reference=checks.uses_reference(run),
        replay=replay,
        routed=sum(router.chosen * (1 if router.experts <= 1 << 8 else 4) for router in routers),
        weighed=value_of(algorithm.correction, CORRECTIONS, "level") is not None,
        undisputed=bool(critic.leave_disputed),
    )


def _flags(of: TrainSettings, remedy: Remedy) -> dict[str, Any]:
    """The settings of a remedy, passes by sequences where the run has them so, and the critic's as the actor's."""
    flags, case = dict(remedy.flags), remedy.plan.case
    if (tokens := flags.pop(TOKENS, None)) is None:
        return flags
    roles = ["actor", *["critic"] * (case.critic and case.roles.get("critic", Role()).tokens is None)]
    for name, section in (("actor", of.actor), ("critic", of.critic)):
        if name in roles:
            by_rows = bool(section.micro_batch_size)
            flags[f"{name}.{'micro-batch-size' if by_rows else 'token-budget'}"] = tokens // (
                case.length if by_rows else 1
            )
    return flags


def case_of(of: TrainSettings, options: PlanSettings) -> Case:
    """The case of a run. Raises ValueError for a model or a GPU that is not known."""
    return with_sequences(_budgeted(of, options), files.mini_batch_size(of.actor, of.rollout.batch_size))


def _budgeted(of: TrainSettings, options: PlanSettings) -> Case:
    """The case of a run, with passes of as many tokens as the actor's may have."""
    memory = None if options.memory is None else options.memory * GIB
    hardware = hardware_of(options.gpu, memory=memory, **{name: getattr(options, name) for name in NUMBERS})
    name, config = config_of(of.model.path)
    machine = resolve.Machine(device="cuda", capability=(8, 0)) if hardware.on_gpu else resolve.CPU
    of, _ = resolve.resolved(of, machine)
    model, mesh, lora, length = of.model, of.mesh, of.model.lora, of.data.max_prompt_tokens + of.rollout.max_tokens
    own = lora.critic_rank if uses_lora(of) else 0
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
        critic=checks.uses_critic_model(of),
        reference=checks.uses_reference(of),
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
    size, tokens = files.micro_batching(section)
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
    """What differs for the models beside the actor."""

    def place(offload: bool | None) -> str | None:
        return None if offload is None else "all" if offload else "none"

    critic, reward, tokens = of.critic, of.reward.model, _tokens(of.critic, length)
    roles = {}
    if checks.uses_critic_model(of):
        roles["critic"] = Role(
            tokens=None if tokens == _tokens(of.actor, length) else tokens,
            compute_dtype=critic.compute_dtype,
            checkpoint_layers=critic.checkpoint_layers,
            offload=critic.offload,
        )
    if checks.uses_reference(of):
        roles["reference"] = Role(offload=place(of.model.ref_offload), dtype=getattr(torch, of.model.ref_dtype))
    if reward.path is not None:
        rows = reward.micro_batch_size
        tokens = reward.token_budget if rows is None else rows * length
        roles["reward model"] = Role(tokens=tokens, offload=place(reward.offload), dtype=getattr(torch, reward.dtype))
    return {name: role for name, role in roles.items() if role != Role()}
