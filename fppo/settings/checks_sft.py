"""Checks of the settings that fppo sft reads, together."""

from __future__ import annotations

from fppo.fields import Problem, Problems, problem_at, unread_problems, value_at
from fppo.settings.learning import OptimizerSettings
from fppo.settings.placement import places_of
from fppo.settings.train import TrainSettings


def sft_problems(s: TrainSettings) -> Problems:
    """The conflicts of the section sft, with itself and with others."""
    sft = s.sft
    if sft.messages is None:
        yield from unread_problems(s, ["sft.turns"], "conversations, sft.messages")
    else:
        yield from unread_problems(s, ["sft.response"], "prompts without sft.messages")
        if not s.data.chat:
            yield problem_at(s, "sft.messages", "conversations go through a chat template: give data.chat = true")
    for name, field in s.data.seen.items():
        yield problem_at(s, name, f"fppo sft takes no images and videos yet ({field}); leave it out")
    if s.data.rows is None and not s.data.path:
        text = "is not set; give jsonl, csv or parquet files, the name of a data set, or data.rows"
        yield problem_at(s, "data.path", text)
    yield from pass_problems(s, "sft", "sft.max_tokens")
    if sft.epochs is None:
        yield from rate_problems(sft.optimizer, "sft.optimizer", s.steps, f"the run's {s.steps} updates")
    if places_of(s.placement):
        yield problem_at(s, "placement", "fppo sft runs in processes of one kind; leave pools out")


def pass_problems(s: TrainSettings, name: str, longest: str) -> Problems:
    """Yield the problems of a section's settings for updates: micro-batches or token budget, weight mode, and schedule
    of the learning rate. `name` is the section, as "sft". `longest` is the name of the setting that bounds responses,
    as "sft.max_tokens"; messages recommend its value for `horizon`."""
    section = value_at(s, name)
    if section.micro_batch_size and section.token_budget:
        text = f"{name}.token_budget = {section.token_budget} is given too; give one of the two, 0 turns the other off"
        yield problem_at(s, f"{name}.micro_batch_size", text)
    if section.token_budget == 0 and not section.micro_batch_size:
        yield problem_at(s, f"{name}.token_budget", f"{name}.micro_batch_size is off too; give one of the two")
    by_length = f'{name}.weight_mode = "seq-mean-token-sum-norm"'
    if section.weight_mode != "seq-mean-token-sum-norm":
        yield from unread_problems(s, [f"{name}.horizon"], by_length)
    elif section.horizon is None:
        yield problem_at(s, f"{name}.horizon", f"{by_length} divides by it; give one, as {longest}")
    if section.optimizer.warmup_steps and section.optimizer.warmup_ratio:
        text = f"{name}.optimizer.warmup_steps = {section.optimizer.warmup_steps} is given too; give one of the two"
        yield problem_at(s, f"{name}.optimizer.warmup_ratio", text)
    if section.optimizer.schedule != "cosine":
        yield from unread_problems(s, [f"{name}.optimizer.num_cycles"], "the cosine schedule")
    if section.optimizer.schedule == "exponential" and not section.optimizer.min_lr_ratio:
        text = "the exponential schedule falls by a factor and never comes to 0; give a part of lr, as 0.01"
        yield problem_at(s, f"{name}.optimizer.min_lr_ratio", text)
    yield from _host_step(s, name)


def _host_step(s: TrainSettings, name: str) -> Problems:
    """Yield the conflicts of a section whose optimizer's step is on the host."""
    own = s.critic.offload if name == "critic" else None
    if (own or s.model.offload) != "optimizer_step" or (name == "critic" and not s.uses_critic_model):
        return
    where = f'{"model" if own is None else name}.offload = "optimizer_step"'
    if value_at(s, name).optimizer.name == "muon":
        text = f"{where} would make matrices orthogonal on the host, for minutes; give adamw, or offload moments or all"
        yield problem_at(s, f"{name}.optimizer.name", text)
    if name == "actor" and s.actor.experts.bias_rate > 0:
        text = f"{where} keeps the biases of routers on the host, and finds their loads elsewhere; leave one out"
        yield problem_at(s, "actor.experts.bias_rate", text)


def rate_problems(optimizer: OptimizerSettings, path: str, updates: int, words: str) -> Problems:
    """Yield the problems of the section at `path` whose learning rate does not fit into a run of `updates` updates,
    which messages call `words`."""
    left = updates - optimizer.warmup(updates)
    if left < 1:
        yield Problem(f"{path}.warmup_steps", optimizer.warmup_steps, f"must be less than {words}")
    elif optimizer.num_cycles > left:
        text = f"must be at most {left}, the updates after the warm-up, of {words}"
        yield Problem(f"{path}.num_cycles", optimizer.num_cycles, text)
