"""GRPO as the same pipeline: groups of responses in place of the critic, and a KL term in the loss."""

from functools import partial

import attrs
import tyro

from fppo import advantages, data, losses, quickstart, rewards
from fppo.key import Key
from fppo.pipeline import Evaluation, Program, RunState, evaluate, local_passes, stages, train
from fppo.rollout import EmbeddedEngine, Sampling
from fppo.runs import loggers
from fppo.steps import Forward, Loop, MicroBatching, PolicyTerms, UpdateActor, adamw, init_state, schedule


def main(seed: int = 0, steps: int = 40, warm_up: int = 600, batch: int = 512, group: int = 8) -> None:
    key = Key(seed)
    tokenizer, model, params = quickstart.warmed_up(key, steps=warm_up)
    prompts, held_out = quickstart.prompt_sets(tokenizer)
    policy, micro = Forward(model), MicroBatching(size=batch)
    engine = EmbeddedEngine(model=model, kernels=policy.kernels, pad_token_id=0)
    sampling = Sampling(n=group, max_tokens=4, stop_token_ids=(1,))
    score = partial(rewards.score, reward=rewards.RewardRunner(rewards.exact_match), tokenizer=tokenizer)
    loop = Loop(mini_batch_size=batch // 4, micro_batching=micro, epochs=2)
    adam = adamw(schedule("linear", 3e-4, total_steps=steps * 8), betas=(0.9, 0.99), weight_decay=0.0)
    terms = PolicyTerms(kl_coef=0.001)
    program = Program(
        rollout=stages.RollOut(engine=engine, sampling=sampling),
        score=stages.Score(score=score),
        annotate=stages.Annotate(passes=local_passes(policy, micro_batching=micro)),
        estimate=stages.Estimate(advantage_fn=advantages.grpo, max_tokens=4),
        update_actor=UpdateActor(forward=policy, loss_fn=losses.ppo_clip, loop=loop, optimizer=adam, terms=terms),
    )
    tests, greedy = [*data.batches(held_out, 512)], attrs.evolve(sampling, greedy=True, n=1)
    train(
        RunState(actor=init_state(params, adam), ref=params, key=key),
        program=program,
        draw=partial(data.next_batch, prompts, size=batch // group, key=key.fold("data")),
        steps=steps,
        observers=[loggers.observer([loggers.PlainConsole(steps)])],
        evaluation=Evaluation(partial(evaluate, batches=tests, engine=engine, sampling=greedy, score=score), every=10),
    )


if __name__ == "__main__":
    tyro.cli(main)
