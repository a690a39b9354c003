"""The short way into a script: a run and its stages, wired from a model, prompts and a reward, to be rearranged."""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs

from fppo import advantages, data, losses, models, rewards
from fppo.advantages.columns import Estimator, name_of, reads, whitens
from fppo.data import PromptSet
from fppo.key import Key
from fppo.models.model import Model, Params
from fppo.pipeline.feedback import Prompt, untaught
from fppo.pipeline.passes import Passes, PolicyPass, RouterReplay, local_passes
from fppo.pipeline.program import Draw, Program, RunState, Together, UpdateStage, in_turn
from fppo.pipeline.stages import Annotate, Estimate, RollOut, Score, ScoreFn, ScoreWithGreedy
from fppo.pipeline.teacher import LOG_PROBS, TOP, ScoreByTeacher, TeachByPolicy, TeacherPass, follow
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Sampling
from fppo.steps.actor import DistillTerm, OldLogProbs, PolicyTerms, UpdateActor
from fppo.steps.critic import UpdateCritic
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import Optimizer
from fppo.steps.outputs import Forward, Top
from fppo.steps.train_state import init_state
from fppo.tree import copy, replace


@attrs.frozen(kw_only=True)
class Pieces:
    """The parts of a run. The stages of `program` are frozen values: `attrs.evolve(program, update_actor=
    attrs.evolve(program.update_actor, loss_fn=mine))` changes one field of a stage, and a function of your own can
    replace a stage in the same way."""

    run: RunState  # before its first step
    program: Program
    draw: Draw
    policy: Forward
    critic: Forward | None
    engine: EmbeddedEngine
    sampling: Sampling
    runner: rewards.RewardRunner  # whose processes end with this one, or when it is closed
    score: ScoreFn


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
    """Make a run of PPO on one device, for `train(pieces.run, program=pieces.program, draw=pieces.draw, steps=...)`.

    `policy` is what `models.load` returns. Each step takes `batch_size` sequences, `sampling.n` for each prompt, which
    end with the tokenizer's end token if `sampling` names no stop tokens. `loop` and `optimizer` are the actor's and
    the critic's; there is a critic, made of the policy, for an `advantage` that reads values, as `advantages.gae` does.
    The loss is `losses.ppo_clip`, without a KL term or a reference. Draws depend on `key`, by default Key(0).

    Raises ValueError for sizes that do not fit each other, and for a tokenizer or prompts that do not fit the model.
    """
    model, params = policy
    key = key or Key(0)
    _check_sizes(sampling, batch_size, loop, advantage)
    data.check_vocabulary(tokenizer, {"policy": model.config})
    data.check_tokens(prompts, model.config.vocab_size)
    if not sampling.stop_token_ids:
        sampling = attrs.evolve(sampling, stop_token_ids=data.stop_tokens(tokenizer))
    forward, critic, critic_state, budget = Forward(model), None, None, loop.micro_batching.halved_from
    if reads(advantage, "values"):
        critic_model, critic_params = models.as_critic(model, params, key)
        critic, critic_state = Forward(critic_model), init_state(critic_params, optimizer, token_budget=budget)
    engine = EmbeddedEngine(model=model, kernels=forward.kernels, pad_token_id=prompts.pad_token_id)
    runner = rewards.RewardRunner(reward)
    score = partial(rewards.score, reward=runner, tokenizer=tokenizer)
    terms, micro_batching = PolicyTerms(temperature=sampling.temperature), loop.micro_batching
    shared = {"loop": loop, "optimizer": optimizer}
    program = wire(
        rollout=RollOut(engine=engine, sampling=sampling),
        score=score,
        passes=local_passes(forward, critic, micro_batching=micro_batching, temperature=sampling.temperature),
        estimate=Estimate(advantage_fn=advantage, max_tokens=sampling.max_tokens, whiten=whitens(advantage)),
        update_actor=UpdateActor(forward=forward, loss_fn=losses.ppo_clip, terms=terms, **shared),
        update_critic=critic and UpdateCritic(forward=critic, **shared),
    )
    return Pieces(
        run=RunState(actor=init_state(params, optimizer, token_budget=budget), critic=critic_state, key=key),
        program=program,
        draw=partial(data.next_batch, prompts, size=batch_size // sampling.n, key=key.fold("data")),
        policy=forward,
        critic=critic,
        engine=engine,
        sampling=sampling,
        runner=runner,
        score=score,
    )


def with_teacher(own: Pieces, teacher: tuple[Model, Params], *, micro_batching: MicroBatching) -> Pieces:
    """Add a teacher, as `models.load` returns it, whose log-probs of the sampled tokens are added with the scores: for
    an estimator that reads them, such as `advantages.reverse_kl`. Raises ValueError for a teacher with a smaller
    vocabulary."""
    model, params = teacher
    most, rows = own.policy.model.config.vocab_size, model.config.vocab_size
    if rows < most:
        raise ValueError(f"the teacher has {rows} tokens, and the policy may sample {most}: give one of its tokenizer")
    taught = TeacherPass(params=params, policy=PolicyPass(forward=Forward(model), micro_batching=micro_batching))
    score = ScoreByTeacher(score=own.score, teacher=taught, temperature=own.sampling.temperature)
    stage = own.program.score
    assert isinstance(stage, (Score, ScoreWithGreedy))  # `wire` makes no other
    program = attrs.evolve(own.program, score=attrs.evolve(stage, score=score))
    return attrs.evolve(own, score=score, program=program)


def self_taught(
    own: Pieces, prompt: Prompt, *, decay: float = 0.0, distill: DistillTerm | None = None, top: Top | None = None
) -> Pieces:
    """Make the policy its own teacher, behind prompts that `prompt` gives by the scores (`PromptByFeedback`).

    `decay` is what each step keeps of the average of the policy's past that teaches (`follow`); 0: the policy as it is,
    1: as it was at the start. With `distill` the loss has that term, of the tokens `top`; else an estimator such as
    `advantages.reverse_kl` learns from the teacher's log-probs. Rows without a prompt are left out if the estimator
    reads a teacher's log-probs. Raises ValueError for one of `distill` and `top` without the other.
    """
    if (distill is None) != (top is None):
        raise ValueError("distill and top belong together: give a DistillTerm and the tokens that it is of, or neither")
    program, stage = own.program, own.program.annotate
    assert isinstance(stage, Annotate)  # `wire` makes no other
    policy: Any = stage.passes.policy
    policy = attrs.evolve(policy, forward=attrs.evolve(policy.forward, top=top))
    how = {"prompt": prompt, "view": data.with_teacher_prompt, "outputs": LOG_PROBS if top is None else TOP}
    estimate: Any = program.estimate
    if reads(estimate.advantage_fn, "teacher_log_probs"):
        estimate = attrs.evolve(estimate, drop=[*estimate.drop, untaught])
    program = attrs.evolve(
        program,
        annotate=TeachByPolicy(stage=stage, policy=policy, **how),
        estimate=estimate,
        update_actor=attrs.evolve(program.update_actor, distill=distill),
        follow=partial(follow, decay=decay),
    )
    run = own.run if decay == 0 else replace(own.run, teacher=copy(own.run.actor.params))
    return attrs.evolve(own, program=program, run=run)


def wire(
    *,
    rollout: RollOut,
    score: ScoreFn,
    passes: Passes,
    estimate: Estimate,
    update_actor: UpdateStage,
    update_critic: UpdateStage | None = None,
    old_log_probs: OldLogProbs = "pass",
    replay: RouterReplay = "none",
    together: Together | None = None,
    check: bool = True,
) -> Program:
    """Make the program of a step: settings that its stages share are given once.

    An estimator that reads "baselines" gets the scores of greedy responses, one that reads "sum_squared_probs" gets
    those of the policy's pass. See `Annotate` for `old_log_probs` and `replay`, `Program` for `together` and `check`.
    """
    engine, sampling, advantage = rollout.engine, rollout.sampling, estimate.advantage_fn
    greedy = ScoreWithGreedy(score=score, engine=engine, sampling=attrs.evolve(sampling, greedy=True, n=1))
    return Program(
        rollout=rollout,
        score=greedy if reads(advantage, "baselines") else Score(score=score),
        annotate=Annotate(
            passes=passes,
            old_log_probs=old_log_probs,
            sum_squared=reads(advantage, "sum_squared_probs"),
            replay=replay,
            together=together or in_turn,
        ),
        estimate=estimate,
        update_actor=update_actor,
        update_critic=update_critic,
        together=together,
        check=check,
    )


def _check_sizes(sampling: Sampling, batch_size: int, loop: Loop, advantage: Estimator) -> None:
    """Raise ValueError that names all sizes that do not fit, in the words of the checks of settings."""
    n, mini, wrong = sampling.n, loop.mini_batch_size, list[str]()
    if batch_size < 1 or batch_size % n:
        wrong.append(f"batch_size={batch_size}: give a multiple of Sampling.n = {n}, since it counts sequences")
    if mini > batch_size or batch_size % mini:
        wrong.append(f"mini_batch_size={mini}: must divide batch_size = {batch_size}; both count sequences")
    if n == 1 and reads(advantage, "groups"):
        wrong.append(f"Sampling.n=1: advantage {name_of(advantage)!r} compares responses to one prompt; give 2 or more")
    if wrong:
        raise ValueError("\n".join(wrong))
