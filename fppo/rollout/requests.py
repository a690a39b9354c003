"""Requests that come while others are being answered: the interface of engines that are open for them.

    with engine.open(params, version=3) as requests:
        requests.add([Request(name="a", ids=prompt, sampling=sampling, key=key, keep=True)])
        while requests.counts.open:
            drawn, finished = requests.step()
        requests.add([Request(name="b", after="a", ids=observation, sampling=sampling, key=key)])

A request is one turn of a row: tokens to read, then tokens to draw. With `after` it continues an earlier one from that
one's tokens, keys, values and states, so that no token runs twice and no sampled token is decoded and encoded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple, Protocol

import attrs
from torch import Tensor

from fppo.batch import RowInputs
from fppo.key import Key
from fppo.models.several import Adapter
from fppo.rollout.engine import Engine, Sampling
from fppo.rollout.scores import DrawnScores, PromptScores, Scores

End = Literal["stop", "length", "cancelled"]


class QueueFull(RuntimeError):
    """Raised if more requests would wait than an engine was opened for; none of the call's requests was added."""


def _check_one(_: object, attribute: attrs.Attribute, value: Sampling) -> None:
    if value.n != 1:
        raise ValueError(f"{attribute.name}.n = {value.n}: a request is one row; add one for each sample")


@attrs.frozen(kw_only=True, eq=False)
class Request:
    """One turn of a row: `ids` to read, then at most `sampling.max_tokens` to draw.

    Without `after`, `ids` are a whole prompt. With the name of an earlier request, they follow its tokens: an
    observation, or nothing. That request must have ended, and must `keep` its context. Several may continue the same
    one, even if it was cancelled.

    Draw number i depends on the key, the `row` and `position` + i alone: not on when a request comes, nor on which
    others are being answered. `keep` keeps the context, once the request ends, until it is released. `inputs` are the
    images of a whole prompt.

    The policy is the engine's own, or the `adapter` that the engine has by this name. Places go in turn to the `owner`s
    of waiting requests (None: the adapter). `scores` are log-probs to report beside the tokens.
    `earlier` are other responses to the prompt, from which tokens may be drafted.

    Raises ValueError for `sampling.n` above 1, for a prompt without tokens, for images with `after`, and for scores
    that do not fit the prompt.
    """

    name: str  # unique among the requests that an engine has
    ids: tuple[int, ...] = attrs.field(converter=tuple)
    sampling: Sampling = attrs.field(validator=_check_one)
    key: Key
    row: int = 0
    position: int = 0
    after: str | None = None
    keep: bool = False
    inputs: RowInputs | None = None
    adapter: str | None = None
    owner: str | None = None
    scores: Scores | None = None
    earlier: Sequence[Sequence[int]] = ()

    def __attrs_post_init__(self) -> None:
        if self.after is None and not self.ids:
            raise ValueError(f"request {self.name!r} has no tokens: give a prompt, or after = an earlier request")
        if self.after is not None and self.inputs is not None:
            raise ValueError(f"request {self.name!r}: images come with a whole prompt, not after {self.after!r}")
        if self.scores is not None:
            self.scores.check(f"request {self.name!r}", None if self.after is not None else len(self.ids))


class DrawnTokens(NamedTuple):
    """The tokens of one step, in lists of one length: a token of each request that drew one; an engine that drafts may
    have several of a request, in their order."""

    names: Sequence[str] = ()
    tokens: Sequence[int] = ()
    log_probs: Sequence[float] = ()  # under softmax(logits / temperature)
    sampling_log_probs: Sequence[float] = ()  # under the distribution drawn from; 0 if greedy
    version: int = 0  # of the engine's own policy; an adapter's is in `FinishedRequest.versions`


class DraftCounts(NamedTuple):
    """The numbers of tokens that were drafted for a request, and of those that were accepted."""

    drafted: int
    accepted: int


