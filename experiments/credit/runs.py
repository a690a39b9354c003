"""One run of a method on one of the tasks, without files: PPO with a critic, or an estimator without one."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import attrs
import torch
from credit import jobs
from credit.tasks import TASKS, Task
from transformers import PreTrainedTokenizerFast

from fppo import advantages, data, losses, models, quickstart
from fppo import steps as s
from fppo.batch import Rollout, Scored, extend
from fppo.key import Key
from fppo.models.model import Model, Params
from fppo.pipeline import Program, RunState, StepRecord, local_passes, stages, train
from fppo.rollout import EmbeddedEngine, Sampling

HEADS = {
    "mse": losses.mse_head,
    "huber": losses.huber_head,
    "hl_gauss": partial(losses.hl_gauss_head, bins=21),
    "two_hot": partial(losses.two_hot_head, bins=21),
    "quantile": partial(losses.quantile_head, bins=21),
}
CRITICS = (*HEADS, "confidence")
GROUPED = ("grpo", "rloo")

MICRO = s.MicroBatching(size=256)
RATES = (3e-4, 1e-3, 3e-3, 1e-2)


Curve = list[tuple[float, float]]


class Job(NamedTuple):
    """A run: a task, its start by the seed, a method, and the policy's learning rate."""

    task: str
    seed: int
    method: str
    lr: float
    quick: bool = False

    def said(self) -> dict[str, Any]:
        """All that its curve depends on."""
        return self._asdict() | {"of": _numbers(TASKS[self.task])}

    def start(self) -> str:
        """The name of the start, which all methods and rates share."""
        return jobs.named({"task": self.task, "seed": self.seed, "quick": self.quick, "of": _numbers(TASKS[self.task])})


class Made(NamedTuple):
    curve: Curve
    seconds: float


def _numbers(task: Task) -> dict[str, Any]:
    """What a run reads of a task, but for its functions."""
    unread = ("methods", "rates", "goal", "window")
    return {name: x for name, x in attrs.asdict(task).items() if name not in unread and not callable(x)}


def prepare(job: Job, *, directory: Path) -> Job:
    """The job, with its start in `directory`, which is made unless it is there."""
    path = directory / f"{job.start()}.pt"
    if not path.exists():
        task, buffer = TASKS[job.task], io.BytesIO()
        torch.save(warmed_up(task, Key(job.seed).fold(job.task), 2 if job.quick else task.warm_up), buffer)
        jobs.write(path, buffer.getvalue())
    return job


def run_job(job: Job, *, directory: Path) -> dict[str, Any]:
    """What a `Job` gives, from its start in `directory`: a `Made` by its fields."""
    task = TASKS[job.task]
    start = Start(*_fresh(task), torch.load(directory / f"{job.start()}.pt", weights_only=True))
    steps, batch = (2, 16) if job.quick else (task.steps, task.batch)
    began = time.monotonic()
    curve = curve_of(task, start, job.method, Key(job.seed), steps=steps, batch=batch, lr=job.lr)
    return Made(curve, time.monotonic() - began)._asdict()


class Start(NamedTuple):
    tokenizer: PreTrainedTokenizerFast
    model: Model
    params: Params


def _fresh(task: Task) -> tuple[PreTrainedTokenizerFast, Model]:
    tokenizer = quickstart.character_tokenizer(task.characters)
    return tokenizer, quickstart.small_model(len(tokenizer), width=task.width, layers=task.layers, positions=128)


def warmed_up(task: Task, key: Key, steps: int) -> Params:
    """A small model that has seen flawed responses."""
    tokenizer, model = _fresh(task)

    def batch(step: int) -> s.Demonstrations:
        rows = key.fold("demonstrations", step).uniform(torch.arange(task.batch), 2 * task.draws).tolist()
        examples = [task.make(row[: task.draws]) for row in rows]
        said = [task.demonstrate(each, row[task.draws :]) for each, row in zip(examples, rows, strict=True)]
        asked, answered = ([tokenizer.encode(x) for x in texts] for texts in (map(task.ask, examples), said))
        return s.demonstrations(asked, answered, pad_token_id=0)

    params = models.init_params(model, key.fold("init"))
    how = partial(s.imitate, forward=s.Forward(model), optimizer=_adam(task.warm_rate, steps), micro_batching=MICRO)
    return how(params, map(batch, range(steps)))


