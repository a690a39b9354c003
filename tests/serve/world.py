"""A server in this process, its engine and its clients, for tests."""

from __future__ import annotations

import asyncio
import contextlib
from functools import cache

import httpx2 as httpx

from fppo import quickstart
from fppo.key import Key
from fppo.rollout.engine import Sampling
from fppo.serve.app import app_of
from fppo.serve.episodes import Episodes
from fppo.serve.loop import EngineLoop
from fppo.serve.openai import router_of
from fppo.serve.service import Bounds, Service, Sources
from fppo.serve.texts import texts_of
from tests.serve.parrot import Parrot, by_key

KEY, MODEL = "secret", "policy"
RIGHT = (b"authorization", f"Bearer {KEY}".encode())  # the header of a request with the key
CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ["find the file with the word lamp in it; list read say which what No again é ü 漢"] * 3


@cache
def tokenizer():
    made = quickstart.bpe_tokenizer(WORDS, size=330)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = CHATML
    return made


END, SIZE = tokenizer().convert_tokens_to_ids("<|im_end|>"), len(tokenizer())


@cache
def texts():
    return texts_of(tokenizer(), vocabulary=len(tokenizer()))


def sampling(**changes):
    return Sampling(**{"max_tokens": 64, "stop_token_ids": (1, END), **changes})


def says(*answers: str, end: bool = True):
    """An engine's answers: these texts, in the order in which requests come."""
    ids = [[*tokenizer().encode(text, add_special_tokens=False), *([END] if end else [])] for text in answers]
    given: dict[str, list[int]] = {}

    def one(request, before):
        return given.setdefault(request.name, ids[min(len(given), len(ids) - 1)])

    return one


class World:
    """The parts of a server, and a client of it."""

    raises = False  # whether errors of the server itself come to its clients

    def __init__(self, engine, *, bounds=None, params=None, on_dropped=lambda name, rows: None, **changes):
        self.engine = engine
        self.bounds = bounds or Bounds(row_tokens=512)
        own = {"texts": texts(), "sampling": sampling(), "key": Key(5), "bounds": self.bounds, "model": MODEL}
        self.sources = Sources(**{**own, **changes})
        self.episodes = Episodes(
            self.bounds.recorded_tokens,
            on_dropped=on_dropped,
            on_forgotten=lambda names: self.service.forget(names),
        )
        self.service = Service(self.sources, self.episodes)
        self.app = app_of([router_of(self.service)], key=KEY, bounds=self.bounds)
        self.loop = EngineLoop(engine, params, version=3, most_waiting=self.bounds.requests)

    def __enter__(self):
        self.service.attach(self.loop.start())
        return self

    def __exit__(self, *_):
        self.loop.stop()

    def client(self, key=KEY):
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=self.raises)
        return httpx.AsyncClient(
            transport=transport, base_url="http://test", headers={"authorization": f"Bearer {key}"}
        )

    def post(self, path, body, **how):
        """The response to a request of its own."""

        async def send():
            async with self.client() as client:
                content = {"content": body} if isinstance(body, bytes) else {"json": body}
                return await client.post(path, **content, **how)

        return asyncio.run(send())


def parrot_world(*answers, **changes):
    return World(Parrot(says(*answers) if answers else by_key(SIZE - 2)), **changes)


def chat(*said, **more):
    """The body of a chat: user and assistant in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)], **more}


def scope_of(path="/x", *, kind="http", headers=(RIGHT,), method="GET"):
    """The scope of a request, as a server makes it."""
    scope = {"type": kind, "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
    return scope | {"headers": [*headers], "http_version": "1.1", "scheme": "http", "root_path": ""}


async def until(condition):
    for _ in range(30_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come to that")


@contextlib.contextmanager
def paused(engine):
    engine.free.clear()
    try:
        yield
    finally:
        engine.free.set()
