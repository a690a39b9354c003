"""Checks of the settings that fppo sft reads, together."""

from __future__ import annotations

from fppo.fields import Problems, unread, wrong
from fppo.settings.placement import places_of
from fppo.settings.train import TrainSettings


def sft_problems(s: TrainSettings) -> Problems:
    """The conflicts of the section sft, with itself and with others."""
    sft = s.sft
    if sft.messages is None:
        yield from unread(s, ["sft.turns"], "conversations, sft.messages")
    else:
        yield from unread(s, ["sft.response"], "prompts without sft.messages")
        if not s.data.chat:
            yield wrong(s, "sft.messages", "conversations go through a chat template: give data.chat = true")
    for name, field in s.data.seen.items():
        yield wrong(s, name, f"fppo sft takes no images and videos yet ({field}); leave it out")
    if s.data.rows is None and not s.data.path:
        yield wrong(
            s, "data.path", "is not set; give jsonl, csv or parquet files, the name of a data set, or data.rows"
        )
    if sft.micro_batch_size and sft.token_budget:
        text = f"sft.token_budget = {sft.token_budget} is given too; give one of the two, 0 turns the other off"
        yield wrong(s, "sft.micro_batch_size", text)
    if sft.token_budget == 0 and not sft.micro_batch_size:
        yield wrong(s, "sft.token_budget", "sft.micro_batch_size is off too; give one of the two")
    by_length = 'sft.weight_mode = "seq-mean-token-sum-norm"'
    if sft.weight_mode != "seq-mean-token-sum-norm":
        yield from unread(s, ["sft.horizon"], by_length)
    elif sft.horizon is None:
        yield wrong(s, "sft.horizon", f"{by_length} divides by it; give one, as sft.max_tokens")
    if sft.optimizer.schedule == "exponential" and not sft.optimizer.min_lr_ratio:
        text = "the exponential schedule falls by a factor and never comes to 0; give a part of lr, as 0.01"
        yield wrong(s, "sft.optimizer.min_lr_ratio", text)
    if sft.epochs is None and sft.optimizer.warmup_steps >= s.steps:
        yield wrong(s, "sft.optimizer.warmup_steps", f"must be less than the run's {s.steps} updates")
    if places_of(s.placement):
        yield wrong(s, "placement", "fppo sft runs in processes of one kind; leave pools out")
