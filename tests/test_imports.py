"""What a room loads when it is imported: pure functions of tensors need neither transformers nor matplotlib."""

import json
import subprocess
import sys

import pytest

TESTS = {"pytest", "hypothesis"}
HEAVY = {"transformers", "matplotlib", "datasets", "cattrs", "tyro", "rich", "vllm", "ray"}
UNWANTED = {
    "fppo.losses": HEAVY,
    "fppo.advantages": HEAVY,
    "fppo.laws": HEAVY | TESTS,
    "fppo.shapes": HEAVY,
    "fppo_kernels.table": HEAVY | {"fppo"},
    "fppo_kernels.shapes": HEAVY | {"fppo"},
    "fppo_kernels.ulysses": HEAVY | {"fppo"},
    "fppo.rollout.vllm.engine": {"vllm"},
}
# one process imports torch, and each line of rooms is imported in a copy of it; the first without jaxtyping
PROGRAM = """
import importlib, importlib.util, json, os, sys
import torch

def hide():
    sys.modules["jaxtyping"], find = None, importlib.util.find_spec
    importlib.util.find_spec = lambda name, *x: None if name == "jaxtyping" else find(name, *x)

for number, modules in enumerate(sys.argv[1:]):
    if (copy := os.fork()) == 0:
        if number == 0:
            hide()
        for module in modules.split():
            importlib.import_module(module)
        print(json.dumps([modules, sorted({name.partition(".")[0] for name in sys.modules})]), flush=True)
        os._exit(0)
    os.waitpid(copy, 0)
"""
WITHOUT_JAXTYPING = "fppo.losses fppo.advantages fppo.laws fppo_kernels.table"


@pytest.mark.slow
def test_rooms_load_nothing_heavy_and_run_without_jaxtyping():
    """Annotations are plain where jaxtyping is missing: it is for tests."""
    command = [sys.executable, "-c", PROGRAM, WITHOUT_JAXTYPING, *UNWANTED]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    loaded = dict(map(json.loads, printed.splitlines()))
    assert WITHOUT_JAXTYPING in loaded  # else its copy failed
    assert [(module, name) for module in UNWANTED for name in UNWANTED[module].intersection(loaded[module])] == []
