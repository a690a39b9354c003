"""The interface of engines, and the settings of sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs
from torch import Tensor

from fppo.batch import Prompts, Rollout
from fppo.data.stops import StopTexts
from fppo.key import Key

_COLDEST = 1e-30  # logits divided by less may overflow float32


def _at_least(low: int, advice: str):
    def check(_: object, attribute: attrs.Attribute, value: int | None) -> None:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
            raise ValueError(f"{attribute.name} = {value!r}: {advice}")

    return check


def _check_temperature(_: object, attribute: attrs.Attribute, value: float) -> None:
    if not (value >= _COLDEST and math.isfinite(value)):
        text = f"give a number of at least {_COLDEST}; for the likeliest token set greedy"
        raise ValueError(f"{attribute.name} = {value!r}: {text}")


def _check_top_p(_: object, attribute: attrs.Attribute, value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"{attribute.name} = {value!r}: give a number above 0 and at most 1 (1 keeps every token)")


def _check_min_p(_: object, attribute: attrs.Attribute, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{attribute.name} = {value!r}: give a number from 0 to below 1 (0 keeps every token)")


def _check_stop(_: object, attribute: attrs.Attribute, value: tuple[int, ...]) -> None:
    wrong = [x for x in value if isinstance(x, bool) or not isinstance(x, int) or x < 0]
    if wrong:
        raise ValueError(f"{attribute.name} = {value!r}: {wrong} are no token ids; give numbers from 0 on")


@attrs.frozen(kw_only=True)
class Sampling:
    """Settings of sampling.

    The distribution is softmax(logits / temperature), restricted to the `top_k` likeliest tokens (None or 0: all), then
    to the fewest of the likeliest tokens that hold `top_p` of the remaining mass, and to tokens with at least `min_p`
    times the likeliest token's probability (Nguyen et al., 2024, arXiv:2407.01082; 0: all). A response ends with the
    first of `stop_token_ids`, which it includes, with the token that completes the first of `stop_texts`, or after
    `max_tokens` tokens. `greedy` takes the likeliest token; its log-probs are then reported for softmax(logits /
    temperature).
    """

    temperature: float = attrs.field(default=1.0, validator=_check_temperature)
    top_k: int | None = attrs.field(default=None, validator=_at_least(0, "give 1 or more, or 0 to keep every token"))
    top_p: float = attrs.field(default=1.0, validator=_check_top_p)
    min_p: float = attrs.field(default=0.0, validator=_check_min_p)
    n: int = attrs.field(default=1, validator=_at_least(1, "give 1 or more samples per prompt"))
    max_tokens: int = attrs.field(default=256, validator=_at_least(1, "give 1 or more tokens per response"))
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=tuple, validator=_check_stop)
    stop_texts: StopTexts | None = None
    greedy: bool = False

    @property
    def per_token(self) -> Sampling:
        """Only the options that a single draw depends on; equal for settings that draw alike."""
        return attrs.evolve(self, top_k=self.top_k or None, n=1, max_tokens=1, stop_token_ids=(), stop_texts=None)

    def at(self, temperature: float) -> Sampling:
        """These settings with another temperature; 0 sets `greedy`."""
        return (
            attrs.evolve(self, greedy=True)
            if temperature == 0
            else attrs.evolve(self, greedy=False, temperature=temperature)
        )

    def with_options(self, options: Mapping[str, Any]) -> Sampling:
        """These settings with options as clients write them: None leaves one as it is, a temperature of 0 sets
        `greedy`, and a top_k of -1 keeps every token. Raises ValueError for a value that is not allowed."""
        given = {name: value for name, value in options.items() if value is not None}
        if given.get("top_k") == -1:
            given["top_k"] = None
        changed = self.at(given.pop("temperature")) if "temperature" in given else self
        return attrs.evolve(changed, **given)

    def stopped(self, response: Sequence[int]) -> bool:
        """Whether a response ended with a stop token or text, rather than at its maximal length."""
        texts = self.stop_texts
        return response[-1] in self.stop_token_ids or (texts is not None and texts.last(response) is not None)


OnFinished = Callable[[int, list[int], str], None]  # with a row's index, its tokens, and its finish reason
Newer = Callable[
    [], tuple[Mapping[str, Any], int] | None
]  # returns the parameters of the last update so far, and their version


@attrs.frozen(eq=False)
class Ask:
    """A request to an engine: `sampling.n` responses to each of B prompts, drawn by the key.

    `version` is the version of the sampling policy. `limits` [B] are maximal lengths of each prompt's responses, if
    smaller than `sampling.max_tokens`. `on_finished` is called once for each row of the rollout when it is finished, in
    any order; on several ranks, each rank calls it for the rows that it samples. If prompts end with the first `offset`
    tokens of their responses, the draws are those of the positions after these. Only an `InterruptibleEngine` reads
    `newer`.
    """

    prompts: Prompts
    sampling: Sampling
    key: Key
    version: int = 0
    limits: Tensor | None = None
    on_finished: OnFinished | None = None
    offset: int = 0
    newer: Newer | None = None


class Engine(Protocol):
    """Protocol of engines: they answer prompts with the policy `params`, in `ask.sampling.n` adjacent rows for each
    prompt.

    Equal arguments give equal rollouts. An engine that wraps another passes on a changed request.
    """

    def generate(self, params: Mapping[str, Tensor], ask: Ask) -> Rollout: ...
