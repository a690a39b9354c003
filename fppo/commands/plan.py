"""What `fppo plan` does, once its arguments are read."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import attrs
import torch
from transformers.utils import logging as transformers_logging

from fppo._errors import UsageError
from fppo.assembly.parts import bare_model
from fppo.data.privileged import TRUTH_SIGNS
from fppo.models import hidden_width
from fppo.models.adapted import Lora
from fppo.plan.case import Case, PlannedSampling, Role, balanced
from fppo.plan.columns import Batch, ColumnCall, column_calls
from fppo.plan.hardware import hardware_of
from fppo.plan.plan import Plan, plan, plan_engines
from fppo.plan.presets import config_of
from fppo.plan.remedies import Remedy, remedies
from fppo.plan.search import search
from fppo.plan.text import report, summary
from fppo.plan.text_columns import columns_report, columns_summary
from fppo.plan.text_rollout import engines_report, engines_summary
from fppo.plan.text_search import found_report, found_summary
from fppo.plan.values import GIB, plain
from fppo.rollout.embedded import EmbeddedEngine
from fppo.runtime.mesh import DATA_AXES, Sharding
from fppo.settings import placement, resolve
from fppo.settings.component import requires, value_of
from fppo.settings.placement import PlanMeshSettings, places_of, pools_of
from fppo.settings.plan import PlanSettings, pools_of_run
from fppo.settings.plan_rollout import PlanRolloutSettings
from fppo.settings.resolve import old_log_probs_source
from fppo.settings.tables import CORRECTIONS, ESTIMATORS
from fppo.settings.train import TrainSettings


def run(settings: PlanSettings, of_run: TrainSettings | None = None) -> int:
    """Prints the plan, of each of the pools if the run that it is of has any, or what a search has found, and writes
    what was asked for; 1 if nothing fits."""
    transformers_logging.set_verbosity_error()
    if of_run is not None and places_of(of_run.placement):
        return _of_pools(settings, of_run)
    case, width = case_of(settings), min(shutil.get_terminal_size((100, 24)).columns, 100)
    if settings.search is not None:
        found = search(case, settings.search)
        _put(settings, found_report(found, width=width), found_summary(found))
        return 0 if found.best else 1
    estimate = plan(case)
    helping = _helping(settings, estimate)
    _put(settings, report(estimate, helping, width=width), summary(estimate, helping))
    return 0 if estimate.fits else 1


def _of_pools(settings: PlanSettings, of_run: TrainSettings) -> int:
    """Prints a plan of each pool of a run; 1 if one does not fit."""
    if settings.search is not None:
        raise UsageError(f"--search {settings.search}: it looks for one mesh, and the run has pools; leave it out")
    pools, calls = pools_of_run(of_run), calls_of_run(of_run)
    width, texts, numbers, fits = min(shutil.get_terminal_size((100, 24)).columns, 100), [], {}, True
    for name, (mesh, models) in pools.items():
        columns = max((sum(call.there.values()) for call in calls.get(name, ())), default=0)
        if models == ["rollout"]:
            planned = plan_engines(engines_of(settings, of_run, name, columns))
            texts += [f"pool {name}: rollout", "", engines_report(planned, width=width), ""]
            texts += [columns_report(calls[name], width=width), ""]
            numbers[name] = engines_summary(planned) | {"columns": columns_summary(calls[name])}
            fits = fits and planned.fits
            continue
        own = attrs.evolve(
            settings,
            mesh=mesh,
            gpus=None,
            critic="critic" in models,
            reference="reference" in models,
            reward_model=settings.reward_model if "reward model" in models else None,
        )
        apart = any(kinds == ["rollout"] for _, kinds in pools.values())  # engines have a pool of their own
        case = case_of(own)
        sampling = None if apart else case.sampling
        estimate = plan(attrs.evolve(case, only=tuple(models), sampling=sampling, columns=float(columns)))
        helping = _helping(settings, estimate, None if name == placement.HERE else name)
        texts += [f"pool {name}: {', '.join(models)}", "", report(estimate, helping, width=width), ""]
        numbers[name] = summary(estimate, helping)
        if name in calls:
            texts += [columns_report(calls[name], width=width), ""]
            numbers[name]["columns"] = columns_summary(calls[name])
        fits = fits and estimate.fits
    _put(settings, "\n".join(texts).rstrip(), numbers)
    return 0 if fits else 1


def engines_of(settings: PlanSettings, run: TrainSettings, pool: str, columns: float) -> Case:
    """The case of a run's engines in a pool of their own, each of which answers requests as it is free."""
    case = case_of(attrs.evolve(settings, mesh=PlanMeshSettings(shard=1), gpus=None))
    assert case.sampling is not None
    rows = run.placement.engines.rows if run.rollout.engine == "embedded" else case.sampling.max_rows
    ranks = pools_of(run.placement)[pool].ranks
    sampling = attrs.evolve(case.sampling, pool=ranks, max_rows=max(rows, case.sampling.n), shared=True)
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
    reader = None if not run.algorithm.uses_critic else "model" if critic.reads == "tokens" else critic.reads
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
        old_log_probs=old_log_probs_source(run),
        sum_squared=requires(algorithm.advantage, ESTIMATORS, "sum_squared_probs"),
        critic=reader,
        members=critic.ensemble,
        hidden=hidden_width(bare_model(run)) if reader == "hidden" else 0,
        truth_signs=TRUTH_SIGNS if critic.privileged and reader in ("confidence", "hidden") else 0,
        reference=run.uses_reference,
        replay=replay,
        routed=sum(router.chosen * (1 if router.experts <= 1 << 8 else 4) for router in routers),
        weighed=value_of(algorithm.correction, CORRECTIONS, "level") is not None,
        undisputed=bool(critic.leave_disputed),
    )


