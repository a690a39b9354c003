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


class Cuda:
    """CUDA's registry of pinned memory, in its place."""

    def __init__(self):
        self.pinned, self.sizes = {}, []

    def cudaHostRegister(self, pointer, size, flags):
        assert pointer not in self.pinned
        self.pinned[pointer] = size
        self.sizes.append(size)
        return 0

    def cudaHostUnregister(self, pointer):
        del self.pinned[pointer]
        return 0


@pytest.fixture
def cuda(monkeypatch):
    stand_in = Cuda()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: stand_in)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    return stand_in


def test_in_a_process_on_a_gpu_what_is_mapped_is_pinned_once_and_let_go(cuda):
    shared = SharedMemory.make()
    small, larger = tensors_of(1, 5, 1), tensors_of(2, 400, 3)
    for _ in range(3):
        same(shared.get(shared.put(small)), small)
    assert len(cuda.sizes) == 1
    same(shared.get(shared.put(larger)), larger)
    assert list(cuda.pinned.values()) == cuda.sizes[1:] == [os.fstat(shared.file).st_size]
    shared.close()
    assert not cuda.pinned
    forgotten = SharedMemory.make()
    forgotten.put(small)
    del forgotten
    gc.collect()
    assert not cuda.pinned
    assert len(cuda.sizes) == 3
