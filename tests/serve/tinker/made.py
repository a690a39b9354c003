"""Tiny bases and random data of requests."""

import torch

from fppo.serve.tinker.data import Datum
from fppo.serve.tinker.runs import BaseModel
from fppo.steps.micro_batching import MicroBatching
from tests import tiny


def base(dtype=torch.float64, *, size=None, limit=None, model=None, params=None) -> BaseModel:
    """The tiny model of tests, with micro-batches of `size` rows."""
    if model is None:
        model, params = tiny.model_and_params(dtype=dtype)
    cut = MicroBatching(token_budget=10**6) if size is None else MicroBatching(size=size)
    return BaseModel("tiny", model, params, "tiny", limit, micro_batching=cut)


def datum(generator: torch.Generator, *, length=None, width=None, shared=0) -> Datum:
    """A datum with inputs for every loss: about half of its targets count; the first `shared` tokens are always the
    same."""
    g = generator
    count = length or int(torch.randint(1, 9, (), generator=g)) + shared
    shape = (count,) if width is None else (count, width)
    counts = torch.rand(shape, generator=g) < 0.6
    noise = lambda: torch.randn(shape, generator=g)  # noqa: E731
    tokens = torch.randint(0, tiny.VOCAB, (count,), generator=g)
    tokens[:shared] = torch.arange(shared)[:count] % tiny.VOCAB
    inputs = {
        "weights": noise().where(counts, torch.zeros(())),
        "logprobs": noise() * 0.4 - 3.0,
        "advantages": noise().where(counts, torch.zeros(())),
    }
    if width is None:
        inputs |= {"sequence_ratio_mask": counts.float(), "sampled": counts.float()}
    return Datum(tokens, torch.randint(0, tiny.VOCAB, shape, generator=g), inputs)


def data(seed: int, count: int, **given) -> list[Datum]:
    g = torch.Generator().manual_seed(seed)
    return [datum(g, **given) for _ in range(count)]
