"""What the programs in C++ share: `_numbers.h`."""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch._inductor import codecache

import fppo_kernels
from fppo_kernels import _cpp, table
from fppo_kernels.padding import make_lengths
from fppo_kernels.table import needs_cpp

FOLDER = Path(fppo_kernels.__file__).parent
LOOP = """
extern "C" void each(const float* x, float* out) {
#pragma omp simd
  for (int64_t i = 0; i < 1024; ++i) out[i] = exponential(x[i]);
}
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("g++"), reason="needs g++ for x86")
@pytest.mark.parametrize("processor", ["-mavx2", "-mavx512f"])
def test_exponentials_of_numbers_in_a_row_are_computed_together(processor, tmp_path):
    """By processors with masks (AVX-512) and by those without, which take no branch together."""
    program = (FOLDER / "_numbers.h").read_text("utf-8") + LOOP
    flags = ["-O3", "-fno-tree-loop-vectorize", "-ffp-contract=off", "-fopenmp-simd", "-std=c++20"]  # as inductor's
    command = ["g++", *flags, processor, "-mfma", "-S", "-x", "c++", "-o", "-", "-"]
    listing = subprocess.run(command, input=program, capture_output=True, text=True, check=True).stdout
    body = listing.partition("each:")[2]
    assert re.search(r"\bvfmadd\d+ps\b", body)
    assert not re.search(r"\bvfmadd\d+ss\b", body)


def test_a_program_whose_build_was_cut_off_is_built_again_and_what_fails_is_one_line(tmp_path, monkeypatch):
    programs: list[str] = []

    def load(program):
        programs.append(program)
        if cut_off:
            raise KeyboardInterrupt
        if "turn_##NAME" in program and not spared:
            raise RuntimeError("C++ compile error\n\nCommand:\ng++ x\n\nx.cpp:3:1: error: no such thing\nnote: y")
        return len(programs)

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(codecache.CppCodeCache, "load", load)
    library, cut_off, spared = _cpp._library.__wrapped__, True, False
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            library("glu/_numbers.cpp")
    cut_off = False
    assert [library("glu/_numbers.cpp") for _ in range(2)] == [3, 4]
    first, second, third, again = programs
    assert len({first, second, third}) == 3  # half a file of one is not loaded by the next
    assert third == again
    monkeypatch.setattr(_cpp, "_library", library)
    said = "rotary/_heads.cpp does not compile here: RuntimeError: x.cpp:3:1: error: no such thing"
    assert _cpp.failure.__wrapped__() == said
    spared = True
    assert _cpp.failure.__wrapped__() is None
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(FOLDER / "shared.py"))
    assert "attention/_sequences.cpp does not compile here: FileExistsError" in str(_cpp.failure.__wrapped__())


@pytest.fixture
def threads():
    yield torch.set_num_threads
    torch.set_num_threads(1)


@pytest.mark.skipif(needs_cpp() is not None, reason="needs a C++ compiler")
def test_threads_share_the_work_of_attention_and_change_no_bit(threads):
    generator = torch.Generator().manual_seed(0)
    sizes, results = (70, 3, 41, 1), []
    packed = [torch.randn(sum(sizes), heads, 40, generator=generator).requires_grad_() for heads in (4, 2, 2)]
    cache = [torch.randn(5, *shape, 40, generator=generator) for shape in ((4,), (2, 9), (2, 9))]
    for count in (1, 3):
        threads(count)
        out = table.get("attention", "cpp")(*packed, lengths=make_lengths(sizes), scale=0.2)
        slopes = torch.autograd.grad(out.square().sum(), packed)
        results.append((out, *slopes, table.get("decode_attention", "cpp")(*cache, start=2, end=8, scale=0.2)))
    assert all(torch.equal(one, three) for one, three in zip(*results, strict=True))


@pytest.mark.skipif(needs_cpp() is not None, reason="needs a C++ compiler")
@pytest.mark.parametrize("count", [4095, 4096, 13_001])
def test_threads_share_the_numbers_of_a_gated_activation(count):
    """Each takes some thousands at a time."""
    generator, found = torch.Generator().manual_seed(0), []
    gate, up, slope = torch.randn(3, count, generator=generator)
    for name in ("eager", "cpp"):
        inputs = [x.clone().requires_grad_() for x in (gate, up)]
        out = table.get("glu", name)(*inputs, activation="silu")
        found.append((out.detach(), *torch.autograd.grad(out, inputs, slope)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def _drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


X, CACHE, ONE = _drawn(2, 8), _drawn(2, 1, 5, 8), {"lengths": make_lengths([6]), "scale": 1.0}
SPAN = {"start": 0, "end": 5, "scale": 1.0}
WRONG = {
    "rms_norm": ((X, X[0, :4]), {"eps": 1e-6}, "weight"),
    "add_rms_norm": ((X, X[:1], X[0]), {"eps": 1e-6}, "residual"),
    "glu": ((X, X[:1]), {}, "up"),
    "rotary": ((_drawn(2, 3, 8), _drawn(1, 3, 8), X, X), {}, "key"),
    "rotary, angles": ((_drawn(2, 3, 8), _drawn(2, 3, 8), X[:, :4], X[:, :4]), {}, "cos"),
    "decode_attention": ((_drawn(2, 4, 8), CACHE[:1], CACHE[:1]), SPAN, "query"),
    "decode_attention, keys": ((_drawn(2, 4, 8), CACHE[..., :4], CACHE), SPAN, "keys"),
    "decode_attention, heads": ((_drawn(2, 3, 8), _drawn(2, 2, 5, 8), _drawn(2, 2, 5, 8)), SPAN, "query"),
    "decode_attention, bias": ((_drawn(2, 4, 8), CACHE, CACHE, _drawn(2, 4)), SPAN, "bias"),
    "decode_attention, end": ((_drawn(2, 4, 8), CACHE, CACHE), {**SPAN, "end": 6}, "end = 6"),
    "attention": ((_drawn(4, 2, 8), _drawn(4, 1, 8), _drawn(4, 1, 8)), ONE, "query"),
    "attention, keys": ((_drawn(6, 2, 8), _drawn(3, 1, 8), _drawn(3, 1, 8)), ONE, "key"),
    "attention, values": ((_drawn(6, 2, 8), _drawn(6, 1, 8), _drawn(5, 1, 8)), ONE, "value"),
    "log_probs": ((_drawn(6, 8), _drawn(9, 8), torch.zeros(5, dtype=torch.int64)), {}, "labels"),
    "log_probs, bias": ((X, _drawn(9, 8), torch.zeros(2, dtype=torch.int64)), {"bias": X[0]}, "bias"),
    "gae": ((X, X, torch.ones(2, 16, dtype=torch.bool)), {}, "mask"),
    "gae, values": ((X, X[:, :1], X > 9), {}, "values"),
    "gae, mask": ((X, X, torch.ones(2, 8, dtype=torch.int64)), {}, "mask must be bool"),
}


@pytest.mark.usefixtures("unhooked")
@pytest.mark.skipif(needs_cpp() is not None, reason="needs a C++ compiler")
@pytest.mark.parametrize("name", WRONG)
def test_a_tensor_of_another_size_is_named_before_memory_beyond_it_is_read(name):
    tensors, options, said = WRONG[name]
    with pytest.raises(ValueError, match=said):
        table.get(name.partition(",")[0], "cpp")(*tensors, **options)
