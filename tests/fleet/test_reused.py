"""Weights come out of memory that is reused as they went in, and stay what they are when others go in."""

import gc
import os
import resource

import pytest
import torch

from fppo.fleet.codec import CPU, flat, pack, tensors_of, tree_of
from fppo.fleet.shared import Memory


def tensors_of_sizes(seed, *sizes):
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


def put(memory, tensors):
    """What the readers of the memory are sent."""
    packed, large = pack(tensors)
    return packed, [place[1:] for place in memory.put([flat(x) for x in large])]


def get(memory, packed, spans, device=CPU):
    """The tensors, whose large ones are copied by now, as on a device that is none of the host's."""
    arrays = [x.copy() if device != CPU else x for x in memory.get(spans, device)]
    return tree_of(packed, tensors_of(packed, arrays))


@pytest.fixture
def memory():
    return Memory(reused=True)


@pytest.fixture(params=[1 << 15, 0], ids=["large", "small"])
def more(request):
    """Rows beyond a few, with which tensors travel each by itself, or as one array."""
    return request.param


@pytest.mark.parametrize("device", [CPU, torch.device("cuda")])
def test_another_reader_gets_copies_of_what_was_put(memory, more, device):
    other = Memory.at(memory.path)
    first, second = (tensors_of_sizes(seed, *(more + x for x in (5, 1, 3, 7))) for seed in (1, 2))
    larger = tensors_of_sizes(3, *(more + x for x in (400, 3, 2, 9, 5)))
    copies = get(other, *put(memory, first), device)
    same(copies, first)
    same(get(other, *put(memory, second), device), second)
    same(copies, first)
    same(get(other, *put(memory, larger), device), larger)
    same(get(other, *put(memory, first), device), first)
    del other
    same(get(memory, *put(memory, second), device), second)


def test_what_is_put_is_no_longer_the_callers(memory, more):
    params = tensors_of_sizes(1, 4 + more)
    kept = {name: x.clone() for name, x in params.items()}
    places = put(memory, params)
    for x in params.values():
        x.zero_()
    same(get(memory, *places), kept)


def test_memory_that_is_forgotten_is_given_back():
    shared = Memory(reused=True)
    shared.put([torch.ones(9, dtype=torch.uint8)])
    path = shared.path
    assert os.path.exists(path)
    del shared
    gc.collect()
    assert not os.path.exists(path)


def test_transposed_tensors_come_out_as_they_look(memory, more):
    x = torch.arange(12.0 + 3 * more).view(3, 4 + more).T
    same(get(memory, *put(memory, {"x": x})), {"x": x})


def test_want_of_room_is_no_bus_error():
    memory, limits = Memory(reused=True), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            memory.put([torch.ones(1 << 17, dtype=torch.uint8)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


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
    shared = Memory(reused=True)
    small, larger = torch.ones(99, dtype=torch.uint8), torch.arange(250, dtype=torch.uint8).repeat(40)
    for x in (small, small, small, larger, small):
        (place,) = shared.put([x])
        (found,) = shared.get([place[1:]], torch.device("cuda"))
        assert torch.equal(torch.from_numpy(found), x)
        assert list(cuda.pinned.values()) == cuda.sizes[-1:] == [os.fstat(shared.file).st_size]
    assert len(cuda.sizes) == 2
    del shared, place
    gc.collect()
    assert not cuda.pinned