@attrs.frozen(kw_only=True, eq=False)
class FinishedRequest:
    """A request that has ended, with all T tokens that it drew; log-probs are float32, or float64 if the parameters
    are.

    `end` is "stop" where a stop token, which is the last one, or a stop text ended it. `fed` counts the tokens that
    went through the model for it, including drafted ones. A request that was cancelled before its first draw has no
    tokens. `prompt_scores` and `drawn_scores` answer `Request.scores`, in the dtype of the log-probs.
    """

    name: str
    tokens: Tensor  # [T] int64, on the host like the others
    log_probs: Tensor  # [T]
    sampling_log_probs: Tensor  # [T]
    versions: Tensor  # [T] int32, of the policies that drew them
    end: End
    fed: int
    drafts: DraftCounts | None = None  # None: the engine drafts no tokens
    experts: Tensor | None = None  # [M, L, k]: of the M last tokens that were fed, where the engine records them
    prompt_scores: PromptScores | None = None
    drawn_scores: DrawnScores | None = None


class RequestCounts(NamedTuple):
    """The numbers of requests: those that wait for a place, those that draw, and those that ended and are kept."""

    waiting: int
    drawing: int
    kept: int

    @property
    def open(self) -> int:
        """The number of requests that have not ended."""
        return self.waiting + self.drawing


class StepResult(NamedTuple):
    """The result of a step: the tokens that were drawn, and the requests that ended, whose last tokens are among
    them."""

    drawn: DrawnTokens
    finished: Sequence[FinishedRequest]


class Requests(Protocol):
    """An engine that is open for requests; one thread calls it."""

    @property
    def together(self) -> tuple[str, ...]:
        """The mesh axes whose ranks must make the same calls in the same order."""
        ...

    @property
    def limit(self) -> int | None:
        """The most tokens of a row, or None."""
        ...

    @property
    def counts(self) -> RequestCounts:
        """The numbers of requests that wait, that draw, and that are kept."""
        ...

    def add(self, requests: Sequence[Request]) -> None:
        """Add requests, all of them or none. Equal prompts with the same `inputs` in one call are prefilled once, as
        samples of a prompt are.

        Raises QueueFull if too many would wait, and ValueError, which names the request, for a name in use, an `after`
        that is not kept, tokens outside the vocabulary, a row that may outgrow `limit`, an unknown adapter, and
        whatever else an engine cannot do.
        """
        ...

    def step(self, most: int | None = None) -> StepResult:
        """Draw one token, or a few, of each request that has a place; without open requests, do nothing.

        With `most`, do so up to so many times, and perhaps leave `StepResult.drawn` empty: to read the tokens of a
        request only once it has finished takes less time.
        """
        ...

    def cancel(self, names: Sequence[str]) -> None:
        """End requests; the next step reports them as "cancelled". Names that are not open are ignored."""
        ...

    def release(self, names: Sequence[str]) -> None:
        """Forget the contexts of requests that have ended. Names that are not kept are ignored."""
        ...

    def update(self, params: Mapping[str, Tensor], version: int) -> None:
        """Continue with newer parameters of this version, which later tokens report. Contexts are computed anew, so
        that each token's log-prob belongs to one policy. Every rank of a mesh that cuts parameters must call."""
        ...


class AdapterRequests(Requests, Protocol):
    """Requests of an engine that runs several adapters of its base side by side, each row with the one that it
    names."""

    def put(self, name: str, adapter: Adapter, version: int = 0) -> None:
        """Give the engine an adapter under a name, in place of an earlier one of that name.

        The factors are copied. A replacement is in flight: open rows draw with the newer factors, and their cached
        tokens stay as they were computed. To leave these rows as they are, give another name.

        Raises ValueError for an adapter that does not fit the base, or whose weights cannot run side by side.
        """
        ...

    def drop(self, name: str) -> None:
        """Forget an adapter, and the kept contexts that were computed with it. Unknown names are ignored.

        Raises ValueError while requests with it are open.
        """
        ...


class RequestEngine(Engine, Protocol):
    """An engine that can be opened for requests as they come."""

    def open(
        self, params: Mapping[str, Tensor], *, version: int = 0, most_waiting: int | None = None
    ) -> AbstractContextManager[Requests]:
        """Open the engine for requests, with these parameters, until the context ends. At most `most_waiting` requests
        may wait; None: any number."""
        ...
