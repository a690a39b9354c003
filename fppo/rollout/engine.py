"""Interface of engines, and the settings of sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs
from torch import Tensor

from fppo.batch import Prompts, Rollout
from fppo.data.stops import StopTexts
from fppo.key import Key

_COLDEST = 1e-30  # logits divided by less may outgrow float32


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


def _check_stop(_: object, attribute: attrs.Attribute, value: tuple[int, ...]) -> None:
    wrong = [x for x in value if isinstance(x, bool) or not isinstance(x, int) or x < 0]
    if wrong:
        raise ValueError(f"{attribute.name} = {value!r}: {wrong} are no token ids; give numbers from 0 on")


@attrs.frozen(kw_only=True)
class Sampling:
    """How responses are drawn.

    The distribution is softmax(logits / temperature), cut to the `top_k` likeliest tokens (None or 0: all), then to the
    fewest likeliest tokens that hold `top_p` of what is left. A response ends with the first of `stop_token_ids`, which
    it includes, or with the token that completes the first of `stop_texts`, or after `max_tokens`. `greedy` takes the
    likeliest token instead; the temperature then only says under which distribution its log-probs are reported.
    """

    temperature: float = attrs.field(default=1.0, validator=_check_temperature)
    top_k: int | None = attrs.field(default=None, validator=_at_least(0, "give 1 or more, or 0 to keep every token"))
    top_p: float = attrs.field(default=1.0, validator=_check_top_p)
    n: int = attrs.field(default=1, validator=_at_least(1, "give 1 or more samples per prompt"))
    max_tokens: int = attrs.field(default=256, validator=_at_least(1, "give 1 or more tokens per response"))
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=tuple, validator=_check_stop)
    stop_texts: StopTexts | None = None
    greedy: bool = False

    def stopped(self, response: Sequence[int]) -> bool:
        """Whether its last token ended a response; else its length did."""
        texts = self.stop_texts
        return response[-1] in self.stop_token_ids or (texts is not None and texts.last(response) is not None)


OnFinished = Callable[[int, list[int], str], None]  # a row's number, its response's tokens, and its finish
Newer = Callable[
    [], tuple[Mapping[str, Any], int] | None
]  # the parameters of the last update so far, and their version


@attrs.frozen(eq=False)
class Ask:
    """A request to an engine: `sampling.n` responses to each of B prompts, drawn by the key.

    `version` is the number of the policy that samples. `limits` [B] are the most tokens of each prompt's responses,
    where they are fewer than `sampling.max_tokens`. `on_finished` is called when a row of the rollout is done, once for
    each, in any order; on several ranks, for the rows that this one samples. The prompts hold `offset` tokens of their
    responses already: the draws are those of the positions behind. `newer` is read by an `InterruptibleEngine` alone.
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
    """Anything that answers prompts with the policy `params`: `ask.sampling.n` rows for each, next to each other.

    The same arguments give the same rollout. An engine around another evolves the ask.
    """

    def generate(self, params: Mapping[str, Tensor], ask: Ask) -> Rollout: ...
