"""The safetensors files of a model's directory, chosen as transformers chooses them. No torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
NAMED = "transformers_weights"  # the key of config.json that names another file, or another index


def weight_files(directory: Path) -> list[Path]:
    """The files of a model's weights, sorted; [] for none.

    They are those that config.json names as "transformers_weights"; else model.safetensors, even next to an index,
    which an earlier save may have left; else the files of the index, which may not exist. Raises ValueError for an
    invalid index, and for a name outside the directory.
    """
    named = _named(directory)
    if named is not None and not named.endswith(".json"):
        return [directory / named]
    if named is None and (directory / WEIGHTS).exists():
        return [directory / WEIGHTS]
    index = directory / (named or INDEX)
    return sorted({index.parent / file for file in weight_map(index).values()}) if named or index.exists() else []


def no_weights(directory: Path) -> str:
    """Describe the problem of a directory without weights, and what to do with the files that are there."""
    text = f"holds no {WEIGHTS}"
    if pickled := sorted(file.name for file in directory.glob("*.bin")):
        text += f"; {pickled} are pickles, which fppo does not open: save the model as safetensors first"
    if packed := sorted(file.name for file in directory.glob("*.gguf")):
        text += f"; to train {packed[0]}, give the path of that file"
    return text


def weight_map(index: Path) -> dict[str, str]:
    """The files of an index by the names of their tensors. Raises ValueError for an invalid index."""
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            raise TypeError(f"weight_map is a {type(files).__name__}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{index.name} is not an index of weights; copy or download it again") from error
    return files


def _named(directory: Path) -> str | None:
    """The file that config.json names, or None. Raises ValueError for one outside the directory."""
    try:
        config: Any = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # reported where the config is read
        return None
    name = config.get(NAMED) if isinstance(config, dict) else None
    if name is None:
        return None
    if not isinstance(name, str) or os.path.isabs(name) or os.path.normpath(name).startswith(os.pardir):
        raise ValueError(f"{CONFIG} names {name!r} as {NAMED}, which is not a file in {directory}")
    return name
