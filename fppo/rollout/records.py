"""Functions around sampling that all engines share: checks of prompts, rollouts from tokens or steps, columns of
experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fppo.batch import Column, Rollout, extend, repeat
from fppo.data.stops import StopTexts
from fppo.rollout.engine import Ask, OnFinished, Sampling
from fppo.tree import replace

R = TypeVar("R", bound=Rollout)
_SCORED = 4096  # tokens whose log-probs are computed together, and for which hidden states are kept


class Fed(NamedTuple):
    """Experts of tokens that the model processed, with the tokens' rows and columns in the rollout. `rows` and
    `columns` are broadcast to a common shape. Columns count from the first response token, so that prompts have
    negative ones."""

    rows: Tensor  # [*M]
    columns: Tensor  # [*M]
    experts: Tensor  # [*M, L, k]


def experts_of_prompts(experts: Tensor, index: Tensor, rows: Tensor, width: int) -> Fed:
    """Place the experts [N, L, k] of packed prompts in the rollout. Packed token i stands at index[i] of the padded
    prompts [P, width], flattened; experts beyond `index` [M] are padding's. `rows` [P, n] are each prompt's draws."""
    columns = (index % width - width)[:, None]
    return Fed(rows[index // width], columns, experts[: len(index), None])


def experts_column(fed: Sequence[Fed], rows: int, prompt: int, response: int) -> Tensor:
    """Lay experts out as a rollout's column [B, P + T, L, k]: B is `rows`, and P and T are the `prompt` and `response`
    positions."""
    first = fed[0].experts
    whole = first.new_zeros(rows, prompt + response, *first.shape[-2:])
    for part in fed:
        whole[part.rows, part.columns + prompt] = part.experts
    return whole


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


def rollout_of(
    ask: Ask,
    tokens: Tensor,
    drawn: Tensor,
    log_probs: Tensor,
    sampling_log_probs: Tensor,
    *,
    row_ids: Tensor,
    pad_token_id: int,
    routed: Tensor | None = None,
) -> Rollout:
    """Make a rollout of responses `tokens` [B, T] at the positions `drawn` (bool [B, T]), up to and including the stop
    token; `routed` [B, S, L, k] are the experts of all tokens that the engine ran."""
    stops = drawn & torch.isin(tokens, tokens.new_tensor(ask.sampling.stop_token_ids))
    if ask.sampling.stop_texts is not None:
        stops |= _text_stops(tokens, drawn, ask.sampling.stop_texts)
    mask = drawn & (stops.cumsum(1) - stops.long() == 0)
    rows = repeat(ask.prompts, ask.sampling.n)
    device = tokens.device
    whole = torch.cat([rows.attention_mask.to(device).bool(), mask], 1)
    return extend(
        Rollout,
        rows,
        tokens=torch.cat([rows.tokens.to(device), tokens.where(mask, pad_token_id)], 1),
        attention_mask=whole,
        response_mask=mask,
        rollout_log_probs=log_probs.where(mask, 0.0),
        sampling_log_probs=sampling_log_probs.where(mask, 0.0),
        row_ids=row_ids,
        groups=rows.row_ids.to(device),
        versions=torch.full_like(row_ids, ask.version),
        finish=Column("stop" if ended else "length" for ended in (stops & mask).any(1).tolist()),
        routed=None if routed is None else completed_experts(routed, whole),
    )


def widened(record: R, prompt: int, response: int, pad_token_id: int) -> R:
    """Pad a rollout, or scored rows, to `prompt` positions of prompts and `response` positions of responses."""
    width = record.response_mask.shape[1]
    left, right = prompt - (record.tokens.shape[1] - width), response - width
    per_token = ["response_mask", "rollout_log_probs", "sampling_log_probs"]
    others = ("token_versions", "turn_rewards", "teacher_log_probs")  # the last of scored rows alone
    per_token += [name for name in others if getattr(record, name, None) is not None]
    return replace(
        record,
        tokens=F.pad(record.tokens, (left, right), value=pad_token_id),
        attention_mask=F.pad(record.attention_mask, (left, right)),
        routed=None if record.routed is None else F.pad(record.routed, (0, 0, 0, 0, left, right)),
        turn_ids=None if record.turn_ids is None else F.pad(record.turn_ids, (0, right), value=-1),
        **{name: F.pad(getattr(record, name), (0, right)) for name in per_token},
    )


def _text_stops(tokens: Tensor, drawn: Tensor, texts: StopTexts) -> Tensor:
    """Find each row's first token that completes one of the texts: bool [B, T]."""
    counts = drawn.sum(1).tolist()
    ends = [texts.end(row[:count]) for row, count in zip(tokens.tolist(), counts, strict=True)]
    places = torch.tensor([-1 if end is None else end[0] - 1 for end in ends], device=tokens.device)
    return torch.arange(tokens.shape[1], device=tokens.device) == places[:, None]


