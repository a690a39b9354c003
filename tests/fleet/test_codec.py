"""What is packed comes out bit for bit, in aligned memory of its own."""

import pickle
from typing import ClassVar

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_map_only

from fppo import metrics, tree
from fppo.fleet.codec import BIG, CPU, array_of, pack, unpack
from fppo.key import Key

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


META = torch.device("meta")


class Elsewhere(torch.Tensor):
    """A stand-in for a tensor on a device that is not the host; `came` has the shapes of those that came back."""

    came: ClassVar[list] = []

    @staticmethod
    def __new__(cls, x):
        made = torch.Tensor._make_wrapper_subclass(cls, x.shape, strides=x.stride(), dtype=x.dtype, device=META)
        made.inner = x
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        inner = tree_map_only(Elsewhere, lambda x: x.inner, args)
        assert all(isinstance(x, Elsewhere) for x in tree.tensors(args)), "tensors of two devices"
        found = func(*inner, **{name: x for name, x in (kwargs or {}).items() if name != "device"})
        if (kwargs or {}).get("device") == torch.device("cpu"):
            cls.came.append(tuple(found.shape))
            return found
        return tree_map_only(torch.Tensor, cls, found)


def there_and_back(value, device=CPU):
    packed, large = pack(value)
    data = pickle.dumps((packed, [array_of(x) for x in large]), 5)
    packed, arrays = pickle.loads(data)
    return unpack(packed, arrays, device=device), large


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


def test_tensors_arrive_on_the_device_that_is_asked_for():
    value = {"x": torch.zeros(BIG, dtype=torch.int16), "y": [torch.ones(3), torch.ones((), dtype=torch.bool)], "n": 1}
    found, _ = there_and_back(value, META)
    kinds = [(x.device, x.dtype, x.shape) for x in tree.tensors(found)]
    assert kinds == [(META, x.dtype, x.shape) for x in tree.tensors(value)]


def test_small_tensors_of_a_device_come_in_one_copy():
    tensors = [torch.arange(i + 1).to(dtype) for i, dtype in enumerate(DTYPES)]
    away = [x if i % 3 == 1 else Elsewhere(x) for i, x in enumerate(tensors)]
    big = torch.arange(BIG)
    Elsewhere.came.clear()
    found, _ = there_and_back([*away, Elsewhere(big)])
    assert tree.digest(found) == tree.digest([*tensors, big])
    assert len(Elsewhere.came) == 2
