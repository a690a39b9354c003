"""Write and read safetensors files tensor by tensor, with one tensor in memory at a time."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from fppo._errors import json_of


@contextlib.contextmanager
def written(
    path: Path, like: Mapping[str, Tensor], *, metadata: Mapping[str, str]
) -> Iterator[Callable[[str, Tensor], None]]:
    """A context with a function that writes a named tensor to the file, in any order.

    `like` has the dtypes and shapes of all tensors, and may be on meta. The file is byte for byte that of
    `safetensors.torch.save_file`. Raises ValueError for a tensor of another dtype or shape, and at the end for a
    missing one.
    """
    header, places = _laid_out(like, metadata)
    left = set(like)
    with open(path, "wb") as file:
        file.write(header)

        def write(name: str, x: Tensor) -> None:
            if (x.dtype, x.shape) != (like[name].dtype, like[name].shape):
                raise ValueError(
                    f"{name} is {x.dtype} {list(x.shape)}, not {like[name].dtype} {list(like[name].shape)}"
                )
            file.seek(places[name])
            file.write(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
            left.discard(name)

        yield write
        if left:
            raise ValueError(f"{path.name} lacks {sorted(left)}")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Callable[[str, torch.dtype], Tensor]]:
    """A context with a function that reads a named tensor of the file, which must have the given dtype, into fresh
    memory.

    The library's reader maps the whole file, which counts against a process's memory limit. Raises ValueError, KeyError
    or TypeError for another kind of file, a truncated one, and a missing tensor.
    """
    with open(path, "rb") as file:
        whole, size = path.stat().st_size, 8 + int.from_bytes(file.read(8), "little")
        if size > whole:
            raise ValueError(f"{path.name} is cut short, or not a safetensors file")
        about = json_of(file.read(size - 8))

        def read(name: str, dtype: torch.dtype) -> Tensor:
            shape, (start, end) = about[name]["shape"], about[name]["data_offsets"]
            if (
                not 0 <= start <= start + math.prod(shape) * dtype.itemsize == end <= whole - size
                or min(shape, default=0) < 0
            ):
                raise ValueError(f"{name} in {path.name} is cut short, or not {dtype}")
            x = torch.empty(shape, dtype=dtype)
            file.seek(size + start)
            file.readinto(x.view(-1).view(torch.uint8).numpy().data)
            return x

        yield read


def _laid_out(like: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The header of a file with tensors like those of `like`, and the offset of each."""
    empty = safetensors.torch.save({name: torch.empty(0, dtype=x.dtype) for name, x in like.items()}, dict(metadata))
    about = json_of(empty[8 : 8 + int.from_bytes(empty[:8], "little")])  # in the library's order, with its dtypes
    starts, end = dict[str, int](), 0
    for name in (name for name in about if name in like):
        starts[name], end = end, end + like[name].numel() * like[name].element_size()
        about[name] |= {"shape": list(like[name].shape), "data_offsets": [starts[name], end]}
    text = json.dumps(about, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + start for name, start in starts.items()}
