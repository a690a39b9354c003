"""Log-probs that a request reports beside those of its draws: of its prompt, of the likeliest tokens, of any targets.

All are under softmax(logits), whatever the options of sampling. Logits are computed for some positions at a time, so
that memory does not grow with the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import attrs
import torch
from torch import Tensor

from fppo.key import Key, uniforms
from fppo.rollout.engine import Sampling
from fppo.rollout.sampling import Columns, draw_each
from fppo.runtime.mesh import all_reduce
from fppo_kernels.padding import sent

_NUMBERS = 1 << 24  # of logits at once


@attrs.frozen(kw_only=True, eq=False)
class Scores:
    """The log-probs that a request is to report, for a prompt of P tokens.

    - `prompt`: of the prompt's own tokens, each given the tokens before it
    - `prompt_top`: of this many likeliest tokens at each position of the prompt
    - `last`: limits `prompt` and `prompt_top` to so many last tokens, from 1 to P - 1; None: all tokens but the first
    - `targets`: of given tokens, int64 [P - 1, K]; row i stands for position i + 1, and -1 for no token
    - `draws`: of this many tokens, drawn with replacement at each position but the first, at the request's temperature
    - `drawn_top`: of each token that the request draws, and of this many likeliest tokens at its position

    Raises ValueError for negative numbers, and for targets that are no ids [P - 1, K].
    """

    prompt: bool = False
    last: int | None = None
    prompt_top: int = 0
    targets: Tensor | None = None
    draws: int = 0
    drawn_top: int = 0

    def __attrs_post_init__(self) -> None:
        for name in ("prompt_top", "draws", "drawn_top"):
            if getattr(self, name) < 0:
                raise ValueError(f"scores.{name} = {getattr(self, name)}: give 0 or more")
        if self.last is not None and not (self.prompt or self.prompt_top):
            raise ValueError(f"scores.last = {self.last}: set prompt or prompt_top, which it bounds")
        if self.targets is not None:
            x = self.targets
            if x.dtype != torch.int64 or x.ndim != 2 or (x.numel() and int(x.min()) < -1):
                raise ValueError(f"scores.targets: give int64 ids [P - 1, K], -1 for none, not {x.dtype} {[*x.shape]}")

    @property
    def of_prompt(self) -> bool:
        """Whether any scores of the prompt are asked for, besides those of drawn tokens."""
        return bool(self.prompt or self.prompt_top or self.targets is not None or self.draws)

    def check(self, prefix: str, length: int | None) -> None:
        """Raise ValueError, with a text that begins with `prefix`, if the scores do not fit a prompt of `length`
        tokens, or if the request has no whole prompt (None)."""
        if not self.of_prompt:
            return
        if length is None:
            raise ValueError(f"{prefix}: scores of a prompt come with a whole prompt, not after another request")
        if self.last is not None and not 1 <= self.last < length:
            raise ValueError(
                f"{prefix}: scores.last = {self.last}: a prompt of {length} has 1 to {length - 1} to score"
            )
        if self.targets is not None and len(self.targets) != length - 1:
            rows = len(self.targets)
            raise ValueError(f"{prefix}: scores.targets has {rows} rows, and a prompt of {length} tokens {length - 1}")

    def begin(self, length: int) -> int:
        """The first position of a prompt of `length` tokens whose logits are needed; `length` if there is none."""
        begins = [length]
        if self.draws:
            begins.append(1)
        if self.prompt or self.prompt_top:
            begins.append(1 if self.last is None else length - self.last)
        if self.targets is not None:
            begins += (1 + (self.targets >= 0).any(1).nonzero()[:1, 0]).tolist()
        return min(begins)


class TopTokens(NamedTuple):
    """The k likeliest tokens at some positions, the likeliest first; all tokens if the vocabulary has fewer than k."""

    ids: Tensor  # int64 [*, k]
    log_probs: Tensor  # [*, k]


class PromptScores(NamedTuple):
    """The log-probs of a prompt of P tokens, on the host; nan, and -1 as an id, where none was asked for."""

    log_probs: Tensor | None = None  # [P]
    top: TopTokens | None = None  # [P, k]
    targets: Tensor | None = None  # [P - 1, K]
    draws: TopTokens | None = None  # [P - 1, k], in the order of the draws


class DrawnScores(NamedTuple):
    """The log-probs of T draws, on the host."""

    log_probs: Tensor  # [T]
    top: TopTokens  # [T, k]


class ScoredPrompt(NamedTuple):
    """The scores of a prompt that a request asks for, and the sampling settings, key and row that its `Scores.draws`
    depend on."""

    scores: Scores
    sampling: Sampling
    key: Key
    row: int


# the log-probs [N] of tokens [N] by the hidden states [N, H] before them
TokenLogProbs = Callable[[Tensor, Tensor], Tensor]


def whole_logits(logits: Tensor, columns: Columns) -> Tensor:
    """Logits [R, V] of the whole vocabulary, from a rank's columns of them. Every rank must call."""
    if columns.axis.size == 1:
        return logits
    whole = logits.new_zeros(len(logits), columns.size)
    whole[:, columns.first : columns.first + logits.shape[1]] = logits
    return all_reduce(whole, columns.axis)


def top_tokens(logits: Tensor, count: int) -> TopTokens:
    """The `count` likeliest tokens of each row of logits [R, V]; all V tokens if `count` is larger."""
    values, ids = logits.topk(min(count, logits.shape[-1]))
    return TopTokens(ids, values - logits.logsumexp(-1, keepdim=True))


