"""The short way into a script: a run and its stages, wired from a model, prompts and a reward, to be rearranged."""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs

from fppo import advantages, data, losses, models, rewards
from fppo.data import PromptSet
from fppo.key import Key
from fppo.models.model import Model, Params
from fppo.pipeline import stages
from fppo.pipeline.estimators import Estimator, name_of, reads, whitens
from fppo.pipeline.program import AnnotateStage, Draw, EstimateStage, Program, RunState, ScoreStage
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Sampling
from fppo.steps.actor import PolicyTerms, update_actor
from fppo.steps.critic import update_critic
from fppo.steps.forward import Forward
from fppo.steps.loop import Loop
from fppo.steps.optimizers import Optimizer
from fppo.steps.train_state import init_state


@attrs.frozen(kw_only=True)
class Pieces:
    """What a run is made of. The stages of `program` are `functools.partial`: `attrs.evolve(program, update_actor=
    partial(program.update_actor, loss_fn=mine))` changes one keyword of one, and a function of one's own takes the
    place of a stage in the same way."""

    run: RunState  # before its first step
    program: Program
    draw: Draw
    policy: Forward
    critic: Forward | None
    engine: EmbeddedEngine
    sampling: Sampling
    runner: rewards.RewardRunner  # whose processes end with this one, or when it is closed
    score: stages.ScoreFn


def pieces(
    policy: tuple[Model, Params],
    tokenizer: Any,
    prompts: PromptSet,
    *,
    reward: rewards.Reward,
    sampling: Sampling,
    batch_size: int,
    loop: Loop,
    optimizer: Optimizer,
    advantage: Estimator = advantages.gae,
    key: Key | None = None,
) -> Pieces:
    """A run of PPO on one device: what `train(pieces.run, program=pieces.program, draw=pieces.draw, steps=...)` takes.

    `policy` is what `models.load` returns. Each step takes `batch_size` sequences, `sampling.n` for each prompt, which
    end with the tokenizer's end where `sampling` names no stop tokens. `loop` and `optimizer` are the actor's and the
    critic's; there is a critic, made of the policy, for an `advantage` that reads values, as `advantages.gae` does.
    The loss is `losses.ppo_clip`, without a KL term or a reference. Draws are by `key`, which is Key(0) without one.

    Raises ValueError for sizes that do not fit each other, and for a tokenizer or prompts that are not the model's.
    """
    model, params = policy
    key = key or Key(0)
    _check_sizes(sampling, batch_size, loop, advantage)
    data.check_vocabulary(tokenizer, {"policy": model.config})
    data.check_tokens(prompts, model.config.vocab_size)
    if not sampling.stop_token_ids:
        sampling = attrs.evolve(sampling, stop_token_ids=data.stop_tokens(tokenizer))
    forward, critic, critic_state = Forward(model), None, None
    if reads(advantage, "values"):
        critic_model, critic_params = models.as_critic(model, params, key)
        critic, critic_state = Forward(critic_model), init_state(critic_params, optimizer)
    engine = EmbeddedEngine(model=model, kernels=forward.kernels, pad_token_id=prompts.pad_token_id)
    runner = rewards.RewardRunner(reward)
    score = partial(rewards.score, reward=runner, tokenizer=tokenizer)
    terms, shared = PolicyTerms(temperature=sampling.temperature), {"loop": loop, "optimizer": optimizer}
    return Pieces(
        run=RunState(actor=init_state(params, optimizer), critic=critic_state, key=key),
        program=Program(
            rollout=partial(stages.rollout_stage, engine=engine, sampling=sampling),
            score=_score_stage(score, engine, sampling, advantage),
            annotate=_annotate_stage(forward, critic, sampling, loop, advantage),
            estimate=_estimate_stage(sampling, advantage),
            update_actor=partial(update_actor, forward=forward, loss_fn=losses.ppo_clip, terms=terms, **shared),
            update_critic=critic and partial(update_critic, forward=critic, **shared),
        ),
        draw=partial(data.next_batch, prompts, size=batch_size // sampling.n, key=key.fold("data")),
        policy=forward,
        critic=critic,
        engine=engine,
        sampling=sampling,
        runner=runner,
        score=score,
    )


def _score_stage(score: stages.ScoreFn, engine: EmbeddedEngine, sampling: Sampling, advantage: Estimator) -> ScoreStage:
    if not reads(advantage, "baselines"):
        return partial(stages.score_stage, score=score)
    greedy = attrs.evolve(sampling, greedy=True, n=1)
    return partial(stages.score_with_greedy, score=score, engine=engine, sampling=greedy)


def _annotate_stage(
    forward: Forward, critic: Forward | None, sampling: Sampling, loop: Loop, advantage: Estimator
) -> AnnotateStage:
    return partial(
        stages.annotate,
        forward=forward,
        critic=critic,
        micro_batching=loop.micro_batching,
        temperature=sampling.temperature,
        sum_squared=reads(advantage, "sum_squared_probs"),
    )


def _estimate_stage(sampling: Sampling, advantage: Estimator) -> EstimateStage:
    return partial(
        stages.estimate,
        advantage_fn=advantage,
        max_tokens=sampling.max_tokens,
        whiten=whitens(advantage),
    )


def _check_sizes(sampling: Sampling, batch_size: int, loop: Loop, advantage: Estimator) -> None:
    """Raises ValueError with all that does not fit, as the checks of settings say it."""
    n, mini, wrong = sampling.n, loop.mini_batch_size, list[str]()
    if batch_size < 1 or batch_size % n:
        wrong.append(f"batch_size={batch_size}: give a multiple of Sampling.n = {n}, since it counts sequences")
    if mini > batch_size or batch_size % mini:
        wrong.append(f"mini_batch_size={mini}: must divide batch_size = {batch_size}; both count sequences")
    if n == 1 and reads(advantage, "groups"):
        wrong.append(f"Sampling.n=1: advantage {name_of(advantage)!r} compares responses to one prompt; give 2 or more")
    if wrong:
        raise ValueError("\n".join(wrong))
