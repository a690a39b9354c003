"""A server of the tinker protocol in this process, over tiny models, and clients of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import attrs
import httpx2 as httpx
import torch

from fppo import models
from fppo.key import Key
from fppo.quickstart import CHARACTERS, character_tokenizer, small_model
from fppo.rollout.embedded import EmbeddedEngine
from fppo.serve.loop import EngineLoop
from fppo.serve.server import bound_socket, serving
from fppo.serve.texts import texts_of
from fppo.serve.tinker.routes import ClientFlags, tinker_app
from fppo.serve.tinker.runs import BaseModel
from fppo.serve.tinker.samples import SampleRules
from fppo.serve.tinker.service import ServedBase, TinkerService
from fppo_kernels.table import Kernels

KEY, OTHER = "tml-one-key", "tml-another"
LIMIT = 32


@cache
def tokenizer():
    return character_tokenizer(CHARACTERS)


SIZE = len(tokenizer())


@cache
def base(name: str = "tiny", seed: int = 0, *, layers: int = 1, directory: str = "nowhere") -> ServedBase:
    """A base of one layer, 16 wide."""
    model = small_model(SIZE, width=16, layers=layers)
    params = models.init_params(model, Key(seed))
    engine = EmbeddedEngine(model=model, kernels=Kernels.named(), pad_token_id=0)
    rules = SampleRules(texts=texts_of(tokenizer(), vocabulary=SIZE, chat=False), stop_token_ids=(1,), limit=LIMIT)
    made = BaseModel(name=name, model=model, params=params, tokenizer_id=directory, limit=LIMIT)
    return ServedBase(base=made, engine=engine, rules=rules, write_tokenizer=tokenizer().save_pretrained)


@attrs.frozen
class Host:
    """A server that answers."""

    url: str
    service: TinkerService
    client: httpx.Client

    def post(self, path: str, body: Mapping | bytes, *, key: str | None = KEY, **headers: str) -> httpx.Response:
        """The response to a request of its own."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        given |= {} if key is None else {"x-api-key": key}
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.client.post(f"{self.url}/api/v1/{path}", content=content, headers=given)

    def get(self, path: str, *, key: str | None = KEY) -> httpx.Response:
        return self.client.get(f"{self.url}/api/v1/{path}", headers={} if key is None else {"x-api-key": key})

    def params(self, run: str) -> dict[str, torch.Tensor]:
        """The trained parameters of a run."""
        value = self.service.runs.value(run)
        assert value is not None
        return dict(value.state.params)


@contextlib.contextmanager
def served(
    root: Path,
    bases: Sequence[ServedBase] | None = None,
    *,
    flags: ClientFlags | None = None,
    port: int = 0,
    **changes,
) -> Iterator[Host]:
    """A server over a folder."""
    named = {each.base.name: each for each in (bases or [base()])}
    service = TinkerService(root, named, **changes)
    with contextlib.ExitStack() as opened:
        opened.callback(service.stop)
        loops = {name: EngineLoop(each.engine, each.base.params).start() for name, each in named.items()}
        for loop in loops.values():
            opened.callback(loop.stop)
        service.start(loops)
        app = tinker_app(service, keys=(KEY, OTHER), flags=flags)
        url = opened.enter_context(serving(app, bound_socket("127.0.0.1", port)))
        yield Host(url, service, opened.enter_context(httpx.Client(verify=False, timeout=60)))


def equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
