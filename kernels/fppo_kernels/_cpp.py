# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Programs in C++: those that are built in, or else compiled when they are first called, by the compiler and into the
cache of torch.compile."""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from fppo_kernels import prebuilt

_BEGUN, _DONE = "begun", "done"
_PATIENCE = 600.0  # seconds that another process may take to compile a program


@functools.cache
def _library(path: str) -> ctypes.CDLL:
    """Load the compiled program of a file, compiling it unless it is built in or cached. Two processes that need it
    compile it once.

    A process that is killed while it compiles may leave half a library, which crashes every process that loads it. So a
    marker file beside the cache records the beginning and the end of a build. A build that has begun, but has not
    ended, is repeated under another name.
    """
    if isinstance(built := prebuilt.here(), prebuilt.Build):
        return built.libraries[path]
    from filelock import FileLock
    from torch._inductor.codecache import CppCodeCache  # here: the import takes a second, and nothing else needs it
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    program = prebuilt.program(path)
    name = hashlib.sha256(f"{torch.__version__}\n{program}".encode()).hexdigest()[:32]
    note = Path(cache_dir()) / "fppo" / name
    note.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{note}.lock", timeout=_PATIENCE):
        number, state = note.read_text("utf-8").split() if note.exists() else ("0", "new")
        attempt = int(number) + (state == _BEGUN)
        if state != _DONE:
            note.write_text(f"{attempt} {_BEGUN}", "utf-8")
        library = CppCodeCache.load(f"{program}\n// {attempt}\n" if attempt else program)
        if state != _DONE:
            note.write_text(f"{attempt} {_DONE}", "utf-8")
    return library


@functools.cache
def failure() -> str | None:
    """Load all programs, compiling them unless they are built in or cached, which takes seconds. Returns the reason
    for a failure in one line, or None."""
    for path in prebuilt.paths():
        try:
            _library(path)
        except Exception as error:  # errors of the compiler, the cache's folder, the loader
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            said = next((line for line in lines if "error:" in line), lines[0] if lines else "")
            return f"{path} does not compile here: {type(error).__name__}: {said[:200]}"
    return None


@functools.cache
def _function(path: str, name: str, kinds: tuple[type, ...]) -> Callable[..., None]:
    fn = _library(path)[name]
    types = {int: ctypes.c_int64, float: ctypes.c_double}  # tensors are passed as pointers
    fn.restype, fn.argtypes = None, [*(types.get(kind, ctypes.c_void_p) for kind in kinds), ctypes.c_int64]
    return fn


def call(path: str, name: str, *arguments: Tensor | int | float | None) -> None:
    """Call a C++ function of a file of this package.

    Contiguous CPU tensors are passed as pointers (null for None), integers as int64_t, other numbers as double, and the
    number of threads last.
    """
    values: list[int | float | None] = []
    for x in arguments:
        if isinstance(x, Tensor):
            assert x.is_cpu
            assert x.is_contiguous()
            values.append(x.data_ptr())
        else:
            values.append(x)
    _function(path, name, tuple(map(type, arguments)))(*values, torch.get_num_threads())


def check_shape(name: str, x: Tensor | None, *shape: int) -> None:
    """Raise ValueError for a tensor of another shape than a function in C++ reads, which knows no end of its memory."""
    if x is not None and x.shape != shape:
        raise ValueError(f"{name} must have the shape {shape}, got {tuple(x.shape)}")


KINDS: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}
)


def kind_of(*tensors: Tensor) -> str:
    """The dtype suffix of C++ function names for these CPU tensors. Raises ValueError for unsupported tensors."""
    first = tensors[0].dtype
    if first not in KINDS or not all(x.is_cpu and x.dtype == first for x in tensors):
        kinds = ", ".join(f"{str(x.dtype).removeprefix('torch.')} on {x.device}" for x in tensors)
        raise ValueError(f"kernels in C++ take float32, float64 or bfloat16, of one dtype and on the CPU, got {kinds}")
    return KINDS[first]
