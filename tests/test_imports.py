"""What a room loads when it is imported: pure functions of tensors need neither transformers nor matplotlib."""

import json
import subprocess
import sys

TESTS = {"pytest", "hypothesis"}
HEAVY = {"transformers", "matplotlib", "datasets", "cattrs", "tyro", "rich", "vllm", "ray"}
UNWANTED = {
    "fppo.losses": HEAVY,
    "fppo.advantages": HEAVY,
    "fppo.laws": HEAVY | TESTS,
    "fppo.shapes": HEAVY,
    "fppo_kernels.record": HEAVY | {"fppo"},
    "fppo_kernels.shapes": HEAVY | {"fppo"},
    "fppo_kernels.ulysses": HEAVY | {"fppo"},
    "fppo.rollout.vllm.engine": {"vllm"},
}
# one process imports torch, and each room is imported in a copy of it
PROGRAM = """
import importlib, json, os, sys
import torch

for module in sys.argv[1:]:
    if (copy := os.fork()) == 0:
        importlib.import_module(module)
        print(json.dumps([module, sorted({name.partition(".")[0] for name in sys.modules})]), flush=True)
        os._exit(0)
    os.waitpid(copy, 0)
"""


def test_rooms_load_nothing_heavy():
    command = [sys.executable, "-c", PROGRAM, *UNWANTED]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    loaded = dict(map(json.loads, printed.splitlines()))
    assert [(module, name) for module in UNWANTED for name in UNWANTED[module].intersection(loaded[module])] == []


def test_losses_and_kernels_run_without_jaxtyping():
    """The annotations are then plain: jaxtyping is for tests."""
    missing = "import sys; sys.modules['jaxtyping'] = None; import importlib.util as u; find = u.find_spec; "
    hide = "u.find_spec = lambda name, *x: None if name == 'jaxtyping' else find(name, *x); "
    program = "import fppo.losses, fppo.advantages, fppo.laws, fppo_kernels.record"
    subprocess.run([sys.executable, "-c", missing + hide + program], check=True)
