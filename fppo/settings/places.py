"""What is wrong with the files and directories that settings name, seen without torch, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from fppo.settings import checks
from fppo.settings.problems import Problems, problem
from fppo.settings.train import TrainSettings

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_CONFIG, _INDEX, _WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
_ROWS = (".jsonl", ".json", ".parquet")


def place_problems(settings: TrainSettings) -> list[str]:
    """Every file and directory that a setting names and that is not there, or not whole. Names of the hub pass."""
    reward = settings.reward
    models = {"model.path": settings.model.path or None, "reward.model.path": reward.model.path}
    models["reward.judge.path"] = reward.judge.path
    if checks.uses_critic(settings):
        models["model.critic_path"] = settings.model.critic_path
    if checks.uses_reference(settings):
        models["model.ref_path"] = settings.model.ref_path
    lines = [line for name, path in models.items() if path is not None for line in _model(name, path)]
    own = settings.model.tokenizer
    place = ("model.path", settings.model.path) if own is None else ("model.tokenizer", own)
    lines += _tokenizer(*place)
    for name in ("path", "eval_path"):
        for path in getattr(settings.data, name):
            lines += _rows(f"data.{name}", path)
    for name in ("chat_template", "tools"):
        path = getattr(settings.data, name)
        lines += [] if path is None else _text(f"data.{name}", path, schemas=name == "tools")
    return lines


def is_local(path: str) -> bool:
    """Whether it can only be a place on this machine, not a name of the hub: `owner/name` may be both."""
    return Path(path).exists() or path.startswith((".", "/", "~")) or path.count("/") > 1


def weights_problem(file: Path) -> str | None:
    """What keeps a file from being a whole one of safetensors, by its header and its size; None if nothing does."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > size - 8:
                return f"{file} is cut off: it has {size:,} bytes; copy or download it again"
            header = json.loads(opened.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{file} is no safetensors file: its header cannot be read; copy or download it again"
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    whole = 8 + length + max(ends, default=0)
    if size != whole:
        kind = "is cut off" if size < whole else "is too long"
        return f"{file} {kind}: it has {size:,} bytes, and its header says {whole:,}; copy or download it again"
    return None


def _model(name: str, path: str) -> Problems:
    directory = Path(path)
    if not is_local(path):
        return
    if not directory.is_dir():
        yield problem(name, path, _missing(directory))
        return
    if (directory / "settings.toml").exists() and not (directory / _CONFIG).exists():
        hint = directory / "model" if (directory / "model").is_dir() else "a directory that fppo export wrote"
        yield problem(name, path, f"is the directory of a run, not of a model; give {hint}")
        return
    if not (directory / _CONFIG).exists():
        yield problem(name, path, f"holds no {_CONFIG}: it is not the directory of a Hugging Face model")
        return
    try:
        json.loads((directory / _CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        yield problem(name, path, f"{_CONFIG} is not JSON: {error}")
    yield from (problem(name, path, text) for text in _weights(directory))


def _weights(directory: Path) -> Iterator[str]:
    index = directory / _INDEX
    files = [file for file in [directory / _WEIGHTS] if file.exists()]
    if index.exists():
        try:
            files = sorted({directory / file for file in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError):
            yield f"{_INDEX} is no index of weights; copy or download it again"
            return
    if not files:
        pickled = sorted(file.name for file in directory.glob("*.bin"))
        advice = "; {} are pickles, which fppo does not open: save the model as safetensors first"
        yield f"holds no {_WEIGHTS}{advice.format(pickled) if pickled else ''}"
    absent = [file.name for file in files if not file.exists()]
    if absent:
        yield f"lacks files that its index names: {absent}"
    yield from (text for file in files if file.exists() and (text := weights_problem(file)))


def _tokenizer(name: str, path: str) -> Problems:
    directory = Path(path)
    if not path or not is_local(path):
        return
    if not directory.is_dir():
        if name != "model.path":  # which is told already
            yield problem(name, path, _missing(directory))
    elif (name != "model.path" or (directory / _CONFIG).exists()) and not any(
        (directory / file).exists() for file in TOKENIZER_FILES
    ):
        advice = "" if name == "model.tokenizer" else "; give one with model.tokenizer"
        yield problem(name, path, f"holds no tokenizer, none of {list(TOKENIZER_FILES)}{advice}")


def _rows(name: str, path: str) -> Problems:
    file = Path(path)
    if (file.suffix.lower() in _ROWS or path.startswith((".", "/", "~"))) and not file.exists():
        yield problem(name, path, _missing(file))


def _text(name: str, path: str, *, schemas: bool) -> Problems:
    try:
        text = Path(path).read_text(encoding="utf-8")
        if schemas and not (isinstance(tools := json.loads(text), list) and all(isinstance(x, dict) for x in tools)):
            yield problem(name, path, "must hold a list of objects, a schema each")
    except OSError:
        yield problem(name, path, _missing(Path(path)))
    except ValueError as error:
        yield problem(name, path, f"is not {'JSON' if schemas else 'text'}: {error}")


def _missing(place: Path) -> str:
    """What is there instead of a place that is not."""
    if str(place).startswith("~"):
        return f"~ is not replaced here; give {place.expanduser()}"
    if place.exists():
        return "is a file, not the directory of a model"
    there = next(parent for parent in (place, *place.absolute().parents) if parent.exists())
    return "there is no such file or directory" if there == place.absolute().parent else f"there is no {place.parent}"