def _adam(lr: float, updates: int) -> s.Optimizer:
    return s.adamw(s.schedule("linear", lr, total_steps=updates), betas=(0.9, 0.99), weight_decay=0.0)


class _Critic(NamedTuple):
    """A critic before its first update, what computes its values, and its update."""

    state: s.TrainState | None = None
    passes: Mapping[str, Any] = MappingProxyType({})  # of `local_passes`
    update: Callable[..., Any] | None = None


def _critic(method: str, start: Start, key: Key, loop: s.Loop, adam: s.Optimizer) -> _Critic:
    if method not in CRITICS:
        return _Critic()
    if method == "confidence":
        update = s.UpdateConfidence(loop=loop, optimizer=adam)
        return _Critic(s.init_state(s.init_confidence(key), adam), {"confidence": s.confidence_values}, update)
    head = HEADS[method]()
    model, params = models.as_critic(start.model, start.params, key, outputs=head.outputs)
    values = s.Forward(model, read=head.read)
    update = s.UpdateCritic(forward=values, loss_fn=head.loss_fn, loop=loop, optimizer=adam)
    return _Critic(s.init_state(params, adam), {"critic": values}, update)


def _score(rollout: Rollout, *, task: Task, tokenizer: PreTrainedTokenizerFast) -> tuple[Scored, dict[str, Any]]:
    rows = zip(rollout.tokens[:, -rollout.response_mask.shape[1] :], rollout.response_mask, strict=True)
    said = [str(tokenizer.decode(tokens[mask], skip_special_tokens=True)) for tokens, mask in rows]
    numbers = [task.score(example, text) for example, text in zip(rollout.ground_truth, said, strict=True)]
    return extend(Scored, rollout, scores=torch.tensor(numbers), named_scores={}), {}


def curve_of(
    task: Task,
    start: Start,
    method: str,
    key: Key,
    *,
    steps: int,
    batch: int,
    lr: float,
) -> Curve:
    """The mean score of each step's samples, of prompts that were not there before, by how many samples there were."""
    policy, curve = s.Forward(start.model), Curve()
    sampling = Sampling(n=8 if method in GROUPED else 1, max_tokens=task.tokens, stop_token_ids=(1,))
    draws = key.fold("prompts").uniform(torch.arange(batch * steps // sampling.n), task.draws).tolist()
    examples = [task.make(row) for row in draws]
    prompts = data.prompt_set(list(map(task.ask, examples)), start.tokenizer, ground_truths=examples)
    loop = s.Loop(mini_batch_size=batch // 4, micro_batching=MICRO, epochs=2)
    adam = _adam(lr, 8 * steps)  # 8 updates per step
    of_critic = s.Loop(mini_batch_size=batch // task.critic_cuts, micro_batching=MICRO, epochs=task.critic_epochs)
    fast = _adam(task.critic_rate, task.critic_cuts * task.critic_epochs * steps)
    critic = _critic(method, start, key, of_critic, fast)
    engine = task.engine(EmbeddedEngine(model=start.model, kernels=policy.kernels, pad_token_id=0), start.tokenizer)
    with_critic = partial(advantages.gae, lam=task.lam, critic_lam=1.0)
    advantage = with_critic if method in CRITICS else getattr(advantages, method)
    program = Program(
        rollout=stages.RollOut(engine=engine, sampling=sampling),
        score=stages.Score(score=partial(_score, task=task, tokenizer=start.tokenizer)),
        annotate=stages.Annotate(passes=local_passes(policy, micro_batching=MICRO, **critic.passes)),
        estimate=stages.Estimate(advantage_fn=advantage, max_tokens=task.tokens, whiten=method not in GROUPED),
        update_critic=critic.update,
        critic_warmup=task.critic_first if method in CRITICS else 0,
        update_actor=s.UpdateActor(forward=policy, loss_fn=losses.ppo_clip, loop=loop, optimizer=adam),
    )

    def observe(record: StepRecord) -> None:
        curve.append((float(record.run.step * batch), record.metrics["critic/rewards/mean"]))

    train(
        RunState(actor=s.init_state(start.params, adam), critic=critic.state, key=key),
        program=program,
        draw=partial(data.next_batch, prompts, size=batch // sampling.n, key=key.fold("data")),
        steps=steps,
        observers=[observe],
    )
    return curve
