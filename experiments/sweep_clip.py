"""Several clip ranges trained side by side: torch.func.vmap over whole updates of a stacked tree of parameters.

All begin with one policy and make many updates on its responses; the clip decides how far they move. At the end each
policy samples responses of its own.
"""

from functools import partial
from typing import Any

import torch
import tyro
from answers.sampled import start
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import vmap

from fppo import losses, tree
from fppo.key import Key
from fppo.steps import Loop, MicroBatching, TrainState, UpdateActor, adamw

RANGES = (0.05, 0.2, 0.8, 3.2)
CURVES = {"actor/ppo_kl": "KL to the policy that sampled", "actor/pg_clipfrac": "share of tokens that are clipped"}


def main(
    out: str = "sweep_clip.png", warm_up: int = 600, prompts: int = 64, updates: int = 24, lr: float = 2e-4
) -> dict[str, Tensor]:
    """Curves [clips, updates] by name, and "rewards": before, and after by clip."""
    params, sample, rows = start(Key(0), warm_up=warm_up, prompts=prompts)
    loop = Loop(mini_batch_size=8 * prompts, micro_batching=MicroBatching(size=8 * prompts))
    optimizer = adamw(lambda step: lr)

    def updated(params: Any, opt: Any, clip: Tensor) -> tuple[Any, Any, dict[str, Tensor]]:
        loss = partial(losses.ppo_clip, clip_low=clip, clip_high=clip, dual_clip=None)
        stage: Any = UpdateActor(forward=sample.forward, loss_fn=loss, loop=loop, optimizer=optimizer)
        state, report = stage(TrainState(params=params, opt=opt, step=0), rows)
        return state.params, state.opt, {name: report[name].total / report[name].count for name in CURVES}

    many, opt = tree.map(lambda x: torch.stack([x] * len(RANGES)), (params, optimizer.init(params)))
    curves, clips = list[dict[str, Tensor]](), torch.tensor(RANGES)
    for _ in range(updates):
        many, opt, means = vmap(updated)(many, opt, clips)
        curves += [means]
    found = {name: torch.stack([means[name] for means in curves], 1) for name in CURVES}
    each = [params, *({name: x[n] for name, x in many.items()} for n in range(len(RANGES)))]
    found["rewards"] = torch.stack([sample(x, Key(2)).scores.mean() for x in each])
    figure = Figure(figsize=(12, 4), layout="constrained")
    *panels, last = figure.subplots(1, 3)
    for panel, (name, title) in zip(panels, CURVES.items(), strict=True):
        panel.plot(range(1, updates + 1), found[name].T, label=[f"clip {clip}" for clip in RANGES])
        panel.set(title=title, xlabel="updates on the same responses")
        panel.legend()
    last.bar(["before", *map(str, RANGES)], found["rewards"])
    last.set(title="reward, before and after", xlabel="clip range")
    figure.savefig(out)
    return found


if __name__ == "__main__":
    tyro.cli(main)
