"""Tokens per second of pools of 1 and of 2 engines, each pinned to cores of its own; on an idle machine.

python experiments/bench/engines.py --cores 1
"""

import os
import statistics
import time
from contextlib import ExitStack

import torch
import tyro

from fppo import models, quickstart
from fppo.batch import Column, Prompts
from fppo.fleet import HERE, LOCAL_GROUP, Group, Here, RankSpec, cluster
from fppo.key import Key
from fppo.models.model import Model
from fppo.rollout import Ask, EmbeddedEngine, EnginePool, Policy, Sampling
from fppo.rollout.pool import Generate
from fppo_kernels.table import Kernels


def model_of(width: int, layers: int) -> Model:
    return quickstart.small_model(64, width=width, layers=layers, positions=512)


def engine(here: Here, width: int, layers: int, cores: list[int]) -> Generate:
    os.sched_setaffinity(0, cores)
    return EmbeddedEngine(model=model_of(width, layers), kernels=Kernels.named(), pad_token_id=0).generate


def prompts_of(count: int) -> Prompts:
    tokens, names = Key(1).uniform(torch.arange(count), 16).mul(60).long() + 2, Column([""] * count)
    return Prompts(
        row_ids=torch.arange(count),
        tokens=tokens,
        attention_mask=torch.ones_like(tokens, dtype=torch.bool),
        ids=names,
        ground_truth=names,
        source=names,
        extras=names,
    )


def main(
    cores: int = 1,
    width: int = 256,
    layers: int = 4,
    count: int = 256,
    tokens: int = 128,
    rows: int = 32,
    times: int = 5,
) -> None:
    """`count` prompts get `tokens` tokens each, in requests of so many `rows`."""
    model, free = model_of(width, layers), sorted(os.sched_getaffinity(0))
    params = models.init_params(model, Key(0))
    policy = Policy(group=LOCAL_GROUP, model=model)
    asked = Ask(prompts_of(count), Sampling(max_tokens=tokens), Key(2))
    for engines in (1, 2):
        if engines * cores > len(free):
            raise ValueError(f"cores = {cores}: {engines} engines need as many each, and there are {len(free)}")
        with cluster("processes") as there, ExitStack() as opened:
            groups = [Group(f"engine {i}", there.ranks(RankSpec(threads=cores))) for i in range(engines)]
            own = {group.name: free[i * cores : (i + 1) * cores] for i, group in enumerate(groups)}
            for group in groups:
                opened.enter_context(group)

            def make(group: Group, own: dict[str, list[int]] = own) -> object:
                return group.call(engine, HERE, width, layers, own[group.name], stays=True)

            names = model.whole_shapes
            pool = opened.enter_context(EnginePool(groups, make, policy, names=names, pad_token_id=0, rows=rows))
            pool.generate(params, asked)  # which sends the weights
            took: list[float] = []
            for _ in range(times):
                start = time.perf_counter()
                pool.generate(params, asked)
                took.append(time.perf_counter() - start)
        rate = count * tokens / statistics.median(took)
        print(f"{engines} of {cores} cores each: {rate:,.0f} tokens/s ({min(took):.2f} to {max(took):.2f} s)")


if __name__ == "__main__":
    tyro.cli(main)
