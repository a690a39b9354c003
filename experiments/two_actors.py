"""Two losses under one key: two actors train on the same draws, and where they first differ is named.

Until then both have the same bits: the same prompts, responses, advantages and parameters.
"""

from functools import partial
from typing import Literal

import attrs
import tyro

from fppo import advantages, data, losses, metrics, quickstart, rewards
from fppo.key import Key
from fppo.pipeline import Program, RunState, local_passes, ppo_step, stages
from fppo.pipeline.replay import Difference, digests_of, first_difference
from fppo.rollout import EmbeddedEngine, Sampling
from fppo.steps import Forward, Loop, MicroBatching, UpdateActor, adamw, init_state

Name = Literal["ppo_clip", "cispo", "gspo", "gmpo", "sapo", "dro"]


def main(
    one: Name = "ppo_clip", two: Name = "cispo", seed: int = 0, steps: int = 20, warm_up: int = 600, batch: int = 512
) -> Difference | None:
    key = Key(seed)
    tokenizer, model, params = quickstart.warmed_up(key, steps=warm_up)
    prompts, _ = quickstart.prompt_sets(tokenizer)
    policy, micro, adam = Forward(model), MicroBatching(size=batch), adamw(lambda step: 3e-4, weight_decay=0.0)
    engine = EmbeddedEngine(model=model, kernels=policy.kernels, pad_token_id=0)
    sampling = Sampling(n=8, max_tokens=4, stop_token_ids=(1,))
    score = partial(rewards.score, reward=rewards.RewardRunner(rewards.exact_match), tokenizer=tokenizer)
    loop = Loop(mini_batch_size=batch // 4, micro_batching=micro, epochs=2)
    update = partial(UpdateActor, forward=policy, loop=loop, optimizer=adam)
    left = Program(
        rollout=stages.RollOut(engine=engine, sampling=sampling),
        score=stages.Score(score=score),
        annotate=stages.Annotate(passes=local_passes(policy, micro_batching=micro)),
        estimate=stages.Estimate(advantage_fn=advantages.grpo, max_tokens=4),
        update_actor=update(loss_fn=getattr(losses, one)),
    )
    right = attrs.evolve(left, update_actor=update(loss_fn=getattr(losses, two)))
    draw = partial(data.next_batch, prompts, size=batch // 8, key=key.fold("data"))
    a = b = RunState(actor=init_state(params, adam), key=key)
    difference = None
    for step in range(1, steps + 1):
        a, rows_a, report_a = ppo_step(a, program=left, draw=draw)
        b, rows_b, report_b = ppo_step(b, program=right, draw=draw)
        difference = difference or first_difference(step, digests_of(a, rows_a), digests_of(b, rows_b))
        mean_a, mean_b = (metrics.report(report)["critic/score/mean"] for report in (report_a, report_b))
        print(f"step {step}/{steps}  reward of {one} {mean_a:.3f}, of {two} {mean_b:.3f}")
    if difference is None:
        print("no difference")
    else:
        print(f"first difference: step {difference.step}, {difference.part}{difference.leaf}")
    return difference


if __name__ == "__main__":
    tyro.cli(main)
