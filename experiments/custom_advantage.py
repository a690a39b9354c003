"""A new advantage estimator: written, put through the laws, and used for a short run on the quickstart's task."""

import torch
import tyro
from torch import Tensor

from fppo import laws, quickstart, rewards
from fppo.advantages import Advantages
from fppo.key import Key
from fppo.pipeline import pieces, train
from fppo.rollout import Sampling
from fppo.runs import loggers
from fppo.steps import Loop, MicroBatching, adamw


def median_baseline(scores: Tensor, mask: Tensor, groups: Tensor) -> Advantages:
    """The score minus the (lower) median of its group's: of right and wrong answers, only the rarer kind counts.

    `scores` [B], `mask` bool [B, T], `groups` int64 [B]. Rows without tokens count nowhere.
    """
    peers = (groups[:, None] == groups) & mask.any(1)  # [B, B]
    medians = scores.detach().expand(peers.shape).where(peers, torch.nan).nanmedian(1).values
    above = (scores.detach() - medians)[:, None]
    return Advantages(above.where(mask, 0.0), scores.detach()[:, None].where(mask, 0.0))


def main(seed: int = 0, steps: int = 10, warm_up: int = 600, batch: int = 512, group: int = 8) -> None:
    laws.check_advantages(median_baseline)  # a broken one is shown with the smallest batch on which it is broken
    print("median_baseline keeps the laws.")
    key = Key(seed)
    tokenizer, model, params = quickstart.warmed_up(key, steps=warm_up)
    wired = pieces(
        (model, params),
        tokenizer,
        quickstart.prompt_sets(tokenizer)[0],
        reward=rewards.exact_match,
        sampling=Sampling(n=group, max_tokens=4),
        batch_size=batch,
        loop=Loop(mini_batch_size=batch // 4, micro_batching=MicroBatching(size=batch), epochs=2),
        optimizer=adamw(lambda step: 3e-4, weight_decay=0.0),
        advantage=median_baseline,
        key=key,
    )
    console = loggers.observer([loggers.PlainConsole(steps)])
    train(wired.run, program=wired.program, draw=wired.draw, steps=steps, observers=[console])


if __name__ == "__main__":
    tyro.cli(main)
