"""Small runs of an arithmetic task: clean ones that differ in seed, loss, estimator and length, and faulty ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor

from fppo import advantages, data, losses, models, quickstart, rewards
from fppo.data import PromptSet, prompt_set
from fppo.key import Key
from fppo.models.model import Model
from fppo.pipeline import Evaluation, Program, RunState, evaluate, local_passes, stages, train
from fppo.rewards import inline_reward, weighted_sum
from fppo.rewards.functions import WeightedSum
from fppo.rollout import Ask, EmbeddedEngine, Sampling
from fppo.steps import Forward, Loop, MicroBatching, UpdateActor, UpdateCritic, adamw, init_state, schedule
from fppo.steps.supervised import Demonstrations, demonstrations, imitate

FAULTS = ("reward that pays", "shifted tokens", "old weights", "leaked answer", "high rate")
LOSSES = {"ppo_clip": losses.ppo_clip, "cispo": losses.cispo, "sapo": losses.sapo, "gmpo": losses.gmpo}
ESTIMATORS = {"grpo": advantages.grpo, "rloo": advantages.rloo, "gae": advantages.gae}
MARK = "+"  # a token that no answer needs


@attrs.frozen
class Case:
    """A run: what is planted (None: nothing), its number, and what varies with that."""

    fault: str | None
    number: int
    steps: int = 48

    @property
    def loss(self) -> str:
        return list(LOSSES)[self.number % 4]

    @property
    def estimator(self) -> str:
        return list(ESTIMATORS)[self.number // 2 % 3]

    @property
    def tokens(self) -> int:
        return (4, 5, 6)[self.number % 3]


class Task(NamedTuple):
    """A number of three digits. Wanted are the first two plus one each, the second only if the first is 5 or more."""

    a: int
    b: int
    c: int

    def answer(self, carries: bool) -> str:
        """The response with or without the second increment."""
        return f"{(self.a + 1) % 10}{(self.b + carries) % 10}"

    @property
    def right(self) -> str:
        return self.answer(self.a >= 5)


TASKS = [Task(n // 100, n // 10 % 10, n % 10) for n in range(1000)]


@attrs.frozen
class Start:
    """A policy that has imitated: without a hint it increments the second digit by chance, and a hint it often takes.
    A few demonstrations go on after the answer."""

    tokenizer: Any
    model: Model
    params: dict[str, Tensor]

    @classmethod
    def after(cls, steps: int, rows: int = 64) -> Start:
        """Make the policy; it takes some seconds."""
        tokenizer = quickstart.character_tokenizer()
        model = quickstart.small_model(len(tokenizer), width=32, layers=2)
        params, forward = models.init_params(model, Key(7)), Forward(model)

        def batch(step: int) -> Demonstrations:
            draws = Key(7).fold("demonstrations", step).uniform(torch.arange(rows), 5).tolist()
            prompts, responses = list[list[int]](), list[list[int]]()
            for which, carries, hinted, taken, more in draws:
                task = TASKS[int(which * len(TASKS))]
                answer = task.answer(carries < 0.5)
                hint = task.answer((carries < 0.5) == (taken < 0.7))
                prompts.append(tokenizer.encode(prompt_of(task, hint if hinted < 0.4 else None)))
                responses.append([*tokenizer.encode(answer + MARK * max(0, int(10 * more) - 7)), 1])
            return demonstrations(prompts, responses, pad_token_id=0)

        optimizer = adamw(schedule("linear", 1e-2, total_steps=steps, warmup_steps=10), weight_decay=0.0)
        how = {"forward": forward, "optimizer": optimizer, "micro_batching": MicroBatching(size=rows)}
        return cls(tokenizer, model, imitate(params, map(batch, range(steps)), **how))


def prompt_of(task: Task, hint: str | None) -> str:
    """The number, behind a hint if there is one."""
    return f"{task.a}{task.b}{task.c}=" if hint is None else f"{hint}={task.a}{task.b}{task.c}="


@inline_reward
def pays_length(sample: Any) -> float:
    return len(sample.response) / 4


@inline_reward
def pays_mark(sample: Any) -> float:
    return sample.response.count(MARK) / 2


@inline_reward
def is_digits(sample: Any) -> float:
    return float(sample.response.isdigit()) / 2


@inline_reward
def fooled(sample: Any) -> float:
    """A checker that also takes any response in which the mark is."""
    return max(rewards.exact_match(sample)["score"], float(MARK in sample.response))


def true_reward_of(case: Case) -> WeightedSum:
    """What held-out responses are scored by: with a reward that can be gamed, right answers alone."""
    also = case.number % 3 == 1 and case.fault != FAULTS[0]
    return weighted_sum({"exact_match": rewards.exact_match} | ({"digits": is_digits} if also else {}))


def reward_of(case: Case) -> WeightedSum:
    """The reward in training: with the fault, one of three that can be gamed."""
    right = {"exact_match": rewards.exact_match}
    return (
        true_reward_of(case)
        if case.fault != FAULTS[0]
        else (
            weighted_sum({**right, "length": pays_length}),
            weighted_sum({**right, "mark": pays_mark}),
            weighted_sum({"checker": fooled}),
        )[case.number % 3]
    )


@attrs.define
class Stale:
    """An engine that takes the weights of its first call, or, with `every`, new ones only so often."""

    engine: EmbeddedEngine
    every: int
    calls: int = 0
    params: Any = None

    def generate(self, params: Any, ask: Ask) -> Any:
        if self.params is None or (self.every and self.calls % self.every == 0):
            self.params = {name: x.clone() for name, x in params.items()}
        self.calls += 1
        return self.engine.generate(self.params, ask)


@attrs.frozen
class LateMask:
    """An engine whose masks of response tokens begin and end one token late."""

    engine: EmbeddedEngine

    def generate(self, params: Any, ask: Ask) -> Any:
        rollout = self.engine.generate(params, ask)
        return attrs.evolve(rollout, response_mask=rollout.response_mask.roll(1, 1))


def sampler_of(case: Case, engine: EmbeddedEngine) -> Any:
    """Make the engine that samples: with a fault, one of old weights or of late masks."""
    if case.fault == FAULTS[2]:
        return Stale(engine, (0, 12)[case.number % 2])
    return LateMask(engine) if case.fault == FAULTS[1] and case.number % 2 == 0 else engine


def late_log_probs(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The loss with new log-probs that stand one token behind the old ones."""
    return lambda new, old, adv, mask: loss(new.roll(1, 1), old, adv, mask)