class DrawnStep(NamedTuple):
    """One token of each live row: row rows[i] of the rollout got tokens[i] at the same position."""

    rows: Tensor
    position: int
    tokens: Tensor
    log_probs: Tensor
    sampling_log_probs: Tensor


class Steps:
    """The steps of a wave, in order. With `score(hidden, tokens)` log-probs are computed for many tokens at once, from
    the hidden states [R, H] before them."""

    def __init__(self, score: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
        self._score = score
        self._done: list[DrawnStep] = []
        self._open: list[tuple[DrawnStep, Tensor]] = []

    def add(self, step: DrawnStep, hidden: Tensor | None) -> None:
        """Append a step, with the hidden states [R, H] before its tokens if they are to be scored."""
        if self._score is None:
            self._done.append(step)
            return
        assert hidden is not None
        self._open.append((step, hidden))
        if sum(len(step.rows) for step, _ in self._open) >= _SCORED:
            self._close()

    def taken(self) -> list[DrawnStep]:
        """All steps so far."""
        self._close()
        return self._done

    def _close(self) -> None:
        if self._score is None or not self._open:
            return
        steps, hidden = zip(*self._open, strict=True)
        log_probs = self._score(torch.cat(hidden), torch.cat([step.tokens for step in steps]))
        parts = log_probs.split([len(step.rows) for step in steps])
        self._done += [step._replace(log_probs=part) for step, part in zip(steps, parts, strict=True)]
        self._open = []


class FinishedRows:
    """A listener to the steps of all waves, which calls `on_finished` for each row that finishes. `limits` are the
    maximal lengths of each prompt's responses."""

    def __init__(self, on_finished: OnFinished, limits: Sequence[int], sampling: Sampling) -> None:
        self._on_finished = on_finished
        self._limits = [limit for limit in limits for _ in range(sampling.n)]
        self._open: dict[int, list[int]] = {row: [] for row in range(len(self._limits))}

    def __call__(self, step: DrawnStep, stops: Tensor) -> None:
        """Process a step; `stops` says which of its tokens stop their rows. Finished rows that are still among the live
        ones are skipped."""
        for row, token, stopped in zip(step.rows.tolist(), step.tokens.tolist(), stops.tolist(), strict=True):
            response = self._open.get(row)
            if response is None:
                continue
            response.append(token)
            if stopped or len(response) == self._limits[row]:
                del self._open[row]
                self._on_finished(row, response, "stop" if stopped else "length")


def assemble(
    steps: Sequence[DrawnStep],
    fed: Sequence[Fed],
    ask: Ask,
    row_ids: Tensor,
    *,
    limits: Sequence[int],
    pad_token_id: int,
) -> Rollout:
    """Assemble the rollout of all steps of all waves, with the experts of the tokens that the model processed."""
    batch, length = len(row_ids), 1 + max(step.position for step in steps)
    place = torch.cat([step.rows * length + step.position for step in steps])

    def lay_out(columns: Sequence[Tensor], fill: float) -> Tensor:
        x = torch.cat(list(columns))
        return x.new_full((batch * length,), fill).index_copy(0, place, x).view(batch, length)

    tokens = lay_out([step.tokens for step in steps], pad_token_id)
    log_probs = lay_out([step.log_probs for step in steps], 0.0)
    sampling_log_probs = lay_out([step.sampling_log_probs for step in steps], 0.0)
    most = torch.tensor(limits, device=place.device).repeat_interleave(ask.sampling.n)
    drawn = lay_out([step.position < most[step.rows] for step in steps], False)
    routed = experts_column(fed, batch, ask.prompts.tokens.shape[1], length) if fed else None
    return rollout_of(
        ask,
        tokens,
        drawn,
        log_probs,
        sampling_log_probs,
        row_ids=row_ids,
        pad_token_id=pad_token_id,
        routed=routed,
    )
