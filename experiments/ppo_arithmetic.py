"""PPO with a critic as a pipeline of functions: the quickstart's task, without its files."""

from functools import partial

import attrs
import tyro

from fppo import advantages, data, models, quickstart, rewards
from fppo.key import Key
from fppo.losses import ppo_clip
from fppo.pipeline import Evaluation, Program, RunState, evaluate, local_passes, stages, train
from fppo.rollout import EmbeddedEngine, Sampling
from fppo.runs import loggers
from fppo.steps import Forward, Loop, MicroBatching, UpdateActor, UpdateCritic, adamw, init_state, schedule


def main(seed: int = 0, steps: int = 40, warm_up: int = 600, batch: int = 512) -> RunState:
    key = Key(seed)
    tokenizer, model, params = quickstart.warmed_up(key, steps=warm_up)
    critic_model, critic = models.as_critic(model, params, key)
    prompts, held_out = quickstart.prompt_sets(tokenizer)
    policy, value, micro = Forward(model), Forward(critic_model), MicroBatching(size=batch)
    engine = EmbeddedEngine(model=model, kernels=policy.kernels, pad_token_id=0)
    sampling = Sampling(max_tokens=4, stop_token_ids=(1,))
    score = partial(rewards.score, reward=rewards.RewardRunner(rewards.exact_match), tokenizer=tokenizer)
    loop = Loop(mini_batch_size=batch // 4, micro_batching=micro, epochs=2)
    slow, fast = (schedule("linear", lr, total_steps=steps * 8) for lr in (3e-4, 1e-3))  # 8 updates per step
    adam, critic_adam = (adamw(rate, betas=(0.9, 0.99), weight_decay=0.0) for rate in (slow, fast))
    program = Program(
        rollout=stages.RollOut(engine=engine, sampling=sampling),
        score=stages.Score(score=score),
        annotate=stages.Annotate(passes=local_passes(policy, value, micro_batching=micro)),
        estimate=stages.Estimate(advantage_fn=advantages.gae, max_tokens=4, whiten=True),
        update_critic=UpdateCritic(forward=value, loop=loop, optimizer=critic_adam),
        update_actor=UpdateActor(forward=policy, loss_fn=ppo_clip, loop=loop, optimizer=adam),
    )
    tests, greedy = [*data.batches(held_out, 512)], attrs.evolve(sampling, greedy=True)
    return train(
        RunState(actor=init_state(params, adam), critic=init_state(critic, critic_adam), key=key),
        program=program,
        draw=partial(data.next_batch, prompts, size=batch, key=key.fold("data")),
        steps=steps,
        observers=[loggers.observer([loggers.PlainConsole(steps)])],
        evaluation=Evaluation(partial(evaluate, batches=tests, engine=engine, sampling=greedy, score=score), every=10),
    )


if __name__ == "__main__":
    tyro.cli(main)