def prompt_scores(
    requests: Sequence[ScoredPrompt],
    ids: Sequence[int],
    hidden: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    exact: TokenLogProbs | None = None,
) -> list[PromptScores]:
    """Compute the scores of one prompt for each of the `requests`.

    `hidden` [P, H] are the states of the prompt's tokens `ids`, and `logits_of` gives whole logits [N, V] of some of
    the states. With `exact`, log-probs of given tokens are those of a training pass, bit for bit.
    """
    length, device = len(ids), hidden.device
    sheets = [_Sheet(one, length) for one in requests]
    begin = min((one.scores.begin(length) for one in requests), default=length)
    tokens = sent(torch.tensor([*ids]), device)
    for part in _parts(begin, length, hidden, logits_of):
        for sheet in sheets:
            sheet.fill(part, tokens, exact)
    return [sheet.result() for sheet in sheets]


class _Positions(NamedTuple):
    """Consecutive positions of a prompt, with the hidden states and logits before each."""

    start: int
    hidden: Tensor  # [N, H]
    logits: Tensor  # [N, V]
    norm: Tensor  # [N, 1]

    @property
    def end(self) -> int:
        return self.start + len(self.logits)

    def log_probs(self, tokens: Tensor, exact: TokenLogProbs | None) -> Tensor:
        """The log-probs [N, K] of K given tokens at each of the N positions, int64 [N, K]. They are computed from the
        logits; with `exact`, by that function from the hidden states, bit for bit as in a training pass."""
        if exact is None or not tokens.shape[1]:
            return self.logits.gather(1, tokens) - self.norm
        return torch.stack([exact(self.hidden, column) for column in tokens.unbind(1)], 1)

    def behind(self, begin: int) -> _Positions:
        """The positions from `begin` on."""
        skipped = max(0, begin - self.start)
        return _Positions(self.start + skipped, *(x[skipped:] for x in self[1:]))


def _parts(begin: int, end: int, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]) -> Iterator[_Positions]:
    """Yield the positions from `begin` to `end`, some at a time."""
    start, count = begin, 1  # the first tells how wide logits are
    while start < end:
        before = hidden[start - 1 : min(start + count, end) - 1]
        logits = logits_of(before)
        yield _Positions(start, before, logits, logits.logsumexp(-1, keepdim=True))
        start, count = start + len(before), max(1, _NUMBERS // logits.shape[-1])


class _Sheet:
    """One request's scores of a prompt, collected some positions at a time."""

    def __init__(self, request: ScoredPrompt, length: int) -> None:
        scores = request.scores
        self._request, self._length = request, length
        self._begin = 1 if scores.last is None else length - scores.last
        self._log_probs: list[Tensor] = []
        self._top: list[TopTokens] = []
        self._targets: list[Tensor] = []
        self._draws: list[TopTokens] = []

    def fill(self, part: _Positions, tokens: Tensor, exact: TokenLogProbs | None) -> None:
        """Append the scores of the positions `part`. `tokens` [P] is the whole prompt, and `exact` that of
        `prompt_scores`."""
        scores, own = self._request.scores, part.behind(self._begin)
        if scores.prompt and own.start < own.end:
            self._log_probs.append(own.log_probs(tokens[own.start : own.end, None], exact)[:, 0].cpu())
        if scores.prompt_top and own.start < own.end:
            self._top.append(TopTokens(*(x.cpu() for x in top_tokens(own.logits, scores.prompt_top))))
        if scores.targets is not None:
            targets = sent(scores.targets[part.start - 1 : part.end - 1], part.logits.device)
            found = part.log_probs(targets.clamp(min=0), exact).where(targets >= 0, torch.nan)
            self._targets.append(found.cpu())
        if scores.draws:
            drawn = self._drawn(part)
            self._draws.append(TopTokens(drawn.cpu(), (part.logits.gather(1, drawn) - part.norm).cpu()))

    def _drawn(self, part: _Positions) -> Tensor:
        """Draw alternatives [N, k] to the prompt's tokens: number j at a position depends on the key, the row and the
        position alone."""
        _, sampling, key, row = self._request
        keys = [key.fold("alternatives", j) for j in range(self._request.scores.draws)]
        places = torch.arange(part.start, part.end).expand(len(keys), -1)
        numbers = uniforms(keys, [row] * len(keys), places).T.contiguous()
        return draw_each(part.logits, sent(numbers, part.logits.device), sampling)

    def result(self) -> PromptScores:
        """The scores of the whole prompt."""
        scores, length = self._request.scores, self._length
        return PromptScores(
            _filled(self._log_probs, length, torch.nan) if scores.prompt else None,
            _top_filled(self._top, length, scores.prompt_top) if scores.prompt_top else None,
            None if scores.targets is None else _targets_filled(self._targets, scores.targets),
            _top_filled(self._draws, length - 1, scores.draws) if scores.draws else None,
        )


def _filled(parts: Sequence[Tensor], rows: int, fill: float) -> Tensor:
    """Concatenate the parts, and put rows of `fill` before them, up to `rows` rows."""
    if not parts:
        return torch.full((rows,), fill)
    found = torch.cat([*parts])
    return torch.cat([found.new_full((rows - len(found), *found.shape[1:]), fill), found])


def _top_filled(parts: Sequence[TopTokens], rows: int, width: int) -> TopTokens:
    if not parts:
        return TopTokens(torch.full((rows, width), -1), torch.full((rows, width), torch.nan))
    ids, log_probs = zip(*parts, strict=True)
    return TopTokens(_filled(ids, rows, -1), _filled(log_probs, rows, torch.nan))


def _targets_filled(parts: Sequence[Tensor], targets: Tensor) -> Tensor:
    return _filled(parts, len(targets), torch.nan) if parts else torch.full(targets.shape, torch.nan)
