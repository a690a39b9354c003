"""The embedded engine on a tensor axis draws what one process draws, and no rank has whole weights, keys or values."""

import attrs
import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fppo import models
from fppo.key import Key
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.spread import SpreadEngine
from fppo.runtime.mesh import Sharding
from fppo.runtime.simulate import simulate
from tests.models.families import make
from tests.rollout.test_embedded import KERNELS, PAD, STOPS, engine_of, make_prompts

PLAIN = Sampling(n=2, max_tokens=6, stop_token_ids=STOPS)
CUT = Sampling(temperature=0.8, top_k=20, top_p=0.9, max_tokens=4)


class Shapes(TorchDispatchMode):
    """The shapes of all that is computed or gathered, and their dtypes."""

    def __init__(self):
        super().__init__()
        self.seen, self.kinds = set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.seen |= {tuple(x.shape) for x in tensors}
        self.kinds |= {(tuple(x.shape), x.dtype) for x in tensors if not x.is_meta}
        return out


def on_ranks(model, params, axes, ask, **changes):
    """Each rank's rollout, the rows that it reported, and the shapes of what it computed."""

    def on_rank(mesh):
        mesh = attrs.evolve(mesh, sharding=Sharding())
        placed = models.place(model, mesh)
        own, reported = models.own_params(placed, params, mesh), {}
        engine = attrs.evolve(engine_of(placed, mesh=mesh), **changes)
        spread = SpreadEngine(engine=engine, mesh=mesh, pad_token_id=PAD, together=engine.together)
        asked = attrs.evolve(ask, on_finished=lambda row, tokens, finish: reported.update({row: (tokens, finish)}))
        with Shapes() as shapes:
            rollout = spread.generate(own, asked)
        return rollout, reported, shapes.seen

    return simulate(axes, on_rank)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes", "sampling"),
    [
        ("qwen2", {"tensor": 4}, PLAIN),  # of 2 key heads
        ("llama", {"shard": 2, "tensor": 2}, CUT),
        ("qwen3", {"pipeline": 2, "tensor": 2}, PLAIN),
        pytest.param("mistral", {"tensor": 2}, CUT, marks=pytest.mark.slow),
        pytest.param("gemma2", {"replicate": 2, "tensor": 2}, PLAIN, marks=pytest.mark.slow),
        ("olmo2", {"tensor": 4}, CUT),
        pytest.param("gpt_oss", {"tensor": 2}, PLAIN, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {"tensor": 2}, attrs.evolve(PLAIN, greedy=True), marks=pytest.mark.slow),
    ],
)
def test_ranks_of_a_tensor_axis_draw_together_what_one_process_draws(name, axes, sampling):
    model, params = make(name)
    ask = Ask(make_prompts(), sampling, Key(3))
    expected = engine_of(model).generate(params, ask)
    heads = set[int]()

    def decodes(query, keys, values, *given, **keywords):
        heads.update((keys.shape[1], values.shape[1]))
        return KERNELS.decode_attention(query, keys, values, *given, **keywords)

    ranks = on_ranks(model, params, axes, ask, kernels=attrs.evolve(KERNELS, decode_attention=decodes))
    assert heads == {max(1, 2 // axes["tensor"])}
    for rollout, _, seen in ranks:
        assert torch.equal(rollout.tokens, expected.tokens)
        assert rollout.finish == expected.finish
        for column in ("rollout_log_probs", "sampling_log_probs"):
            torch.testing.assert_close(getattr(rollout, column), getattr(expected, column), rtol=0, atol=1e-10)
        assert (31, 16) not in seen
        if not sampling.top_k:  # else the likeliest of all are looked at, here 31
            assert not any(shape[-1:] == (31,) and len(shape) == 2 for shape in seen)
    rows = [row for _, reported, _ in ranks for row in reported]
    assert sorted(rows) == list(range(6 * sampling.n))
    for _, reported, _ in ranks:
        for row, (tokens, finish) in reported.items():
            own = expected.response_mask[row]
            assert (expected.tokens[row, -len(own) :][own].tolist(), expected.finish[row]) == (tokens, finish)


@pytest.mark.slow
def test_waves_and_ranks_without_prompts():
    """The bound of one rank's bytes is of its part of a row: 2 layers of keys and values of one head, 9 x 4 numbers."""
    model, params = make("qwen2")
    ask = Ask(make_prompts((4, 7)), Sampling(max_tokens=2), Key(3))
    expected = engine_of(model).generate(params, ask)
    for rollout, *_ in on_ranks(model, params, {"replicate": 2, "tensor": 2}, ask, cache_bytes=2 * 2 * 9 * 4 * 8):
        assert torch.equal(rollout.tokens, expected.tokens)
        torch.testing.assert_close(rollout.rollout_log_probs, expected.rollout_log_probs, rtol=0, atol=1e-10)


def test_weights_are_gathered_in_the_compute_dtype():
    """A rank has no wide copy of a whole weight beside the one that it computes with, and draws what one process
    draws, bit for bit."""
    model, params = make("llama", dtype=torch.float32, compute_dtype=torch.bfloat16)
    ask = Ask(make_prompts(), PLAIN, Key(3))
    expected = engine_of(model).generate(params, ask)

    def on_rank(mesh):
        mesh = attrs.evolve(mesh, sharding=Sharding())
        placed = models.place(model, mesh)
        own = models.own_params(placed, params, mesh)
        with Shapes() as shapes:
            return engine_of(placed, mesh=mesh).generate(own, ask), shapes.kinds

    matrices = {tuple(x.shape) for name, x in params.items() if "mlp" in name}  # the head is wide
    for rollout, kinds in simulate({"shard": 2}, on_rank):
        assert torch.equal(rollout.tokens, expected.tokens)
        assert torch.equal(rollout.rollout_log_probs, expected.rollout_log_probs)
        assert not kinds & {(shape, torch.float32) for shape in matrices}
        assert kinds >= {(shape, torch.bfloat16) for shape in matrices}