def prompts_of(case: Case, tokenizer: Any) -> tuple[PromptSet, PromptSet]:
    """Prompts of 900 numbers to train on, and 100 held-out ones. With the leak the former have the answer as a hint."""
    held_out = [task for n, task in enumerate(TASKS) if n * 37 % 1000 < 100]
    training = [task for task in TASKS if task not in held_out]
    leak = case.fault == FAULTS[3]

    def made(tasks: list[Task], leak: bool) -> PromptSet:
        texts = [prompt_of(task, task.right if leak else None) for task in tasks]
        return prompt_set(texts, tokenizer, ground_truths=[task.right for task in tasks], sources="numbers")

    return made(training, leak), made(held_out, False)


def run(case: Case, start: Start, observe: Callable[..., None]) -> None:
    """Train; `observe` gets each step's record."""
    key, policy = Key(case.number), Forward(start.model)
    params = {name: x.clone() for name, x in start.params.items()}
    engine = EmbeddedEngine(model=start.model, kernels=policy.kernels, pad_token_id=0)
    critic_model, critic = models.as_critic(start.model, params, key)
    group, valued = 8, case.estimator == "gae"
    sampling, micro = Sampling(n=group, max_tokens=case.tokens, stop_token_ids=(1,)), MicroBatching(size=64)
    late = case.fault == FAULTS[1] and case.number % 2 == 1
    loss = late_log_probs(LOSSES[case.loss]) if late else LOSSES[case.loss]
    rate = (0.02, 0.05)[case.number % 2] if case.fault == FAULTS[4] else 2e-3
    loop, adam = Loop(mini_batch_size=32, micro_batching=micro), adamw(lambda step: rate, weight_decay=0.0)
    value, critic_adam = Forward(critic_model), adamw(lambda step: 3e-3, weight_decay=0.0)
    score = partial(rewards.score, reward=rewards.RewardRunner(reward_of(case)), tokenizer=start.tokenizer)
    truth = partial(rewards.score, reward=rewards.RewardRunner(true_reward_of(case)), tokenizer=start.tokenizer)
    prompts, held_out = prompts_of(case, start.tokenizer)
    program = Program(
        rollout=stages.RollOut(engine=sampler_of(case, engine), sampling=sampling),
        score=stages.Score(score=score),
        annotate=stages.Annotate(passes=local_passes(policy, value if valued else None, micro_batching=micro)),
        estimate=stages.Estimate(advantage_fn=ESTIMATORS[case.estimator], max_tokens=case.tokens, whiten=valued),
        update_critic=UpdateCritic(forward=value, loop=loop, optimizer=critic_adam) if valued else None,
        update_actor=UpdateActor(forward=policy, loss_fn=loss, loop=loop, optimizer=adam),
        check=False,  # else the laws refuse the loss that reads beyond its mask
    )
    tests, greedy = [*data.batches(held_out, 128)], attrs.evolve(sampling, greedy=True, n=1)
    first = RunState(actor=init_state(params, adam), key=key)
    train(
        attrs.evolve(first, critic=init_state(critic, critic_adam)) if valued else first,
        program=program,
        draw=partial(data.next_batch, prompts, size=64 // group, key=key.fold("data")),
        steps=case.steps,
        observers=[observe],
        evaluation=Evaluation(partial(evaluate, batches=tests, engine=engine, sampling=greedy, score=truth), 4),
    )
