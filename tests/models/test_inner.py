"""Kernels inside the layers: their places are known by what modules compute, and what runs there changes no number."""

from collections import Counter
from functools import partial

import attrs
import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from fppo import models, tree
from fppo.grad import value_and_grad
from fppo.models import inner
from fppo.models.inner import OWN, glu_form, inner_of, layer_norm_form, norm_form
from fppo.runtime import fsdp
from fppo.runtime.mesh import Sharding
from fppo.runtime.simulate import simulate
from fppo.steps import Forward, forward_micro_batch
from fppo.steps.sharded import opened
from fppo_kernels import table
from fppo_kernels.padding import make_lengths
from fppo_kernels.table import Kernels
from tests import tiny
from tests.models.families import CONFIGS, make

PLAIN = Kernels.named()
CPP = table.available("rms_norm")["cpp"]
TOKENS = torch.tensor([5, 7, 3, 9, 4, 8, 6])
POSITIONS = torch.tensor([0, 1, 2, 0, 1, 2, 3])
ATTEND = models.packed_attention(PLAIN.attention, make_lengths([3, 4]))
WEIGHTS = torch.linspace(-1, 1, 7 * 16, dtype=torch.float64).view(7, 16)
BATCH = tiny.experience(3, 5)
OPS = ("linear", "rms_norm", "glu")

# calls in a pass of two layers: linear layers, norms, gated activations
CALLS = {
    "llama": (14, 5, 2),
    "llama3-rope": (14, 5, 2),
    "qwen2": (14, 5, 2),
    "qwen3": (14, 9, 2),
    "mistral": (14, 5, 2),
    "gemma2": (14, 9, 2),
    "gemma3": (14, 13, 2),
    "phi3": (8, 5, 2),
    "olmo2": (14, 9, 2),
    "smollm3": (14, 5, 2),
    "gpt2": (8, 0, 0),
    "gpt_neox": (8, 0, 0),
    "opt": (12, 0, 0),
    "qwen3_moe": (8, 9, 0),
    "olmoe": (8, 9, 0),
    "gpt_oss": (8, 5, 0),
    "cohere": (14, 0, 2),
    "granite": (14, 5, 2),
}


def counting(calls, ops=OPS):
    """The model's own computations as kernels that are counted."""

    def counted(op):
        def kernel(*args, **kwargs):
            calls[op] += 1
            return getattr(PLAIN, op)(*args, **kwargs)

        return kernel

    return attrs.evolve(PLAIN, **{op: counted(op) for op in ops})


def hidden(model, params, kernels, **kwargs):
    return models.hidden_states(model, params, TOKENS, POSITIONS, attend=ATTEND, kernels=kernels, **kwargs)


def gradients(model, params, kernels):
    return value_and_grad(lambda p: (hidden(model, p, kernels) * WEIGHTS).sum())(params)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_place_of_a_kernel_is_known_and_computes_the_same(name):
    model, params = make(name)
    calls, ops = Counter(), [op for op, count in zip(OPS, CALLS[name], strict=True) if count]
    actual = gradients(model, params, counting(calls, ops))
    assert tuple(calls[op] for op in OPS) == CALLS[name]
    torch.testing.assert_close(actual, gradients(model, params, PLAIN), rtol=1e-10, atol=1e-10)
    absent = next((op for op in OPS if op not in ops), None)
    if absent is not None:
        with pytest.raises(ValueError, match=f"model type '{model.config.model_type}'.*leave {absent} as it is"):
            hidden(model, params, counting(calls, [absent]))


LAYER_NORMS = {"gpt2": 5, "gpt_neox": 5, "opt": 5, "cohere": 3}


@pytest.mark.parametrize("name", CONFIGS)
def test_norms_by_mean_and_variance_are_known_and_compute_the_same(name):
    model, params = make(name)
    calls = Counter()
    kernels = counting(calls, ["layer_norm"])
    if name not in LAYER_NORMS:
        with pytest.raises(ValueError, match=r"no LayerNorm in .*; leave layer_norm as it is"):
            hidden(model, params, kernels)
        return
    torch.testing.assert_close(gradients(model, params, kernels), gradients(model, params, PLAIN), rtol=1e-9, atol=1e-9)
    assert calls["layer_norm"] == LAYER_NORMS[name]


