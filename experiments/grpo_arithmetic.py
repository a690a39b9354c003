"""GRPO as the same pipeline: groups of responses in place of the critic, and a KL term in the loss."""

from functools import partial
from typing import Any

import attrs
import tyro

from fppo import data, losses, quickstart, rewards, tree
from fppo.key import Key
from fppo.pipeline import Evaluation, Program, RunState, estimator, evaluate, stages, train
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Sampling
from fppo.runs import loggers
from fppo.runtime.mesh import LOCAL
from fppo.steps.actor import PolicyTerms, update_actor
from fppo.steps.forward import Forward
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.schedules import schedule
from fppo.steps.train_state import init_state
from fppo_kernels.record import Kernels


def main(seed: int = 0, steps: int = 40, warm_up: int = 600, batch: int = 512, group: int = 8) -> None:
    key, kernels = Key(seed), Kernels.named()
    tokenizer, model, params = quickstart.warmed_up(key, steps=warm_up)
    prompts, held_out = quickstart.prompt_sets(tokenizer)
    engine = EmbeddedEngine(model=model, kernels=kernels, pad_token_id=0)
    sampling = Sampling(n=group, max_tokens=4, stop_token_ids=(1,))
    score = partial(rewards.score, reward=rewards.RewardRunner(rewards.exact_match), tokenizer=tokenizer)
    loop = Loop(mini_batch_size=batch // 4, micro_batching=MicroBatching(size=batch), epochs=2)
    rate = schedule("linear", 3e-4, total_steps=steps * 8)
    optimizer = adamw(rate, betas=(0.9, 0.99), weight_decay=0.0)
    shared: dict[str, Any] = {"kernels": kernels, "mesh": LOCAL, "micro_batching": loop.micro_batching}
    update: dict[str, Any] = {"forward": Forward(model), "loop": loop, "terms": PolicyTerms(kl_coef=0.001)}
    program = Program(
        rollout=partial(stages.rollout_stage, engine=engine, sampling=sampling),
        score=partial(stages.score_stage, score=score),
        annotate=partial(stages.annotate, model=model, critic_model=None, **shared),
        estimate=partial(stages.estimate, advantage_fn=estimator("grpo"), max_tokens=4),
        update_actor=partial(update_actor, loss_fn=losses.ppo_clip, optimizer=optimizer, **update),
    )
    test = {"batches": [*data.batches(held_out, 512)], "sampling": attrs.evolve(sampling, greedy=True, n=1)}
    train(
        RunState(actor=init_state(tree.copy(params), optimizer), ref=params, key=key),
        program=program,
        draw=partial(data.next_batch, prompts, size=batch // group, key=key.fold("data")),
        steps=steps,
        observers=[loggers.observer([loggers.PlainConsole(steps)])],
        evaluation=Evaluation(partial(evaluate, engine=engine, score=score, **test), every=10),
    )


if __name__ == "__main__":
    tyro.cli(main)
