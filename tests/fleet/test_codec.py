"""What is packed comes out bit for bit, in aligned memory of its own."""

import pickle

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import metrics, tree
from fppo.fleet.codec import BIG, array_of, pack, unpack
from fppo.key import Key

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def there_and_back(value):
    packed, large = pack(value)
    data = pickle.dumps((packed, [array_of(x) for x in large]), 5)
    packed, arrays = pickle.loads(data)
    return unpack(packed, arrays), large


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=5), st.booleans())
def test_trees_of_any_tensors_come_back(kinds, turned):
    drawn = [(Key(i).uniform(torch.arange(1), 125)[0] * 9).to(dtype) for i, (dtype, _) in enumerate(kinds)]
    tensors = [x[: int(np.prod(shape))].reshape(shape) for x, (_, shape) in zip(drawn, kinds, strict=True)]
    tensors = [x.transpose(0, -1) if turned and x.ndim > 1 else x for x in tensors]
    value = {"x": tensors, "n": (1, None, "a"), "m": metrics.mean(0.5), "key": Key(3)}
    found, _ = there_and_back(value)
    assert tree.digest(found) == tree.digest(value)
    assert all(x.data_ptr() % 64 == 0 for x in tree.tensors(found) if x.numel())


def test_large_tensors_travel_by_themselves_and_are_not_copied_on_the_way():
    x = torch.arange(BIG, dtype=torch.int16)
    packed, large = pack({"x": x, "y": x[:3]})
    assert [y.data_ptr() for y in large] == [x.data_ptr()]
    assert len(packed.small) == 6
    arrays = [array_of(y) for y in large]
    assert arrays[0].ctypes.data == x.data_ptr()
    arrays[0].flags.writeable = False  # as what a store hands out
    assert torch.equal(unpack(packed, arrays)["x"], x)
