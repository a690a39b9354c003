"""What is packed comes out bit for bit, in aligned memory of its own."""

import itertools
import pickle
from typing import ClassVar

import numpy as np
import torch
from hypothesis import example, given
from torch.utils import _pytree as pytree
from torch.utils._pytree import tree_map_only

from fppo import metrics, tree
from fppo.fleet.codec import BIG, CPU, Sent, array_of, bytes_of, pack, tensors_of, tree_of
from fppo.fleet.held import Lease, handles
from fppo.key import Key
from tests.fleet.trees import DTYPES, TREES

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
    return tree_of(packed, tensors_of(packed, arrays, device=device)), large


@given(TREES)
@example({"x": torch.empty(0)})
def test_trees_come_back(value):
    found, _ = there_and_back(value)
    assert pytree.tree_structure(found) == pytree.tree_structure(value)
    assert tree.digest(found) == tree.digest(value)
    tensors = tree.tensors(found)
    assert all(x.data_ptr() % 64 == 0 and x.is_contiguous() for x in tensors if x.numel())
    kept = [x.clone() for x in tensors]
    for place, x in enumerate(tensors):  # which is written into, but no other
        x.fill_(x.new_ones(()))
        assert [y._version for y in tensors[place:]] == [1, *[0] * len(tensors[place + 1 :])]
        assert all(torch.equal(y, z) for y, z in zip(tensors[place + 1 :], kept[place + 1 :], strict=True))


def test_tensors_of_one_shape_come_back_where_they_stood():
    value = [metrics.mean(float(i)) for i in range(9)] + [torch.full((3, 2), i) for i in range(9)]
    value += [torch.full((BIG // 8 - 1,), float(i), dtype=torch.float64) for i in range(3)]
    value += [torch.empty(2, 0), torch.empty(2, 0), Key(3), 1, None, "a"]
    found, _ = there_and_back(value)
    assert tree.digest(found) == tree.digest(value)
    assert pickle.loads(pickle.dumps(pack(value)[0])).bytes.nbytes == sum(x.nbytes for x in tree.tensors(value))


def test_large_tensors_travel_by_themselves_and_are_not_copied_on_the_way():
    x = torch.arange(BIG, dtype=torch.int16)
    packed, large = pack({"x": x, "y": x[:3]})
    assert [y.data_ptr() for y in large] == [x.data_ptr()]
    assert len(packed.bytes) == 6
    arrays = [array_of(y) for y in large]
    assert arrays[0].ctypes.data == x.data_ptr()
    arrays[0].flags.writeable = False  # as what a store hands out
    assert torch.equal(tree_of(packed, tensors_of(packed, arrays))["x"], x)


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


def test_a_tensor_that_was_written_since_is_sent_anew():
    numbers = itertools.count()
    sent = Sent(lambda arrays: [next(numbers) for _ in arrays])
    x, still = torch.zeros(3), torch.ones(3)
    assert sent.refs([x, still]) == [0, 1]
    assert sent.refs([x, still]) == [0, 1]
    x.add_(1.0)
    assert sent.refs([x, still]) == [2, 1]


def test_bytes_are_read_where_they_lie_if_that_is_aligned_and_copied_otherwise():
    """Kernels may round differently on memory that is aligned otherwise than torch's own."""
    whole = torch.arange(256, dtype=torch.uint8).numpy()
    assert whole.ctypes.data % 64 == 0
    for start in (0, 1, 32, 64, 65):
        found = bytes_of(whole[start:])
        assert torch.equal(found, torch.arange(start, 256, dtype=torch.uint8))
        assert found.data_ptr() % 64 == 0
        assert (found.data_ptr() == whole.ctypes.data + start) == (start % 64 == 0)
    assert bytes_of(np.empty(0, np.uint8)).is_contiguous()


def test_a_tensor_counts_as_large_from_the_bytes_on_that_are_said():
    sizes = (BIG - 1, BIG, BIG + 1)
    packed, large = pack([torch.zeros(size, dtype=torch.uint8) for size in sizes])
    assert [len(x) for x in large] == [*sizes[1:]]
    assert [place for place, *_ in packed.large] == [1, 2]
    assert len(packed.bytes) == sizes[0]


def test_a_call_of_a_function_that_stayed_on_the_ranks_is_known_by_its_handle():
    one, two = handles(Lease("group", 1, 7, 2, CPU), 2)
    assert pack((two, (one, 1), {"x": torch.ones(1)}))[0].first == (7, 2, 1)
    assert pack((len, (two,), {}))[0].first is None
