"""Programs in C++ that a wheel brings compiled, for several instruction sets. No torch is imported here.

The folder `_libraries` has `build.json` and a folder of libraries for each level of x86-64. The build hook of the
distribution (`hatch_build.py`) writes both; other installations have no such folder.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

FOLDER = Path(__file__).parent
LIBRARIES = "_libraries"
_HEADERS = ("_numbers.h", "_vectors.h")  # the start of every program
_V2 = frozenset({"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
# what /proc/cpuinfo calls the instructions of each level, and torch the sets that it may use; the best level first.
# Without AVX2 the programs are several times slower than the default kernels.
_LEVELS = MappingProxyType(
    {
        "x86-64-v4": (_V4, ("AVX512",)),
        "x86-64-v3": (_V3, ("AVX512", "AVX2")),
    }
)
LEVELS = tuple(_LEVELS)
NONE = "none are built in"


class Build(NamedTuple):
    """Loaded programs: their level of x86-64, the compiler that built them, and each library by its program's path."""

    level: str
    compiler: str
    libraries: Mapping[str, ctypes.CDLL]

    def __str__(self) -> str:
        return f"built in for {self.level} by {self.compiler}"


def paths() -> list[str]:
    """The paths of all programs, relative to this package."""
    return sorted(file.relative_to(FOLDER).as_posix() for file in FOLDER.rglob("*.cpp"))


def program(path: str) -> str:
    """The whole text of the program at `path`."""
    return "\n".join((FOLDER / name).read_text("utf-8") for name in (*_HEADERS, path))


def file_name(path: str) -> str:
    """The name of the library built from the program at `path` as it is now."""
    digest = hashlib.sha256(program(path).encode()).hexdigest()[:16]
    return f"{path.removesuffix('.cpp').replace('/', '-')}-{digest}.so"


def level_of(flags: Collection[str], capability: str) -> str | None:
    """The best level of x86-64 for a processor with these `flags` (as in /proc/cpuinfo) where torch uses the
    instruction set `capability`; None if there is none."""
    able = (name for name, (needed, sets) in _LEVELS.items() if needed <= {*flags} and capability in sets)
    return next(able, None)


def loaded(folder: Path, torch_version: str, level: str | None) -> Build | str:
    """Load the libraries in `folder` for a level of x86-64, all or none; or say in a phrase why they cannot be used.

    They are used beside the releases of torch for which they were built, whatever follows the "+" of its version, and
    for the programs' present text.
    """
    if not (folder / "build.json").is_file():
        return NONE
    facts = json.loads((folder / "build.json").read_text("utf-8"))
    if torch_version.partition("+")[0] not in facts["torch"]:
        return f"those built in are for torch {', '.join(facts['torch'])}, and this is {torch_version}"
    if level is None:
        return f"those built in are for {' and '.join(LEVELS)}, and this process may use neither"
    files = {path: folder / level / file_name(path) for path in paths()}
    for path, file in files.items():
        if not file.is_file():
            return f"those built in are not of the present {path}"
    try:
        libraries = {path: ctypes.CDLL(str(file)) for path, file in files.items()}
    except OSError as error:
        return f"those built in do not load: {error}"
    return Build(level, facts["compiler"], MappingProxyType(libraries))


def level_here() -> str | None:
    """The level of x86-64 for this process; None if it has none, or is not on Linux."""
    import torch

    try:
        known = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return None
    flags = next((line.partition(":")[2] for line in known if line.startswith("flags")), "")
    return level_of(flags.split(), torch.backends.cpu.get_cpu_capability())


@functools.cache
def here() -> Build | str:
    """Load the programs that are built in and fit this process, or say in a phrase why there are none."""
    if not (FOLDER / LIBRARIES).is_dir():
        return NONE
    import torch  # its OpenMP is the one that the libraries share

    return loaded(FOLDER / LIBRARIES, torch.__version__, level_here())