def _helping(settings: PlanSettings, estimate: Plan, pool: str | None = None) -> list[Remedy] | None:
    """What would make a plan fit, of a pool if it is one's; None if it does, or nothing is to be tried."""
    if estimate.fits or not settings.tries:
        return None
    return [attrs.evolve(remedy, pool=pool) for remedy in remedies(estimate)]


def _put(settings: PlanSettings, table: str, numbers: dict[str, Any]) -> None:
    """Prints a table, or numbers as JSON, and writes these to a file."""
    text = json.dumps(plain(numbers), indent=1)
    print(text if settings.json == "-" else table)
    if settings.json not in (None, "-"):
        Path(settings.json).parent.mkdir(parents=True, exist_ok=True)
        Path(settings.json).write_text(text + "\n", encoding="utf-8")


def case_of(settings: PlanSettings) -> Case:
    """The case that the settings name. Raises ValueError for a model or a GPU that is not known."""
    hardware = hardware_of(
        settings.gpu,
        memory=None if settings.memory is None else settings.memory * GIB,
        flops=settings.flops,
        bandwidth=settings.bandwidth,
        node_bandwidth=settings.node_bandwidth,
        network_bandwidth=settings.network_bandwidth,
        per_node=settings.per_node,
    )
    name, config = config_of(settings.model)
    machine = resolve.Machine(device="cuda", capability=(8, 0)) if hardware.on_gpu else resolve.CPU
    dtype, log_probs = settings.compute_dtype, settings.log_probs
    if dtype == resolve.AUTO:
        dtype, _ = resolve.compute_dtype(machine)
    if log_probs == resolve.AUTO:
        log_probs, _ = resolve.kernel("log_probs", machine, {dtype})
    records = settings.graphs
    if records == resolve.AUTO:
        records = settings.offload == "none" and not settings.offload_activations and dtype != "float32"
    mesh, own = settings.mesh, settings.critic_lora
    data_ranks = math.prod(size for axis, size in settings.sizes.items() if axis in DATA_AXES)
    length = settings.length or min(4096, settings.tokens)
    tokens, micro_batches = settings.tokens, settings.micro_batches
    if settings.mini_batch is not None:
        share = -(-settings.mini_batch // data_ranks)  # the sequences of a rank
        rows, micro_batches = balanced(share, tokens // length)
        tokens = max(rows * length, 2)
    return Case(
        name=name,
        config=config,
        hardware=hardware,
        mesh=settings.sizes,
        virtual_stages=mesh.virtual_stages,
        ring=mesh.ring,
        load=settings.expert_load,
        sharding=Sharding(mesh.stage, getattr(torch, mesh.reduce_dtype), mesh.prefetch),
        tokens=tokens,
        length=length,
        response=settings.response,
        micro_batches=micro_batches,
        critic=settings.critic,
        reference=settings.reference,
        reward_model=None if settings.reward_model is None else config_of(settings.reward_model, "reward-model")[1],
        lora=_lora(settings, settings.lora),
        critic_lora=_lora(settings, settings.lora and (settings.lora if own is None else own)),
        lora_base=None if settings.lora_base == "float" else settings.lora_base,
        compute_dtype=None if dtype == "float32" else getattr(torch, dtype),
        checkpoint_layers=settings.checkpoint_layers,
        log_probs=log_probs,
        graphs=records is True,
        offload=settings.offload,
        offload_activations=settings.offload_activations,
        forward_tokens=settings.forward_tokens,
        roles=_roles(settings),
        sampling=_sampling(settings.rollout),
        full=settings.full,
    )


def _sampling(rollout: PlanRolloutSettings) -> PlannedSampling | None:
    if rollout.engine is None:
        return None
    share, vllm = rollout.memory_share, rollout.engine == "vllm"
    return PlannedSampling(
        engine=rollout.engine,
        sequences=rollout.batch_size,
        n=rollout.n,
        max_rows=rollout.max_rows if vllm else attrs.fields(EmbeddedEngine).max_rows.default,
        cache=None if rollout.cache_gb is None or share is not None else rollout.cache_gb * GIB,
        share=share,
        dtype=None if rollout.dtype is None else getattr(torch, rollout.dtype),
        tensor=rollout.tensor_parallel,
        apart=rollout.apart,
        sleeps=rollout.sleep,
        bucket=rollout.bucket_mb << 20,
        shared=vllm and (rollout.host == "process" or rollout.tensor_parallel > 1),
    )


def _lora(settings: PlanSettings, rank: int) -> Lora | None:
    return Lora(rank, 1.0, settings.lora_targets) if rank else None


def _roles(settings: PlanSettings) -> dict[str, Role]:
    """What differs for the models beside the actor."""

    def place(offload: bool | None) -> str | None:
        return None if offload is None else "all" if offload else "none"

    roles = {}
    if settings.critic:
        roles["critic"] = Role(
            tokens=settings.critic_tokens,
            compute_dtype=settings.critic_compute_dtype,
            checkpoint_layers=settings.critic_checkpoint_layers,
            offload=settings.critic_offload,
        )
    if settings.reference:
        dtype = getattr(torch, settings.ref_dtype)
        roles["reference"] = Role(offload=place(settings.ref_offload), dtype=dtype)
    if settings.reward_model is not None:
        dtype, offload = getattr(torch, settings.reward_dtype), place(settings.reward_offload)
        roles["reward model"] = Role(tokens=settings.reward_tokens, offload=offload, dtype=dtype)
    return {name: role for name, role in roles.items() if role != Role()}
