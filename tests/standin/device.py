"""Build and register the device: `npu`, as a plug-in would, which refuses tensors of several devices.

With STANDIN_WITHOUT_FLOAT64 in the environment it has no float64, as Apple's GPUs. A process that imports this has it
for good.
"""

import hashlib
import os
import subprocess
import tempfile
import types
from pathlib import Path

import torch

NAME = "npu"


def _library() -> Path:
    """The compiled program, in the folder for temporary files."""
    source, home = Path(__file__).with_name("device.cpp"), Path(torch.__file__).parent
    digest = hashlib.sha256(torch.__version__.encode() + source.read_bytes()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"fppo-standin-{digest}.so"
    if not library.exists():
        own = library.with_suffix(f".{os.getpid()}")
        include = [f"-I{home / 'include'}", f"-I{home / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
        command = ["g++", "-std=c++20", "-O0", "-fPIC", "-shared", "-w", *include, str(source), "-o", str(own)]
        subprocess.run([*command, f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"], check=True)
        own.replace(library)  # another process may build it, too
    return library


def register() -> None:
    """Register the device in this process."""
    torch.ops.load_library(str(_library()))
    torch.utils.rename_privateuse1_backend(NAME)
    module = types.ModuleType(f"torch.{NAME}")
    vars(module).update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda device=NAME: torch.get_rng_state(),
        set_rng_state=lambda state, device=NAME: None,
    )
    torch._register_device_module(NAME, module)