# norms of a pass that do not follow a sum within a layer
KNOWN = {"llama": 3, "llama3-rope": 3, "qwen2": 3, "qwen3": 7, "mistral": 3}
INSIDE = (*OPS, "add_rms_norm", "rotary")


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_of_llamas_kind_add_and_turn_by_kernels(name):
    model, params = make(name)
    for op in ("add_rms_norm", "rotary") if name in KNOWN else ():
        calls = Counter()
        actual = gradients(model, params, counting(calls, [op]))
        assert calls[op] == 2
        torch.testing.assert_close(actual, gradients(model, params, PLAIN), rtol=1e-10, atol=1e-10)
    if name not in KNOWN:
        with pytest.raises(ValueError, match=r"no layer of Llama's kind in .* for the kernel of rotary; leave"):
            hidden(model, params, counting(Counter(), ["rotary"]))
        return
    calls = Counter()
    actual = gradients(attrs.evolve(model, checkpoint_layers=True), params, counting(calls, INSIDE))
    assert [calls[op] for op in INSIDE] == [28, 2 * KNOWN[name] - 1, 4, 4, 4]  # all but the last norm twice
    torch.testing.assert_close(actual, gradients(model, params, PLAIN), rtol=1e-10, atol=1e-10)


def test_the_models_own_kernels_are_its_own_code():
    model, _ = make("qwen2")
    assert inner_of(PLAIN) == OWN
    assert model.own_skeleton(OWN) is model.skeleton
    seamed = model.own_skeleton(inner_of(counting(Counter())))
    assert seamed is not model.skeleton
    assert all("Seam" not in type(x).__name__ or type(x).__name__ == "LayerSeam" for x in model.skeleton.modules())
    assert {n: x.shape for n, x in seamed.named_parameters()} == {
        n: x.shape for n, x in model.skeleton.named_parameters()
    }


@pytest.mark.skipif(CPP is not None, reason=str(CPP))
def test_programs_in_cpp_inside_the_layers():
    """Each with its gradient; they are not for layers that torch.compile is to run."""
    model, params = make("qwen3")
    kernels = Kernels.named(**dict.fromkeys(("rms_norm", "add_rms_norm", "rotary", "glu"), "cpp"))
    torch.testing.assert_close(
        gradients(model, params, kernels), gradients(model, params, PLAIN), rtol=1e-10, atol=1e-10
    )
    with pytest.raises(ValueError, match=r"kernels in C\+\+ or Triton cannot be compiled"):
        gradients(attrs.evolve(model, compile_layers=True), params, kernels)


def test_the_skeleton_of_a_choice_is_kept():
    model, _ = make("qwen2")
    chosen = inner_of(counting(Counter()))
    assert model.own_skeleton(chosen) is model.own_skeleton(chosen)
    assert model.own_skeleton(inner_of(counting(Counter()))) is not model.own_skeleton(chosen)


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_recomputed_layers_run_on_the_same_kernels(name):
    model, params = make(name, dtype=torch.float32)
    kernels = Kernels.named(linear="onednn")
    again = attrs.evolve(model, checkpoint_layers=True)
    first, second = (gradients(m, params, kernels) for m in (model, again))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, gradients(model, params, PLAIN), rtol=1e-4, atol=1e-4)
    calls = Counter()
    gradients(again, params, counting(calls, ["linear"]))
    assert calls["linear"] == 2 * CALLS[name][0]


def test_layers_that_gather_their_shards_run_on_the_kernels():
    model, params = make("qwen3")
    expected = hidden(model, params, PLAIN)

    def on_rank(mesh):
        calls = Counter()
        ready = opened(fsdp.shard(params, mesh), model, mesh)
        with torch.no_grad():
            found = hidden(model, ready.root, counting(calls), apply_layer=ready.apply_layer)
        return found, calls

    for found, calls in simulate({"shard": 2}, on_rank):
        assert tuple(calls[op] for op in OPS) == CALLS["qwen3"]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["qwen3", "olmo2", "phi3"])
