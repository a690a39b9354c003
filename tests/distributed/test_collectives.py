"""Collectives and Ulysses on real gloo processes: bit for bit what the simulated mesh gives."""

import pytest
import torch

from fppo.runtime.simulate import simulate
from fppo_kernels import collectives
from fppo_kernels.attention.sdpa import sdpa
from fppo_kernels.padding import make_lengths
from fppo_kernels.ulysses import gather_sequence, slice_sequence, ulysses
from tests.distributed import processes

CALLS = {
    "all_gather": (collectives.all_gather, {"dim": 1}),
    "reduce_scatter": (collectives.reduce_scatter, {"dim": 1}),
    "all_reduce": (collectives.all_reduce, {}),
    "all_to_all": (collectives.all_to_all, {"split_dim": 1, "concat_dim": 2}),
    "broadcast": (collectives.broadcast, {"source": 1}),
    "permute": (collectives.permute, {"shift": 1}),
}
DTYPES = (torch.float64, torch.bfloat16, torch.int64)


def whole_numbers(*shape: int) -> torch.Tensor:
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(len(shape)))


def collective_results(mesh):
    """The result, and for floating numbers its gradient, of every collective along every axis in every dtype."""
    found = {}
    for axis_name in mesh.axes:
        axis = mesh[axis_name]
        for name, (fn, keywords) in CALLS.items():
            for dtype in DTYPES:
                x = (whole_numbers(3, 4, 2) + axis.rank).to(dtype).requires_grad_(dtype.is_floating_point)
                out = fn(x, axis, **keywords)
                found[axis_name, name, str(dtype)] = out.detach()
                if x.requires_grad:
                    y = (whole_numbers(*out.shape) * (1 + axis.rank)).to(dtype)
                    found[axis_name, name, str(dtype), "gradient"] = torch.autograd.grad((out * y).sum(), x)[0]
    return found


def attention_results(mesh):
    """Ulysses over the last axis: the gathered result and this rank's gradients."""
    axis = mesh["sequence"]
    generator = torch.Generator().manual_seed(1)
    lengths = make_lengths([5, 1, 7, 3])
    leaves = [torch.randn(16, h, 4, generator=generator, dtype=torch.float64).requires_grad_() for h in (8, 2, 2)]
    weights = torch.randn(16, 8, 4, generator=generator, dtype=torch.float64)
    attention = ulysses(sdpa, axis)
    out = gather_sequence(attention(*(slice_sequence(x, axis) for x in leaves), lengths=lengths, scale=0.5), axis)
    return {"result": out.detach(), "shares": torch.autograd.grad((out * weights).sum(), leaves)}


def results(mesh):
    return {"collectives": collective_results(mesh), "attention": attention_results(mesh)}


@pytest.fixture(scope="module", params=[{"sequence": 2}, {"shard": 2, "sequence": 2}], ids=["2", "2x2"])
def both(request):
    """What the ranks of real processes found, and those of a simulated mesh."""
    return processes.run(request.param, results), simulate(request.param, results)


@pytest.mark.slow
def test_collectives_and_their_gradients_are_those_of_the_simulated_mesh(both):
    real, simulated = both
    assert len(real) == len(simulated) > 1
    for a, b in zip(real, simulated, strict=True):
        assert a["collectives"].keys() == b["collectives"].keys()
        for name, expected in b["collectives"].items():
            torch.testing.assert_close(a["collectives"][name], expected, rtol=0, atol=0, msg=str(name))


def test_sharded_attention_is_that_of_one_process(both):
    expected = simulate({}, attention_results)[0]
    for ranks in both:
        attention = [rank["attention"] for rank in ranks]
        replicas = len(attention) // 2
        for found in attention:
            torch.testing.assert_close(found["result"], expected["result"], rtol=1e-12, atol=1e-12)
        for number, grad in enumerate(expected["shares"]):
            total = torch.stack([found["shares"][number] for found in attention]).sum(0) / replicas
            torch.testing.assert_close(total, grad, rtol=1e-12, atol=1e-12)
