"""vLLM open for requests as they come: a row continues from its tokens, with keys and values from vLLM's prefix
cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import attrs
import torch
from torch import Tensor

from fppo.batch import RowInputs
from fppo.data.stops import StopReader
from fppo.rollout.requests import (
    DrawnTokens,
    End,
    FinishedRequest,
    QueueFull,
    Request,
    RequestCounts,
    StepResult,
)
from fppo.rollout.rows import check_names, check_tokens, check_without
from fppo.rollout.vllm.host import EngineDied, HostDraws, HostRow

_WHY = "vLLM was started for max_model_len ="


class VllmTurns(Protocol):
    """Protocol of a vLLM that holds weights of one version, and answers rows that come and go."""

    @property
    def limit(self) -> int: ...

    def begin(self, params: Mapping[str, Tensor], version: int) -> None: ...  # it then holds these weights, and no rows

    def turn(self, new: Sequence[HostRow], ended: Sequence[int]) -> list[HostDraws]: ...

    def replace(self, died: EngineDied) -> None: ...  # begins anew, or raises `died` if that is no use


@attrs.define(eq=False)
class _VllmRow:
    request: Request
    number: int
    ids: list[int]
    inputs: RowInputs | None
    reader: StopReader | None
    fed: int = 0
    tokens: list[int] = attrs.field(factory=list)
    log_probs: list[float] = attrs.field(factory=list)
    sampling_log_probs: list[float] = attrs.field(factory=list)
    versions: list[int] = attrs.field(factory=list)

    def host_row(self) -> HostRow:
        """The row as a host takes it, with the tokens that it has drawn."""
        request, drawn = self.request, len(self.tokens)
        sampling = attrs.evolve(request.sampling, max_tokens=request.sampling.max_tokens - drawn, stop_texts=None)
        position = request.position + drawn
        return HostRow(self.number, tuple(self.ids), sampling, request.key, request.row, position, self.inputs)

    def finished(self, end: End) -> FinishedRequest:
        return FinishedRequest(
            name=self.request.name,
            tokens=torch.tensor(self.tokens, dtype=torch.int64),
            log_probs=torch.tensor(self.log_probs, dtype=torch.float32),
            sampling_log_probs=torch.tensor(self.sampling_log_probs, dtype=torch.float32),
            versions=torch.tensor(self.versions, dtype=torch.int32),
            end=end,
            fed=self.fed,
        )


class VllmRequests:
    """`Requests` of a `VllmEngine`, on a vLLM of its own.

    A request that continues another is sent with all tokens of its row: vLLM finds their keys and values in its prefix
    cache, in blocks, as long as there is room for them. After an update rows are computed anew. A vLLM that dies is
    replaced, and goes on with the rows that are open.
    """

    def __init__(
        self,
        turns: VllmTurns,
        params: Mapping[str, Tensor],
        version: int,
        *,
        size: int,
        most_waiting: int | None,
        check_inputs: Callable[[Request], None],
    ) -> None:
        self._turns, self._size, self._most_waiting, self._check_inputs = turns, size, most_waiting, check_inputs
        self._open: dict[str, _VllmRow] = {}
        self._rows: dict[int, _VllmRow] = {}
        self._kept: dict[str, tuple[list[int], RowInputs | None]] = {}
        self._new: list[_VllmRow] = []
        self._gone: list[int] = []
        self._cancelled: list[FinishedRequest] = []
        self._count = 0
        self.update(params, version)

    @property
    def together(self) -> tuple[str, ...]:
        """No axes: each rank's vLLM answers alone."""
        return ()

    @property
    def limit(self) -> int | None:
        """vLLM's limit on a prompt and its response together."""
        return self._turns.limit

    @property
    def counts(self) -> RequestCounts:
        """The numbers of requests; some of those that draw may wait inside vLLM."""
        return RequestCounts(len(self._new), len(self._open) - len(self._new), len(self._kept))

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests, all of them or none, for vLLM; see `Requests.add` for its errors."""
        waiting = len(self._new) + len(requests)
        if self._most_waiting is not None and waiting > self._most_waiting:
            raise QueueFull(f"{waiting} requests would wait, and at most {self._most_waiting} may: add them later")
        check_names(requests, self._kept, self._open)
        check_without(requests, "vLLM here")
        for request in requests:
            before = 0 if request.after is None else len(self._kept[request.after][0])
            check_tokens(request, before, size=self._size, limit=self.limit, limit_text=_WHY)
            self._check_inputs(request)
        for request in requests:
            ids, inputs = ([], request.inputs) if request.after is None else self._kept[request.after]
            texts = request.sampling.stop_texts
            reader = None if texts is None else StopReader(texts)
            row = _VllmRow(request, self._count, [*ids, *request.ids], inputs, reader)
            self._count += 1
            self._open[request.name] = self._rows[row.number] = row
            self._new.append(row)

    def step(self, most: int | None = None) -> StepResult:
        """Send new requests to vLLM, and return the tokens of one of its steps and the requests that ended. vLLM
        decides how many tokens that is, so `most` is ignored. If vLLM died it is replaced, and open requests are sent
        anew."""
        del most
        finished, self._cancelled = self._cancelled, []
        new, gone, self._new, self._gone = self._new, self._gone, [], []
        if not self._open and not gone:
            return StepResult(DrawnTokens(version=self._version), finished)
        try:
            drawn = self._turns.turn([row.host_row() for row in new], gone)
        except EngineDied as died:
            self._turns.replace(died)
            self._begin_again()
            return StepResult(DrawnTokens(version=self._version), finished)
        names, tokens, log_probs, others = list[str](), list[int](), list[float](), list[float]()
        for draws in drawn:
            row = self._rows.get(draws.number)
            if row is None:
                continue
            row.fed += len(draws.tokens) if row.versions else len(row.ids) - draws.cached + len(draws.tokens) - 1
            end = self._taken(row, draws)
            count = len(draws.tokens)
            names += [row.request.name] * count
            tokens += draws.tokens
            log_probs += draws.log_probs
            others += draws.sampling_log_probs
            if end is not None:
                if not draws.ended:
                    self._gone.append(row.number)
                finished.append(self._closed(row, end))
        return StepResult(DrawnTokens(names, tokens, log_probs, others, self._version), finished)

    def _taken(self, row: _VllmRow, draws: HostDraws) -> End | None:
        """Give a row its tokens. Returns how it ends with them; None if it goes on."""
        row.ids += draws.tokens
        row.tokens += draws.tokens
        row.log_probs += draws.log_probs
        row.sampling_log_probs += draws.sampling_log_probs
        row.versions += [self._version] * len(draws.tokens)
        by_text = row.reader is not None and any([row.reader.ends(0, token) for token in draws.tokens])
        if by_text or (draws.ended and row.tokens and row.tokens[-1] in row.request.sampling.stop_token_ids):
            return "stop"
        return "length" if draws.ended else None

    def cancel(self, names: Sequence[str]) -> None:
        """End these requests; the next step reports them as "cancelled". Names that are not open are ignored."""
        for row in [self._open[name] for name in dict.fromkeys(names) if name in self._open]:
            if row in self._new:
                self._new.remove(row)
            else:
                self._gone.append(row.number)
            self._cancelled.append(self._closed(row, "cancelled"))

    def _closed(self, row: _VllmRow, end: End) -> FinishedRequest:
        del self._open[row.request.name], self._rows[row.number]
        if row.request.keep:
            self._kept[row.request.name] = row.ids, row.inputs
        return row.finished(end)

    def release(self, names: Sequence[str]) -> None:
        """Forget the tokens of these ended requests. Names that are not kept are ignored."""
        for name in names:
            self._kept.pop(name, None)

    def update(self, params: Mapping[str, Tensor], version: int) -> None:
        """Send newer parameters of this version to vLLM, and all open rows anew. Every rank of a mesh that cuts
        parameters must call."""
        self._version = version
        self._turns.begin(params, version)
        self._begin_again()

    def _begin_again(self) -> None:
        """Send all open rows anew."""
        self._new, self._gone = [*self._open.values()], []
