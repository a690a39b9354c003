"""What a room loads when it is imported: pure functions of tensors need neither transformers nor matplotlib."""

import json
import subprocess
import sys

import pytest

HEAVY = ("transformers", "matplotlib", "datasets", "cattrs", "tyro", "rich", "vllm", "ray")
MODULES = (
    "fppo.losses",
    "fppo.advantages",
    "fppo.laws",
    "fppo.shapes",
    "fppo_kernels.record",
    "fppo_kernels.shapes",
    "fppo_kernels.ulysses",
)
PROGRAM = "import json, sys, {module}; print(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"


def loaded_by(module: str) -> set[str]:
    command = [sys.executable, "-c", PROGRAM.format(module=module)]
    return set(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


@pytest.mark.parametrize("module", MODULES)
def test_loads_nothing_heavy(module):
    loaded = loaded_by(module)
    assert not loaded & set(HEAVY)
    if module.startswith("fppo_kernels"):
        assert "fppo" not in loaded


def test_losses_and_kernels_run_without_jaxtyping():
    """The annotations are then plain: jaxtyping is for tests."""
    missing = "import sys; sys.modules['jaxtyping'] = None; import importlib.util as u; find = u.find_spec; "
    hide = "u.find_spec = lambda name, *x: None if name == 'jaxtyping' else find(name, *x); "
    program = "import fppo.losses, fppo.advantages, fppo.laws, fppo_kernels.record"
    subprocess.run([sys.executable, "-c", missing + hide + program], check=True)
