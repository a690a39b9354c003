"""Tensors come out of shared memory as they went in, and stay what they are when others go in."""

import gc
import os

import pytest
import torch

from fppo.rollout.shared_memory import SharedMemory


def tensors_of(seed, *sizes):
    generator = torch.Generator().manual_seed(seed)
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool]
    return {
        f"{place}": (torch.randn(size, 3, generator=generator) * 9).to(dtypes[place % len(dtypes)])
        for place, size in enumerate(sizes)
    } | {"none": torch.empty(0), "one": torch.tensor(float(seed))}


def same(copies, expected):
    assert list(copies) == list(expected)
    for name, x in expected.items():
        assert copies[name].dtype == x.dtype
        assert torch.equal(copies[name], x)


@pytest.fixture
def memory():
    shared = SharedMemory.make()
    yield shared
    shared.close()
    shared.close()


def test_another_reader_gets_copies_of_what_was_put(memory):
    other = SharedMemory.at(memory.path)
    first, second, larger = tensors_of(1, 5, 1, 3, 7), tensors_of(2, 5, 1, 3, 7), tensors_of(3, 400, 3, 2, 9, 5)
    copies = other.get(memory.put(first))
    same(copies, first)
    same(other.get(memory.put(second)), second)
    same(copies, first)
    same(other.get(memory.put(larger)), larger)
    same(other.get(memory.put(first)), first)
    other.close()
    same(memory.get(memory.put(second)), second)


def test_what_is_put_is_no_longer_the_callers(memory):
    params = tensors_of(1, 4)
    kept = {name: x.clone() for name, x in params.items()}
    places = memory.put(params)
    for x in params.values():
        x.zero_()
    same(memory.get(places), kept)


def test_memory_that_is_forgotten_is_given_back():
    shared = SharedMemory.make()
    shared.put(tensors_of(1, 4))
    path = shared.path
    assert os.path.exists(path)
    del shared
    gc.collect()
    assert not os.path.exists(path)


def test_transposed_tensors_come_out_as_they_look(memory):
    x = torch.arange(12.0).view(3, 4).T
    same(memory.get(memory.put({"x": x})), {"x": x})
