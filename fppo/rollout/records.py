"""Functions around sampling that all engines share: checks of prompts, and rollouts from the rows that were drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from fppo.batch import Column, Prompts, Rollout, extend, repeat
from fppo.rollout.engine import Ask, Sampling
from fppo.tree import replace

R = TypeVar("R", bound=Rollout)


class ResponseRow(Protocol):
    """A row that an engine drew, on the host: a `Response`, or a `FinishedRequest`."""

    @property
    def tokens(self) -> Tensor: ...  # int64 [T], up to and including the stop token

    @property
    def log_probs(self) -> Tensor: ...  # [T]

    @property
    def sampling_log_probs(self) -> Tensor: ...  # [T]

    @property
    def end(self) -> str: ...  # "stop" or "length"

    @property
    def versions(self) -> Tensor | None: ...  # int32 [T], of the policies that drew them

    @property
    def experts(self) -> Tensor | None: ...  # [M, L, k] of the row's first M tokens, prompts among them


class Response(NamedTuple):
    """A response to a prompt, as `ResponseRow` says."""

    tokens: Tensor
    log_probs: Tensor
    sampling_log_probs: Tensor
    end: str
    versions: Tensor | None = None
    experts: Tensor | None = None

    @staticmethod
    def of(tokens: Tensor, log_probs: Tensor, sampling_log_probs: Tensor, sampling: Sampling) -> Response:
        """The response among tokens [T] that were drawn: up to the first stop token or text."""
        ids, texts = tokens.tolist(), sampling.stop_texts
        stops = [place + 1 for place, token in enumerate(ids) if token in sampling.stop_token_ids]
        end = None if texts is None else texts.end(ids)
        counts = [len(ids), *stops[:1]] if end is None else [len(ids), *stops[:1], end[0]]
        count = min(counts)
        stopped = sampling.stopped(ids[:count])
        drawn, own, others = (x[:count] for x in (tokens, log_probs, sampling_log_probs))
        return Response(drawn, own, others, "stop" if stopped else "length")


def completed_experts(routed: Tensor, mask: Tensor) -> Tensor:
    """Complete a rollout's experts [B, S, L, k]: zeros outside the attention mask [B, S]; a row's last token, which no
    engine runs, gets the experts of the token before it, since no log-prob depends on them, and loads stay similar."""
    last = mask & ~F.pad(mask, (0, 1))[:, 1:]
    whole = routed.where(~last[..., None, None], routed.roll(1, 1))
    return whole.where(mask[..., None, None], 0)


def check_prompts(mask: Tensor) -> list[int]:
    """Return the length of each prompt, given the attention mask [B, P]. Raises ValueError if there are no prompts, or
    if one is empty or not padded on the left."""
    lengths = mask.sum(1).tolist()
    empty = [i for i, length in enumerate(lengths) if not length]
    if empty or not lengths:
        raise ValueError(f"no tokens in prompts {empty[:10]} of {len(lengths)}: leave empty prompts out")
    if (mask[:, :-1] & ~mask[:, 1:]).any():
        raise ValueError("prompts have padding after or between their tokens: pad them on the left")
    return lengths


def response_limits(ask: Ask) -> list[int]:
    """The maximal length of the responses to each prompt. Raises ValueError for a limit below 1."""
    count, most = len(ask.prompts.tokens), ask.sampling.max_tokens
    if ask.limits is None:
        return [most] * count
    limits = [min(limit, most) for limit in ask.limits.tolist()]
    if len(limits) != count or min(limits) < 1:
        raise ValueError(f"limits = {limits}: give 1 or more tokens for each of {count} prompts")
    return limits


def check_stops(sampling: Sampling, size: int) -> None:
    """Raise ValueError for stop tokens outside a vocabulary of `size` tokens."""
    wrong = [token for token in sampling.stop_token_ids if token >= size]
    if wrong:
        raise ValueError(f"stop_token_ids {wrong} are beyond the model's vocabulary of {size} tokens")


def tensor_of(values: Sequence[float], dtype: torch.dtype) -> Tensor:
    """A tensor [N] on the host. numpy reads a list in a quarter of the time that torch takes."""
    return torch.from_numpy(np.array(values, dtype=str(dtype).removeprefix("torch.")))


def number_rows(ask: Ask, device: torch.device) -> Tensor:
    """Number the rows of a rollout: response j to the prompt with row id i is row i * n + j. Returns the numbers [B *
    n], with the n responses to a prompt adjacent."""
    n = ask.sampling.n
    return (ask.prompts.row_ids.to(device)[:, None] * n + torch.arange(n, device=device)).flatten()


def padded(columns: Sequence[Tensor]) -> Tensor:
    """One tensor [B, T, *] of values [t, *] of each row, followed by zeros."""
    return pad_sequence([*columns], batch_first=True)


def rollout_of(
    ask: Ask, rows: Sequence[ResponseRow], *, pad_token_id: int, device: torch.device, versions: bool = False
) -> Rollout:
    """The rollout of all responses to `ask`, in their order, on the device. T is the length of the longest one; others
    are followed by `pad_token_id`, with False in the masks and zero in other columns. With `versions` it has
    `token_versions`."""
    prompts, numbers = repeat(ask.prompts, ask.sampling.n), number_rows(ask, device)
    lengths = tensor_of([len(row.tokens) for row in rows], torch.int64)
    columns = {
        "tokens": padded([row.tokens for row in rows]),
        "present": torch.arange(int(lengths.max())) < lengths[:, None],
        "rollout_log_probs": padded([row.log_probs for row in rows]),
        "sampling_log_probs": padded([row.sampling_log_probs for row in rows]),
    }
    if versions:
        columns["token_versions"] = padded([row.versions for row in rows if row.versions is not None])
    rollout = rollout_of_columns(
        prompts,
        {name: x.to(device) for name, x in columns.items()},
        pad_token_id=pad_token_id,
        row_ids=numbers,
        versions=torch.full_like(numbers, ask.version),
        finish=[row.end for row in rows],
    )
    routed = [row.experts for row in rows if row.experts is not None]
    return replace(rollout, routed=_routed(routed, rollout.attention_mask)) if routed else rollout


def rollout_of_columns(
    prompts: Prompts,
    columns: Mapping[str, Tensor],
    *,
    pad_token_id: int,
    row_ids: Tensor,
    versions: Tensor,
    finish: Sequence[str],
) -> Rollout:
    """The rollout of B `prompts`, whose row ids become `groups`, and the columns [B, T] of their responses, on the
    device of `row_ids`. "present" marks tokens; with "turn_ids", the policy drew those of a turn alone (>= 0)."""
    more, to = dict(columns), row_ids.device
    present, tokens = more.pop("present"), more.pop("tokens")
    return extend(
        Rollout,
        prompts,
        tokens=torch.cat([prompts.tokens.to(to), tokens.where(present, pad_token_id)], 1),
        attention_mask=torch.cat([prompts.attention_mask.to(to).bool(), present], 1),
        response_mask=more["turn_ids"] >= 0 if "turn_ids" in more else present,
        row_ids=row_ids,
        groups=prompts.row_ids.to(to),
        versions=versions,
        finish=Column(finish),
        **more,
    )


def _routed(experts: Sequence[Tensor], mask: Tensor) -> Tensor:
    """The experts [B, S, L, k] of all rows' first tokens, at the places of the attention mask [B, S]."""
    whole = experts[0].new_zeros(*mask.shape, *experts[0].shape[1:], device=mask.device)
    ran = tensor_of([len(own) for own in experts], torch.int64).to(mask.device)
    whole[mask & (mask.cumsum(1) <= ran[:, None])] = torch.cat([*experts]).to(mask.device)
    return completed_experts(whole, mask)


