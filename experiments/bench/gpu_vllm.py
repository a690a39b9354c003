"""vLLM beside a trainer that holds half of the GPU: its start, each way of the weights, answers, sleep and wake.

In a dry run vLLM is what gpu_standin.py puts in its place; for weights in shared memory, where it is installed, itself.
"""

from __future__ import annotations

import importlib.util
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from gpu_model import build, parameters, prompts
from gpu_tools import Plan, Record, Skipped, attempt, check, once, table
from torch import Tensor

from fppo.batch import Rollout
from fppo.key import Key
from fppo.rollout.engine import Ask, Sampling
from fppo.steps.forward import Forward, compute_log_probs
from fppo.steps.micro_batching import MicroBatching

SYNC = 1.0  # GB/s at least
CACHE_GB = 0.25
SHARED = "shared memory"


def used(plan: Plan) -> int:
    """Bytes of the GPU that anybody uses."""
    if plan.device.type == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info(plan.device)
    return total - free


def beside(plan: Plan, params: dict[str, Tensor], **settings: Any) -> Record:
    """One engine: seconds of its start, of a sync and of an answer, and what they give."""
    from fppo.rollout.vllm.engine import VllmEngine, VllmOptions

    rows, longest, count = plan.decode
    model = build(plan.small, plan)
    options = VllmOptions(host="process", max_model_len=longest + count, max_rows=rows, cache_gb=CACHE_GB, **settings)
    asked, sampling = prompts(rows, longest, plan.small.vocabulary, 0), Sampling(max_tokens=count)
    got: list[Rollout] = []
    start = time.perf_counter()
    with VllmEngine(model, pad_token_id=0, options=options, probe="always") as engine:
        started = time.perf_counter() - start
        engine.sync(params, version=0)
        synced = engine.sync(params, version=1)
        awake = used(plan)

        def generate() -> None:
            got.append(engine.generate(params, Ask(asked, sampling, Key(0), version=1)))

        generate()
        slept = used(plan)
        seconds = once(generate, plan.device)  # which wakes it, if it sleeps
    own = compute_log_probs(params, got[0], forward=Forward(model), micro_batching=MicroBatching(size=8))
    gap = (own - got[0].rollout_log_probs)[got[0].response_mask]
    return {
        "start, s": started,
        "sync, GB/s": synced.num_bytes / synced.seconds / 1e9,
        "tokens/s": rows * count / seconds,
        "k3": float((gap.exp() - 1 - gap).mean()),
        "same again": float(torch.equal(got[0].tokens, got[1].tokens)),
        "slept, GiB": (awake - slept) / 2**30,
    }


def standing_in() -> AbstractContextManager[None]:
    """That of gpu_standin.py, which needs what fppo's engine of vLLM needs."""
    import gpu_standin

    return gpu_standin.standing_in()


def ways(plan: Plan) -> dict[str, dict[str, Any]]:
    """The engines to try, by name."""
    tried: dict[str, dict[str, Any]] = {
        SHARED: {},
        f"{SHARED}, graphs": {"eager": False},
        f"{SHARED}, asleep between": {"sleep": True},
        "ipc": {"transport": "ipc"},
    }
    if plan.device.type == "cpu" or torch.cuda.device_count() > 1:
        tried |= {"nccl": {"transport": "nccl"}, "on another GPU": {"devices": (1,)}}
        tried |= {"cut over two": {"tensor_parallel": 2}}
    return tried


def bench_vllm(plan: Plan) -> list[Record]:
    """All ways of the weights. Raises Skipped without vLLM, unless it is a dry run."""
    installed, dry = importlib.util.find_spec("vllm") is not None, plan.device.type == "cpu"
    if not (installed or dry):
        raise Skipped("vLLM is not installed")
    params = parameters(build(plan.small, plan), plan.device)
    held = None
    if plan.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(plan.device)
        held = torch.empty(int(plan.held * free), dtype=torch.uint8, device=plan.device)
    records: list[Record] = []
    for name, settings in ways(plan).items():
        with standing_in() if dry and not (installed and name == SHARED) else nullcontext():
            records.append({"name": name, **attempt(partial(beside, plan, params, **settings))})
    del held
    columns = {"start, s": ".1f", "sync, GB/s": ".2f", "tokens/s": ".0f", "k3": ".2g", "same again": ".0f"}
    print(table(f"vLLM beside a trainer that holds {plan.held:.0%}", columns | {"slept, GiB": ".2f"}, records))
    verdicts: list[Record] = []
    for r in records:
        name = f"vLLM, {r['name']}"
        if "absent" in r:
            verdicts.append({"name": name, "error": r["absent"], "passed": False})
            continue
        verdicts.append(check(f"{name}: k3 to the trainer's log-probs", r["k3"], 0.05))
        verdicts.append(check(f"{name}: the same tokens again (1: yes)", r["same again"], 1, least=True))
        verdicts.append(check(f"{name}: sync, GB/s", r["sync, GB/s"], SYNC, least=True))
        if "asleep" in name:
            verdicts.append(check(f"{name}: GiB given back", r["slept, GiB"], CACHE_GB, least=True))
    return records + verdicts
