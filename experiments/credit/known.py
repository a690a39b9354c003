"""A run with one of the toolbox's critics on the quickstart's sums, beside the exact values, without files."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import attrs
import torch
from credit import jobs
from transformers import PreTrainedTokenizerFast

from fppo import advantages, data, losses, models, quickstart
from fppo import steps as s
from fppo.batch import Rollout, Scored, extend
from fppo.data.privileged import TRUTH_SIGNS
from fppo.key import Key
from fppo.models.model import Model, Params
from fppo.pipeline import Passes, PolicyPass, Program, RunState, StepRecord, ValuePass, stages, train
from fppo.pipeline.pretrain import Pretrain, Pretraining
from fppo.pipeline.train import Evaluation
from fppo.pipeline.truth import Known, critic_truth, one_answer, right_answers
from fppo.rollout import EmbeddedEngine, Sampling
from fppo.steps.popart import UpdatePopart
from fppo.steps.train_state import Scale
from fppo.tree import replace

TOKENS, CUTS, EPOCHS = 4, 4, 2  # of a response; mini-batches of a step, and the policy's passes over them
WARM_UP, STEPS, BATCH, EVERY = 600, 20, 512, 2
QUICK = (2, 2, 64, 2)
LEAST_VARIANCE = 0.005  # of the exact values: below, all critics know nearly nothing of nearly nothing
FIRST = 6  # the step from which on they are compared


@attrs.frozen(kw_only=True)
class Kind:
    """A critic; but for `reads` and `width` the fields are those of the settings."""

    reads: str = "tokens"  # or "confidence" or "hidden", or "" for none at all
    width: int = 0  # of a small model with one layer, from nothing, in place of one as the policy
    ensemble: int = 1
    leave_agreed: float = 0.0
    loss: str = "mse"
    value_clip: float = 0.5
    privileged: int = 0
    popart: float = 0.0
    pretrain: int = 0
    epochs: int = 2
    lr: float = 1e-3


HEADS = {
    "mse": losses.mse_head,
    "huber": losses.huber_head,
    "hl_gauss": losses.hl_gauss_head,
    "two_hot": losses.two_hot_head,
    "quantile": losses.quantile_head,
}
READING = Kind(reads="confidence", epochs=16, lr=3e-3)
KINDS = {
    "none: `reinforce_plus_plus`": Kind(reads=""),
    **{f"`{loss}`": Kind(loss=loss) for loss in HEADS},
    "`mse`, PopArt": Kind(popart=0.1),
    "`mse`, pretrained": Kind(pretrain=10),
    "`mse`, privileged": Kind(privileged=4),
    "`mse`, a small model": Kind(width=32, epochs=4, lr=3e-3),
    "`confidence`": READING,
    "`confidence`, `hl_gauss`": attrs.evolve(READING, loss="hl_gauss"),
    "`confidence`, privileged": attrs.evolve(READING, privileged=4),
    "`confidence`, 4 members": attrs.evolve(READING, ensemble=4),
    "`hidden`": attrs.evolve(READING, reads="hidden"),
    "`hidden`, `hl_gauss`": attrs.evolve(READING, reads="hidden", loss="hl_gauss"),
    "`hidden`, 4 members": attrs.evolve(READING, reads="hidden", ensemble=4),
    "`hidden`, 4 members, 0.2 left": attrs.evolve(READING, reads="hidden", ensemble=4, leave_agreed=0.2),
}


class Job(NamedTuple):
    kind: str
    seed: int
    quick: bool = False

    def said(self) -> dict[str, Any]:
        """All that its numbers depend on."""
        numbers = QUICK if self.quick else (WARM_UP, STEPS, BATCH, EVERY)
        return self._asdict() | {"of": attrs.asdict(KINDS[self.kind]) | {"numbers": numbers}}


class Found(NamedTuple):
    """What a run says of its critic."""

    curve: list[tuple[int, float, float]]  # updates of the policy, in steps; the critic's r2; the variance of the truth
    score: float  # held out, of the last policy
    seconds: float  # of a step, the median,
    of_critic: float  # and of these the critic's own
    parameters: int  # of the critic
    peak_mib: float | None  # in its updates, beyond what there is anyway; None where it cannot be measured


def prepare(quick: bool, *, directory: Path) -> None:
    """Makes the policy that all runs start from, unless it is there."""
    path = start_of(directory, quick)
    if not path.exists():
        buffer = io.BytesIO()
        torch.save(quickstart.warmed_up(Key(0).fold("quickstart"), steps=_warm_up(quick))[2], buffer)
        jobs.write(path, buffer.getvalue())


def start_of(directory: Path, quick: bool) -> Path:
    """Where that policy is."""
    return directory / f"sums-{_warm_up(quick)}.pt"


def _warm_up(quick: bool) -> int:
    return QUICK[0] if quick else WARM_UP


def run_job(job: Job, *, directory: Path) -> dict[str, Any]:
    """What a `Job` gives, from the policy in `directory`: a `Found` by its fields."""
    tokenizer = quickstart.character_tokenizer()
    start = Start(
        tokenizer,
        quickstart.small_model(len(tokenizer)),
        torch.load(start_of(directory, job.quick), weights_only=True),
        *quickstart.prompt_sets(tokenizer),
    )
    return found(start, KINDS[job.kind], Key(job.seed), quick=job.quick)._asdict()


class Start(NamedTuple):
    tokenizer: PreTrainedTokenizerFast
    model: Model
    params: Params
    train: data.PromptSet
    held_out: data.PromptSet


class _Critic(NamedTuple):
    """A critic before its first update, what makes its values, and its update."""

    state: s.TrainState | None = None
    values: Any = None
    confidence: Any = None
    hidden: Any = None
    truth_signs: Any = None
    update: Callable[..., Any] | None = None


def _critic(kind: Kind, start: Start, key: Key, loop: s.Loop, updates: int) -> _Critic:
    if not kind.reads:
        return _Critic()
    make = partial(HEADS[kind.loss], clip=kind.value_clip) if kind.loss == "mse" else HEADS[kind.loss]
    head = make()
    adam, micro = _adam(kind.lr, updates), loop.micro_batching
    how = {"loop": loop, "optimizer": adam, "loss_fn": head.loss_fn}
    shape = {"outputs": head.outputs, "members": kind.ensemble, "signs": TRUTH_SIGNS if kind.privileged else 0}
    truth = {"encode": partial(start.tokenizer.encode, add_special_tokens=False), "limit": kind.privileged}
    known = {"truth_signs": partial(data.truth_signs, **truth) if kind.privileged else None}
    if kind.reads == "confidence":
        state = s.init_state(s.init_confidence(key.fold("critic"), **shape), adam)
        read = partial(s.confidence_values, read=head.read)
        return _Critic(state, confidence=read, update=s.UpdateConfidence(**how), **known)
    if kind.reads == "hidden":
        width = models.hidden_width(start.model)
        state = s.init_state(s.init_hidden(key.fold("critic"), width, **shape), adam)
        read = partial(s.hidden_values, read=head.read)
        return _Critic(state, hidden=read, update=s.UpdateHidden(**how), **known)
    model, params = start.model, start.params
    if kind.width:
        model = quickstart.small_model(len(start.tokenizer), width=kind.width, layers=1)
        params = models.init_params(model, key.fold("small"))
    model, params = models.as_critic(model, params, key.fold("value head"), outputs=head.outputs)
    forward, state = s.Forward(model, read=head.read), s.init_state(params, adam)
    view = partial(data.with_truth, **truth) if kind.privileged else lambda rows: rows
    update = s.UpdateCritic(forward=forward, view=view, **how)
    if kind.popart:
        state, update = replace(state, scale=Scale()), UpdatePopart(stage=update, rate=kind.popart)
    return _Critic(state, ValuePass(forward=forward, micro_batching=micro, view=view), update=update)


def _adam(lr: float, updates: int) -> s.Optimizer:
    return s.adamw(s.schedule("linear", lr, total_steps=updates), betas=(0.9, 0.99), weight_decay=0.0)


def found(start: Start, kind: Kind, key: Key, *, quick: bool) -> Found:
    """A run whose policy makes `STEPS` steps as the quickstart has them, but for the penalty for leaving the reference;
    steps that fit the critic alone come before."""
    _, steps, batch, every = QUICK if quick else (WARM_UP, STEPS, BATCH, EVERY)
    micro, policy, tokenizer = s.MicroBatching(token_budget=16384), s.Forward(start.model), start.tokenizer
    loop = s.Loop(mini_batch_size=batch // CUTS, micro_batching=micro, epochs=EPOCHS)
    adam = _adam(3e-4, CUTS * EPOCHS * steps)
    own_loop = attrs.evolve(loop, epochs=kind.epochs)
    critic = _critic(kind, start, key, own_loop, CUTS * kind.epochs * (steps + kind.pretrain))
    sampling = Sampling(n=1, max_tokens=TOKENS, stop_token_ids=(1,))
    engine = EmbeddedEngine(model=start.model, kernels=policy.kernels, pad_token_id=0)
    pass_ = PolicyPass(forward=policy, micro_batching=micro)
    passes = Passes(
        policy=pass_,
        reference=pass_,
        values=critic.values,
        confidence=critic.confidence,
        hidden=critic.hidden,
        truth_signs=critic.truth_signs,
    )
    answers = partial(right_answers, tokenizer=tokenizer, sampling=sampling)
    known = Known(exact=partial(one_answer, answers=answers))
    score, peaks = partial(_score, tokenizer=tokenizer), list[float]()
    advantage = advantages.gae if kind.reads else advantages.reinforce_plus_plus
    stage = stages.Estimate(advantage_fn=advantage, max_tokens=TOKENS, whiten=bool(kind.reads))
    program = Program(
        rollout=stages.RollOut(engine=engine, sampling=sampling),
        score=stages.Score(score=score),
        annotate=stages.Annotate(passes=passes),
        estimate=stages.LeaveAgreed(stage, share=kind.leave_agreed) if kind.leave_agreed else stage,
        update_critic=critic.update and partial(_measured, update=critic.update, peaks=peaks),
        update_actor=s.UpdateActor(forward=policy, loss_fn=losses.ppo_clip, loop=loop, optimizer=adam),
        pretrain=Pretrain(limit=kind.pretrain) if kind.pretrain else None,
    )
    curve, seconds, own, scores = list[tuple[int, float, float]](), list[float](), list[float](), list[float]()

    def observe(record: StepRecord) -> None:
        done, m = record.run.actor.step // (CUTS * EPOCHS), record.metrics
        if record.experience is None or not 0 < done <= steps:
            return
        if "critic/true/r2" in m:
            curve.append((done, m["critic/true/r2"], m["critic/true/variance"]))
        seconds.append(m["timing_s/step"] - m.get("timing_s/testing", 0.0))
        own.append(m.get("timing_s/values", 0.0) + m.get("timing_s/update_critic", 0.0))
        scores.append(m["critic/rewards/mean"])

    held_out = data.select(start.held_out, range(batch)) if quick else start.held_out
    asked = partial(data.batches, held_out, batch)
    evaluation = Evaluation(
        lambda run: critic_truth(run, prompts=asked(), known=known, engine=engine, sampling=sampling, passes=passes),
        every=every,
        before=False,
    )
    run = RunState(actor=s.init_state(start.params, adam), critic=critic.state, key=key)
    run = replace(run, pretraining=Pretraining()) if kind.pretrain else run
    train(
        run,
        program=program,
        draw=partial(data.next_batch, start.train, size=batch, key=key.fold("data")),
        steps=steps + kind.pretrain,
        observers=[observe],
        evaluation=evaluation if kind.reads else None,
    )
    parameters = sum(x.numel() for x in critic.state.params.values()) if critic.state else 0
    return Found(curve, scores[-1], median(seconds), median(own), parameters, median(peaks) if peaks else None)


def _score(rollout: Rollout, *, tokenizer: PreTrainedTokenizerFast) -> tuple[Scored, dict[str, Any]]:
    rows = zip(rollout.tokens[:, -rollout.response_mask.shape[1] :], rollout.response_mask, strict=True)
    said = [str(tokenizer.decode(tokens[mask], skip_special_tokens=True)) for tokens, mask in rows]
    right = [float(text == truth) for text, truth in zip(said, rollout.ground_truth, strict=True)]
    return extend(Scored, rollout, scores=torch.tensor(right), named_scores={}), {}


def _measured(
    state: s.TrainState, batch: Any, *, key: Key, donate: bool, update: Callable[..., Any], peaks: list[float]
) -> tuple[s.TrainState, Any]:
    """The update, whose peak of memory in MiB goes to `peaks` where Linux tells it."""
    gc.collect()
    before = None
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back
            before = _status("VmRSS")
    result = update(state, batch, key=key, donate=donate)
    if before is not None:
        peaks.append(_status("VmHWM") - before)
    return result


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def markdown(results: Mapping[str, Mapping[int, Found]], *, first: int = FIRST) -> str:
    """A row for each critic that has a run: medians over its seeds."""
    head = ["critic", "r2 (least to greatest)", "seconds a step", "the critic's own", "parameters", "MiB of an update"]
    lines = [[*head, "last score", "seeds"], ["---"] * (len(head) + 2)]
    for kind, seeds in results.items():
        if not (runs := list(seeds.values())):
            continue
        known = [x for found in runs if (x := r2(found, first)) is not None]
        peaks = [found.peak_mib for found in runs if found.peak_mib is not None]
        lines.append(
            [
                kind,
                f"{median(known):.2f} ({min(known):.2f} to {max(known):.2f})" if known else "",
                f"{median(found.seconds for found in runs):.2f}",
                f"{median(found.of_critic for found in runs):.2f}",
                f"{runs[0].parameters:,}" if runs[0].parameters else "",
                f"{median(peaks):.0f}" if peaks else "",
                f"{median(found.score for found in runs):.3f}",
                str(len(runs)),
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def r2(found: Found, first: int) -> float | None:
    """The median of a run's r2 from step `first` on, while the exact values' variance is worth explaining."""
    known = [r2 for step, r2, variance in found.curve if step >= first and variance >= LEAST_VARIANCE]
    return median(known) if known else None
