"""PPO with a critic as a pipeline of functions: the quickstart's task, without its files."""

from functools import partial
from typing import Any

import attrs
import tyro

from fppo import data, models, quickstart, rewards
from fppo.key import Key
from fppo.losses import ppo_clip
from fppo.pipeline import Evaluation, Program, RunState, estimator, evaluate, stages, train
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Sampling
from fppo.runs import loggers
from fppo.runtime.mesh import LOCAL
from fppo.steps.actor import update_actor
from fppo.steps.critic import update_critic
from fppo.steps.forward import Forward
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.schedules import schedule
from fppo.steps.train_state import init_state
from fppo_kernels.record import Kernels


def main(seed: int = 0, steps: int = 40, warm_up: int = 600, batch: int = 512) -> None:
    key, kernels = Key(seed), Kernels.named()
    tokenizer, model, params = quickstart.warmed_up(key, steps=warm_up)
    critic_model, critic = models.as_critic(model, params, key)
    prompts, held_out = quickstart.prompt_sets(tokenizer)
    engine = EmbeddedEngine(model=model, kernels=kernels, pad_token_id=0)
    sampling = Sampling(max_tokens=4, stop_token_ids=(1,))
    score = partial(rewards.score, reward=rewards.RewardRunner(rewards.exact_match), tokenizer=tokenizer)
    loop = Loop(mini_batch_size=batch // 4, micro_batching=MicroBatching(size=batch), epochs=2)
    rate = partial(schedule, "linear", total_steps=steps * 8)
    policy, value = (adamw(rate(lr), betas=(0.9, 0.99), weight_decay=0.0) for lr in (3e-4, 1e-3))
    shared: dict[str, Any] = {"kernels": kernels, "mesh": LOCAL, "micro_batching": loop.micro_batching}
    program = Program(
        rollout=partial(stages.rollout_stage, engine=engine, sampling=sampling),
        score=partial(stages.score_stage, score=score),
        annotate=partial(stages.annotate, model=model, critic_model=critic_model, **shared),
        estimate=partial(stages.estimate, advantage_fn=estimator("gae"), max_tokens=4, whiten=True),
        update_critic=partial(update_critic, forward=Forward(critic_model), loop=loop, optimizer=value),
        update_actor=partial(update_actor, forward=Forward(model), loss_fn=ppo_clip, loop=loop, optimizer=policy),
    )
    test = {"batches": [*data.batches(held_out, 512)], "sampling": attrs.evolve(sampling, greedy=True)}
    train(
        RunState(actor=init_state(params, policy), critic=init_state(critic, value), key=key),
        program=program,
        draw=partial(data.next_batch, prompts, size=batch, key=key.fold("data")),
        steps=steps,
        observers=[loggers.observer([loggers.PlainConsole(steps)])],
        evaluation=Evaluation(partial(evaluate, engine=engine, score=score, **test), every=10),
    )


if __name__ == "__main__":
    tyro.cli(main)