def widened(record: R, prompt: int, response: int, pad_token_id: int) -> R:
    """Pad a rollout, or scored rows, to `prompt` positions of prompts and `response` positions of responses."""
    width = record.response_mask.shape[1]
    left, right = prompt - (record.tokens.shape[1] - width), response - width
    per_token = ["response_mask", "rollout_log_probs", "sampling_log_probs"]
    others = ("token_versions", "turn_rewards", "teacher_log_probs")  # the last of scored rows alone
    per_token += [name for name in others if getattr(record, name, None) is not None]
    padded = {name: F.pad(getattr(record, name), (0, right)) for name in per_token}
    of_teacher = ("teacher_top_ids", "teacher_top_log_probs")
    wide = [name for name in of_teacher if getattr(record, name, None) is not None]
    padded |= {name: F.pad(getattr(record, name), (0, 0, 0, right)) for name in wide}
    steps = getattr(record, "process_rewards", None)  # of scored rows, too
    if steps is not None:
        padded["process_rewards"] = F.pad(steps, (0, right), value=torch.nan)
    return replace(
        record,
        tokens=F.pad(record.tokens, (left, right), value=pad_token_id),
        attention_mask=F.pad(record.attention_mask, (left, right)),
        routed=None if record.routed is None else F.pad(record.routed, (0, 0, 0, 0, left, right)),
        turn_ids=None if record.turn_ids is None else F.pad(record.turn_ids, (0, right), value=-1),
        **padded,
    )