def test_a_model_on_a_tensor_axis_runs_on_the_kernels(name):
    """Blocks, and norms over a width that is cut, are inside of seams of their own."""
    model, params = make(name)
    rows = tree.replace(BATCH, tokens=BATCH.tokens % 8)
    expected = forward_micro_batch(params, rows, forward=Forward(model)).log_probs

    def on_rank(mesh):
        calls, placed = Counter(), models.place(model, mesh)
        own = models.own_params(placed, params, mesh)
        forward = Forward(placed, kernels=counting(calls, INSIDE if name in KNOWN else OPS), mesh=mesh)
        with pytest.raises(ValueError, match="layers on a tensor axis or an expert axis cannot be compiled"):
            forward_micro_batch(own, rows, forward=Forward(attrs.evolve(placed, compile_layers=True), mesh=mesh))
        with torch.no_grad():
            return forward_micro_batch(own, rows, forward=forward).log_probs, calls

    ops = INSIDE if name in KNOWN else OPS
    expected_calls = (14, KNOWN[name], 2, 2, 2) if name in KNOWN else CALLS[name]
    for found, calls in simulate({"tensor": 2}, on_rank):
        assert tuple(calls[op] for op in ops) == expected_calls
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


class Norm(torch.nn.Module):
    def __init__(self, eps=1e-5, offset=0.0, centre=False, ends=False):
        super().__init__()
        self.eps, self.offset, self.centre, self.ends = eps, offset, centre, ends
        self.weight = torch.nn.Parameter(torch.empty(6, device="meta"))

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True) if self.centre else x
        x = x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * (self.weight + self.offset)
        return torch.cat([x[..., :-1], 2 * x[..., -1:]], -1) if self.ends else x


def test_a_norm_is_known_by_what_it_computes():
    assert norm_form(Norm()) == (1e-5, 0.0)
    assert norm_form(Norm(1e-3, 1.0)) == (1e-3, 1.0)
    assert norm_form(Norm(offset=0.5)) is None
    assert norm_form(Norm(centre=True)) is None
    assert norm_form(Norm(ends=True)) is None
    assert norm_form(torch.nn.LayerNorm(6, bias=False, device="meta")) is None


class Block(torch.nn.Module):
    def __init__(self, act=torch.nn.functional.silu, factor=1.0):
        super().__init__()
        self.a, self.b = (torch.nn.Linear(6, 4, bias=False, device="meta") for _ in range(2))
        self.c = torch.nn.Linear(4, 6, device="meta")
        self.act, self.factor = act, factor

    def forward(self, x):
        return self.factor * self.c(self.b(x) * self.act(self.a(x)))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen2", {"glu", "rms_norm", "rotary", "add_rms_norm", "linear"}),
        ("gemma2", {"glu", "rms_norm", "linear"}),
        ("gpt2", {"linear", "layer_norm"}),
    ],
)
def test_what_a_model_has_a_place_for(name, expected):
    skeleton = make(name)[0].skeleton
    assert {op for op in OWN if models.has_place(skeleton, op)} == expected


def test_a_norm_by_mean_and_variance_is_known_by_what_it_computes():
    made = partial(torch.nn.LayerNorm, device="meta")
    for bias in (True, False):
        assert layer_norm_form(made(5, eps=1e-4, bias=bias)).eps == 1e-4
        assert norm_form(made(5, bias=bias)) is None
    others = made((2, 5)), made(5, elementwise_affine=False), torch.nn.GroupNorm(1, 5, device="meta"), Norm()
    assert all(layer_norm_form(module) is None for module in others)


def test_a_gated_activation_is_known_by_what_it_computes():
    assert glu_form(Block()) == ("a", "b", "c", "silu")
    assert glu_form(Block(torch.nn.GELU())) == ("a", "b", "c", "gelu")
    assert glu_form(Block(torch.nn.GELU(approximate="tanh"))) == ("a", "b", "c", "gelu_tanh")
    assert glu_form(Block(torch.nn.functional.relu)) is None
    assert glu_form(Block(factor=1.01)) is None


def as_it_is(graph, inputs):
    return graph


