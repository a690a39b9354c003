"""A KL penalty that fades: its coefficient is a function of the step, set in the script's own loop over `ppo_step`."""

from functools import partial

import tyro

from fppo import advantages, data, losses, metrics, quickstart, rewards, tree
from fppo.key import Key
from fppo.losses import KLState
from fppo.pipeline import Program, RunState, local_passes, ppo_step, stages
from fppo.rollout import EmbeddedEngine, Sampling
from fppo.steps import Forward, Loop, MicroBatching, UpdateActor, adamw, init_state, schedule


def main(
    seed: int = 0, steps: int = 20, warm_up: int = 600, batch: int = 512, group: int = 8, start: float = 0.5
) -> None:
    key, coefficient = Key(seed), schedule("linear", start, total_steps=steps)
    tokenizer, model, params = quickstart.warmed_up(key, steps=warm_up)
    prompts, _ = quickstart.prompt_sets(tokenizer)
    policy, micro, adam = Forward(model), MicroBatching(size=batch), adamw(lambda step: 3e-4, weight_decay=0.0)
    engine = EmbeddedEngine(model=model, kernels=policy.kernels, pad_token_id=0)
    sampling = Sampling(n=group, max_tokens=4, stop_token_ids=(1,))
    score = partial(rewards.score, reward=rewards.RewardRunner(rewards.exact_match), tokenizer=tokenizer)
    loop = Loop(mini_batch_size=batch // 4, micro_batching=micro, epochs=2)
    program = Program(
        rollout=stages.RollOut(engine=engine, sampling=sampling),
        score=stages.Score(score=score),
        annotate=stages.Annotate(passes=local_passes(policy, micro_batching=micro)),
        estimate=stages.Estimate(advantage_fn=advantages.rloo, max_tokens=4, kl_in_reward=True),
        update_actor=UpdateActor(forward=policy, loss_fn=losses.ppo_clip, loop=loop, optimizer=adam),
    )
    draw = partial(data.next_batch, prompts, size=batch // group, key=key.fold("data"))
    run = RunState(actor=init_state(params, adam), ref=params, key=key)
    for step in range(steps):
        run = tree.replace(run, kl=KLState(coef=coefficient(step)))
        run, _, report = ppo_step(run, program=program, draw=draw)
        numbers = metrics.report(report)
        kl, reward = numbers["actor/reward_kl_penalty"], numbers["critic/score/mean"]
        print(f"step {run.step}/{steps}  coefficient {run.kl.coef:.4f}  kl {kl:.4f}  reward {reward:.3f}")


if __name__ == "__main__":
    tyro.cli(main)
