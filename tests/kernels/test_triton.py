"""The Triton log-probs keep the laws under Triton's interpreter, and compile for Hopper; their speed needs a GPU."""

import importlib.util
import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from fppo_kernels import table
from fppo_kernels.table import Kernels

INSTALLED = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not INSTALLED, reason="triton is not installed")
CHECKS = (
    *("laws_in_float32", "layers_in_float32", "tile_boundaries", "tensor_descriptors", "split_vocabulary"),
    *("masked_words", "refusals", "mistakes", "layer_refusals", "transforms_of_layers", "writes_within_tensors"),
    *("laws_in_bfloat16", "layers_in_bfloat16"),  # these mend how the interpreter rounds, for good
    "layers_of_other_layouts",  # this changes how many instances there are
)


FIXED_CHECKS = (
    *("laws_of_linear", "laws_of_attention", "laws_of_decode_attention", "laws_of_log_probs"),
    *("rows_of_products", "rows_of_log_probs", "rows_of_layers", "attention_of_any_part", "attention_of_one_token"),
    *("placed_anywhere", "refusals", "probe"),
)


def run(module, *names, interpret):
    """A process of its own: torch and other tests import triton, which looks at the variable when it is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", f"tests.kernels.{module}", *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.slow
@needs_triton
def test_under_the_interpreter():
    assert run("interpreted", *CHECKS, interpret="1").count("held") == len(CHECKS)


@pytest.mark.slow
@needs_triton
def test_kernels_with_fixed_tiles_under_the_interpreter():
    assert run("interpreted_fixed", *FIXED_CHECKS, interpret="1").count("held") == len(FIXED_CHECKS)


@pytest.mark.slow
@needs_triton
def test_compiles_for_hopper():
    found = run("compiled_for_hopper", interpret="0")
    assert found.count("wgmma") == 4, found
    assert found.count(": compiled") == 11, found
    assert found.count(": translated") == 8, found


@needs_triton
@pytest.mark.parametrize(
    ("capability", "kib"), [((8, 0), 163), ((8, 6), 99), ((8, 9), 99), ((9, 0), 227), ((12, 0), 99)]
)
def test_tiles_fit_the_shared_memory(capability, kib, monkeypatch):
    from fppo_kernels.log_probs.triton import choose_tiling

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    for dtype in (torch.bfloat16, torch.float32):
        matrix = SimpleNamespace(
            is_cuda=True,
            dtype=dtype,
            device="cuda",
            shape=(64, 64),
            data_ptr=lambda: 0,
            element_size=partial(int, dtype.itemsize),
        )
        tiling = choose_tiling(matrix, matrix)
        assert tiling.stages * (tiling.tokens + tiling.vocab) * tiling.hidden * dtype.itemsize <= kib * 1024


def test_refuses_where_it_cannot_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if INSTALLED:
        for name in ("triton", "fixed"):
            with pytest.raises(ValueError, match=rf"log_probs/{name} cannot run here: needs CUDA, or TRITON_INTERPRET"):
                Kernels.named(log_probs=name)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find(name))
    assert table.available("log_probs")["triton"] == "triton is not installed: pip install 'fppo[triton]'"


@needs_triton
def test_refuses_tensors_on_a_cpu():
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter takes them")
    kernel = table.BUILTIN["log_probs"]["triton"].load()
    with pytest.raises(ValueError, match="log_probs/chunked runs there"):
        kernel(torch.ones(1, 2), torch.ones(3, 2), torch.zeros(1, dtype=torch.int64))
