"""A new advantage estimator: written, put through the laws, and used for a short run on the quickstart's task."""

from functools import partial

import torch
import tyro
from torch import Tensor

from fppo import data, laws, losses, quickstart, rewards
from fppo.advantages import Advantages
from fppo.batch import Annotated
from fppo.key import Key
from fppo.pipeline import Program, RunState, stages, train
from fppo.rollout import EmbeddedEngine, Sampling
from fppo.runs import loggers
from fppo.steps import Forward, Loop, MicroBatching, adamw, init_state, update_actor


def median_baseline(scores: Tensor, mask: Tensor, groups: Tensor) -> Advantages:
    """The score minus the (lower) median of its group's: of right and wrong answers, only the rarer kind counts.

    `scores` [B], `mask` bool [B, T], `groups` int64 [B]. Rows without tokens count nowhere.
    """
    peers = (groups[:, None] == groups) & mask.any(1)  # [B, B]
    medians = scores.detach().expand(peers.shape).where(peers, torch.nan).nanmedian(1).values
    above = (scores.detach() - medians)[:, None]
    return Advantages(above.where(mask, 0.0), scores.detach()[:, None].where(mask, 0.0))


def estimate(rows: Annotated, token_rewards: Tensor) -> Advantages:
    return median_baseline(token_rewards.sum(1), rows.response_mask, rows.groups)


def main(seed: int = 0, steps: int = 10, warm_up: int = 600, batch: int = 512, group: int = 8) -> None:
    laws.check_advantages(median_baseline)  # a broken one is shown with the smallest batch on which it is broken
    print("median_baseline keeps the laws.")
    key = Key(seed)
    tokenizer, model, params = quickstart.warmed_up(key, steps=warm_up)
    prompts, _ = quickstart.prompt_sets(tokenizer)
    policy, micro, adam = Forward(model), MicroBatching(size=batch), adamw(lambda step: 3e-4, weight_decay=0.0)
    engine = EmbeddedEngine(model=model, kernels=policy.kernels, pad_token_id=0)
    sampling = Sampling(n=group, max_tokens=4, stop_token_ids=(1,))
    score = partial(rewards.score, reward=rewards.RewardRunner(rewards.exact_match), tokenizer=tokenizer)
    loop = Loop(mini_batch_size=batch // 4, micro_batching=micro, epochs=2)
    program = Program(
        rollout=partial(stages.rollout_stage, engine=engine, sampling=sampling),
        score=partial(stages.score_stage, score=score),
        annotate=partial(stages.annotate, forward=policy, critic=None, micro_batching=micro),
        estimate=partial(stages.estimate, advantage_fn=estimate, max_tokens=4),
        update_actor=partial(update_actor, forward=policy, loss_fn=losses.ppo_clip, loop=loop, optimizer=adam),
    )
    run = RunState(actor=init_state(params, adam), key=key)
    draw = partial(data.next_batch, prompts, size=batch // group, key=key.fold("data"))
    train(run, program=program, draw=draw, steps=steps, observers=[loggers.observer([loggers.PlainConsole(steps)])])


if __name__ == "__main__":
    tyro.cli(main)