@pytest.fixture
def programs(monkeypatch, request):
    """Layers compiled to torch's own operations, without the C++ compiler: the graphs, which run as they are, or as
    what differentiates them leaves them (`aot_eager`), which takes as long as all else."""
    graphs, run = [], getattr(request, "param", as_it_is)

    def backend(graph, inputs):
        graphs.append(graph)
        return run(graph, inputs)

    torch.compiler.reset()
    monkeypatch.setattr(inner, "needs_compiler", lambda: None)
    monkeypatch.setattr(inner, "compiled_call", lambda: torch.compile(inner._call, dynamic=True, backend=backend))
    yield graphs
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "programs"), [("gemma3", as_it_is), ("gpt2", aot_eager), ("gpt_oss", as_it_is)], indirect=["programs"]
)
def test_compiled_layers_compute_the_same_in_few_programs(programs, name):
    model, params = make(name, dtype=torch.float32)
    compiled = attrs.evolve(model, compile_layers=True)
    expected = gradients(model, params, PLAIN)
    for how in (False, "selective"):
        again = attrs.evolve(compiled, checkpoint_layers=how)
        torch.testing.assert_close(gradients(again, params, PLAIN), expected, rtol=1e-4, atol=1e-4)
    count = len(programs)
    assert count
    models.bind(
        compiled, params, lambda skeleton: models.forward(skeleton, TOKENS[None], POSITIONS[None], attend=ATTEND)
    )
    assert len(programs) == count  # an engine decodes with layers as they are
    for lengths in ([5, 6], [2, 9], [3, 3, 4]):
        tokens, positions = torch.arange(sum(lengths)) + 3, torch.cat([torch.arange(x) for x in lengths])
        attend = models.packed_attention(PLAIN.attention, make_lengths(lengths))
        value_and_grad(
            lambda p, t=tokens, x=positions, a=attend: models.hidden_states(compiled, p, t, x, attend=a).sum()
        )(params)
    assert len(programs) == count


@pytest.mark.slow
def test_compiled_layers_gather_their_shards(programs):
    plain, params = make("qwen3", dtype=torch.float32)
    expected = gradients(plain, params, PLAIN)[1]
    for stage, again in ((3, False), (3, "selective"), (2, False)):
        model = attrs.evolve(plain, compile_layers=True, checkpoint_layers=again)

        def on_rank(mesh, model=model, stage=stage):
            mesh = attrs.evolve(mesh, sharding=Sharding(stage=stage))

            def loss(shards):
                ready = opened(shards, model, mesh)
                return (hidden(model, ready.root, PLAIN, apply_layer=ready.apply_layer) * WEIGHTS).sum()

            return value_and_grad(loss)(fsdp.shard(params, mesh))[1]

        ranks = simulate({"shard": 2}, on_rank)
        for name, grad in expected.items():
            found = torch.cat([rank[name] for rank in ranks])[: len(grad)]
            torch.testing.assert_close(found, 2 * grad, rtol=1e-3, atol=1e-4)  # both ranks have all rows
    assert len(programs) < 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_kernels_of_ones_choice_are_compiled_with_their_layers(programs, name):
    model, params = make(name, dtype=torch.float32)
    kernels = Kernels.named(linear="onednn") if name == "gpt2" else Kernels.named(linear="onednn", rms_norm="torch")
    actual = gradients(attrs.evolve(model, compile_layers=True), params, kernels)
    torch.testing.assert_close(actual, gradients(model, params, PLAIN), rtol=1e-4, atol=1e-4)
    found = "".join(str(graph.graph) for graph in programs)
    assert "fppo_kernels.product" in found or "autograd_function_apply" in found
    assert "linear(" not in found


@pytest.mark.slow
@pytest.mark.skipif(bool(inner.needs_compiler()), reason="torch.compile has no compiler")
def test_compiled_layers_by_the_compiler_itself():
    model, params = make("qwen2", dtype=torch.float32)
    compiled = attrs.evolve(model, compile_layers=True)
    expected = gradients(model, params, PLAIN)
    torch.testing.assert_close(gradients(compiled, params, PLAIN), expected, rtol=1e-4, atol=1e-4)
    double = tree.map(torch.Tensor.double, params)  # not compiled
    torch.testing.assert_close(gradients(compiled, double, PLAIN), gradients(model, double, PLAIN), rtol=0, atol=0)
