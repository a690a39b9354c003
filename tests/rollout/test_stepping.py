"""A step that is recorded and replayed gives what the step gives that is computed anew."""

import attrs
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fppo.key import Key
from fppo.rollout import embedded, places, stepping
from fppo.rollout.engine import Ask, Sampling
from fppo_kernels.collectives import Axis
from tests.models.families import make
from tests.rollout.test_embedded import STOPS, engine_of, make_prompts


class Operations(TorchDispatchMode):
    """All that runs inside, to be done again on the same tensors, as a CUDA graph does: no Python of it runs again."""

    def __init__(self):
        super().__init__()
        self.done = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.done.append((func, args, kwargs or {}, out))
        return out

    def again(self):
        for func, args, kwargs, out in self.done:
            new = func(*args, **kwargs)
            for x, y in zip(*(z if isinstance(z, tuple | list) else (z,) for z in (out, new)), strict=True):
                if isinstance(x, torch.Tensor) and x.data_ptr() != y.data_ptr():
                    x.copy_(y)


def by_operations(log):
    def record(run):
        operations, results = Operations(), []

        def replayed():
            if not results:
                with operations:
                    results.append(run())
            else:
                operations.again()
            log.append(len(results[0]))
            return results[0]

        return replayed

    return record


@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral", "qwen3"])
def test_a_recorded_step_is_the_step(name, monkeypatch):
    """Over padding, windows, rows that end, and a cache that grows; what is not yet written holds what may be."""
    log = []
    monkeypatch.setattr(embedded, "_as_it_is", by_operations(log))
    monkeypatch.setattr(places, "CHUNK", 4)
    monkeypatch.setattr(places, "ALIGNED", 3)
    model, params = make(name)
    sampling = Sampling(n=2, max_tokens=34, stop_token_ids=STOPS)
    ask = Ask(make_prompts(seed=4), sampling, Key(5))
    plain, fixed = (engine_of(model, graphs=graphs).generate(params, ask) for graphs in (False, True))
    assert torch.equal(plain.tokens, fixed.tokens)
    assert plain.finish == fixed.finish
    torch.testing.assert_close(fixed.rollout_log_probs, plain.rollout_log_probs, rtol=0, atol=1e-12)
    assert len(set(log)) > 1  # rows left


def test_a_gpu_records_what_can_be_recorded(monkeypatch):
    monkeypatch.setattr(embedded, "as_graphs", lambda device: by_operations([]))
    qwen, gpt, cuda = make("qwen2")[0], make("gpt2")[0], torch.device("cuda")
    decoder = object()
    assert engine_of(qwen)._record(cuda, decoder, Axis()) is not None
    assert engine_of(qwen)._record(torch.device("cpu"), decoder, Axis()) is None
    assert engine_of(qwen, graphs=False)._record(cuda, decoder, Axis()) is None
    assert engine_of(gpt)._record(cuda, None, Axis()) is None
    with pytest.raises(ValueError, match=r"graphs = True: model type 'gpt2' has steps that cannot be recorded"):
        engine_of(gpt, graphs=True)._record(cuda, None, Axis())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_cuda_graphs_give_the_same(dtype):
    model, params = make("qwen2", dtype=torch.float32 if dtype == torch.bfloat16 else dtype)
    model = attrs.evolve(model, compute_dtype=dtype)
    params = {name: x.cuda() for name, x in params.items()}
    ask = Ask(make_prompts(seed=4), Sampling(n=2, max_tokens=200, stop_token_ids=STOPS), Key(5))
    plain, fixed = (engine_of(model, graphs=graphs).generate(params, ask) for graphs in (False, None))
    if dtype == torch.float64:
        assert torch.equal(plain.tokens, fixed.tokens)
        torch.testing.assert_close(fixed.rollout_log_probs, plain.rollout_log_probs, rtol=0, atol=1e-10)
    again = engine_of(model).generate(params, ask)
    assert torch.equal(again.tokens, fixed.tokens)
    assert torch.equal(again.rollout_log_probs, fixed.rollout_log_probs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_16_bits_are_those_of_float32(dtype):
    g = torch.Generator("cuda").manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=g, device="cuda").to(dtype) for shape in ((5, 64), (37, 64), (37,)))
    product = stepping.wide_product(x, weight, bias)
    assert product.dtype == torch.float32
    torch.testing.assert_close(product.double(), x.double() @ weight.double().T + bias.double(), rtol=0, atol=1e-4)
