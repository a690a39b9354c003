"""The work of single operations against counts by hand, and what a GPU's attention holds in its backward pass."""

from __future__ import annotations

import pytest
import torch

from fppo.studies.plan.track import ADAMW_TRAFFIC, Tracker, attention_workspace, work_of


def of(name):
    return getattr(torch.ops.aten, name)


A, B, C = torch.ones(3, 5), torch.ones(5, 7), torch.ones(3, 7)
WIDE = [torch.ones(2, 3, 5), torch.ones(2, 5, 7), torch.ones(2, 3, 7)]
HALF = torch.ones(3, 5, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "inputs", "output", "flops"),
    [
        ("mm.default", [A, B], C, 2 * 3 * 5 * 7),
        ("addmm.default", [torch.ones(7), A, B], C, 2 * 3 * 5 * 7),
        ("bmm.default", WIDE[:2], WIDE[2], 2 * 2 * 3 * 5 * 7),
        ("baddbmm.default", [WIDE[2], *WIDE[:2]], WIDE[2], 2 * 2 * 3 * 5 * 7),
        ("mm.default", [HALF, HALF.T], torch.ones(3, 3, dtype=torch.bfloat16), 2 * 3 * 5 * 3),
    ],
    ids=str,
)
def test_a_product_multiplies_and_adds_each_pair(name, inputs, output, flops):
    op, overload = name.split(".")
    found = work_of(getattr(of(op), overload), inputs, [output], True)
    dtype = "bfloat16" if inputs[0].dtype == torch.bfloat16 else "float32"
    assert found == (f"matmul {dtype}", flops, 0)


def test_other_operations_read_and_write_their_tensors_and_views_do_nothing():
    ones = torch.ones(4, 3)
    assert work_of(of("add").Tensor, [ones, ones], [ones], True) == ("", 0.0, 3 * ones.nbytes)
    assert work_of(of("mul_").Tensor, [ones, ones], [ones], False) == ("", 0.0, 3 * ones.nbytes)  # in place
    assert work_of(of("view").default, [ones], [ones], False) is None
    assert work_of(of("empty_like").default, [ones], [ones], True) is None
    assert work_of(of("ones").default, [], [ones], True) is None
    table, rows = torch.ones(99, 3), torch.zeros(4, dtype=torch.int64)
    for name in ("embedding.default", "index_select.default", "gather.default", "index.Tensor"):
        op, overload = name.split(".")  # of a table the rows that are picked alone
        assert work_of(getattr(of(op), overload), [table, rows], [ones], True) == ("", 0.0, 2 * ones.nbytes)
    params = [torch.ones(8)] * 4
    found = work_of(of("_fused_adamw_").default, params, params, False)
    assert found == ("", 0.0, int(ADAMW_TRAFFIC * 4 * 32))
    assert ADAMW_TRAFFIC * 4 == 4 + 3  # four are read, three written


@pytest.mark.parametrize("keys", [6, 9])
def test_causal_attention_sees_each_pair_once_and_five_times_backward_what_it_is_forward_two(keys):
    """For queries that are the last of their sequence."""
    rows, heads, length, width = 2, 3, 6, 4
    query, key = torch.ones(rows, heads, length, width), torch.ones(rows, heads, keys, width)
    pairs = sum(keys - length + place for place in range(1, length + 1))
    one = 2.0 * rows * heads * width * pairs
    forward, backward = of("_scaled_dot_product_flash_attention"), of("_scaled_dot_product_flash_attention_backward")
    assert work_of(forward.default, [query, key, key], [query], True) == ("attention float32", 2 * one, 0)
    found = work_of(backward.default, [query, query, key, key], [query], True)
    assert found == ("attention float32", 5 * one, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [2, 4])
def test_attention_backward_adds_up_in_float32_and_has_gradients_of_shared_keys_for_each_head(dtype, heads):
    query, key = (torch.ones(1, n, 5, 8, dtype=dtype) for n in (4, heads))
    inputs = [query, query, key, key]
    shared = 0 if heads == 4 else 2 * query.nbytes
    name = "_scaled_dot_product_flash_attention"
    assert attention_workspace(f"{name}_backward", inputs) == 4 * query.numel() + shared
    assert attention_workspace(name, [query, key, key]) == 0
    assert attention_workspace("mm_backward", inputs) == 0


def test_a_trackers_workspace_is_that_of_gpus_alone():
    """Held while the backward pass of attention runs, and no longer."""
    peaks = {}
    for on_gpu in (False, True):
        query = torch.ones(1, 4, 16, 8, requires_grad=True)
        tracker = Tracker(on_gpu=on_gpu)
        with tracker:
            tracker.hold([query])
            torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
        peaks[on_gpu] = {phase.name: max(x.total for x in phase.segments) for phase in tracker.phases()}
        query.grad = None
    backward = next(name for name in peaks[True] if name.startswith("backward"))
    assert peaks[True][backward] > peaks[False][backward]
    others = {name: size for name, size in peaks[True].items() if name != backward}
    assert others.items() <= peaks[False].items()
