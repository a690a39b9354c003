"""Small runs of an arithmetic task: clean ones that differ in seed, loss, estimator and length, and faulty ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

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
from fppo.steps import Forward, Loop, MicroBatching, UpdateActor, UpdateCritic, adamw, init_state

FAULTS = ("reward that pays", "shifted mask", "old weights", "leaked answer", "high rate")
LOSSES = {"ppo_clip": losses.ppo_clip, "cispo": losses.cispo, "sapo": losses.sapo, "gmpo": losses.gmpo}
ESTIMATORS = {"grpo": advantages.grpo, "rloo": advantages.rloo, "gae": advantages.gae}
MARK = "+"  # a token that no answer needs


@attrs.frozen
class Case:
    """A run: what is planted (None: nothing), its number, and what varies with that."""

    fault: str | None
    number: int
    steps: int = 32

    @property
    def loss(self) -> str:
        return list(LOSSES)[self.number % 4]

    @property
    def estimator(self) -> str:
        return list(ESTIMATORS)[self.number // 2 % 3]

    @property
    def tokens(self) -> int:
        return (4, 6, 8)[self.number % 3]


@attrs.frozen
class Start:
    """The task, and a policy that has imitated demonstrations of which half forget to carry."""

    tokenizer: Any
    model: Model
    params: dict[str, Tensor]

    @classmethod
    def after(cls, steps: int) -> Start:
        """Make the policy; it takes some seconds."""
        tokenizer = quickstart.character_tokenizer()
        model = quickstart.small_model(len(tokenizer), width=48, layers=1)
        params, (rows, _) = models.init_params(model, Key(7)), quickstart.sums()
        how = {"tokenizer": tokenizer, "steps": steps, "batch_size": 64, "lr": 5e-3, "mistakes": 0.5}
        return cls(tokenizer, model, quickstart.warm_up(Forward(model), params, rows, Key(7), **how))


@inline_reward
def pays_length(sample: Any) -> float:
    return len(sample.response) / 8


@inline_reward
def pays_mark(sample: Any) -> float:
    return sample.response.count(MARK) / 2


@inline_reward
def fooled(sample: Any) -> float:
    """A checker that also takes any response in which the mark is."""
    return max(rewards.exact_match(sample)["score"], float(MARK in sample.response))


def reward_of(case: Case) -> WeightedSum:
    """The reward in training: with the fault, one of three that can be gamed."""
    right = {"exact_match": rewards.exact_match}
    if case.fault != FAULTS[0]:
        return weighted_sum(right)
    return (
        weighted_sum({**right, "length": pays_length}),
        weighted_sum({**right, "mark": pays_mark}),
        weighted_sum({"checker": fooled}),
    )[case.number % 3]


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


def shifted(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The loss with a mask that begins one token late, and ends one token late."""
    return lambda new, old, adv, mask: loss(new, old, adv, mask.roll(1, 1))


def prompts_of(case: Case, tokenizer: Any) -> tuple[PromptSet, PromptSet]:
    """Prompts to train on and 100 held-out ones. With the leak the former have the answer before the sum."""
    train, test = quickstart.sums()
    train = [train[i] for i in range(case.number, len(train), 12)]
    leak = case.fault == FAULTS[3]
    texts = [f"{s.answer}={s.prompt}" if leak else s.prompt for s in train]
    made = partial(prompt_set, tokenizer=tokenizer, sources="sums")
    held_out = made([s.prompt for s in test[:100]], ground_truths=[s.answer for s in test[:100]])
    return made(texts, ground_truths=[s.answer for s in train]), held_out


def run(case: Case, start: Start, observe: Callable[..., None]) -> None:
    """Train; `observe` gets each step's record."""
    key, policy = Key(case.number), Forward(start.model)
    params = {name: x.clone() for name, x in start.params.items()}
    engine = EmbeddedEngine(model=start.model, kernels=policy.kernels, pad_token_id=0)
    sampler: Any = Stale(engine, (0, 12)[case.number % 2]) if case.fault == FAULTS[2] else engine
    critic_model, critic = models.as_critic(start.model, params, key)
    group, valued = 8, case.estimator == "gae"
    sampling, micro = Sampling(n=group, max_tokens=case.tokens, stop_token_ids=(1,)), MicroBatching(size=64)
    loss = shifted(LOSSES[case.loss]) if case.fault == FAULTS[1] else LOSSES[case.loss]
    rate = (0.02, 0.05)[case.number % 2] if case.fault == FAULTS[4] else 1e-3
    loop, adam = Loop(mini_batch_size=32, micro_batching=micro), adamw(lambda step: rate, weight_decay=0.0)
    value, critic_adam = Forward(critic_model), adamw(lambda step: 3e-3, weight_decay=0.0)
    score = partial(rewards.score, reward=rewards.RewardRunner(reward_of(case)), tokenizer=start.tokenizer)
    truth = partial(rewards.score, reward=rewards.RewardRunner(rewards.exact_match), tokenizer=start.tokenizer)
    prompts, held_out = prompts_of(case, start.tokenizer)
    program = Program(
        rollout=stages.RollOut(engine=sampler, sampling=sampling),
        score=stages.Score(score=score),
        annotate=stages.Annotate(passes=local_passes(policy, value if valued else None, micro_batching=micro)),
        estimate=stages.Estimate(advantage_fn=ESTIMATORS[case.estimator], max_tokens=case.tokens, whiten=valued),
        update_critic=UpdateCritic(forward=value, loop=loop, optimizer=critic_adam) if valued else None,
        update_actor=UpdateActor(forward=policy, loss_fn=loss, loop=loop, optimizer=adam),
    )
    tests, greedy = [*data.batches(held_out, 128)], attrs.evolve(sampling, greedy=True, n=1)
    first = RunState(actor=init_state(params, adam), key=key)
    with torch.random.fork_rng():
        train(
            attrs.evolve(first, critic=init_state(critic, critic_adam)) if valued else first,
            program=program,
            draw=partial(data.next_batch, prompts, size=64 // group, key=key.fold("data")),
            steps=case.steps,
            observers=[observe],
            evaluation=Evaluation(partial(evaluate, batches=tests, engine=engine, sampling=greedy, score=truth), 4),
        )
