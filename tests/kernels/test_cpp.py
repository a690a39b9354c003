"""What the programs in C++ share: `_numbers.h`."""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import fppo_kernels

FOLDER = Path(fppo_kernels.__file__).parent
LOOP = """
extern "C" void each(const float* x, float* out) {
#pragma omp simd
  for (int64_t i = 0; i < 1024; ++i) out[i] = exponential(x[i]);
}
"""


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
