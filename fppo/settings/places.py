"""Checks of the files and directories that settings name, and of their contents: without torch and without the
tokenizers' library, before anything is loaded."""

from __future__ import annotations

import math
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import attrs

from fppo._errors import json_of, printable
from fppo.data.examples import Answers, check_fields, example_of
from fppo.data.plain import half_pairs, irregular
from fppo.data.problems import Problems as RowProblems
from fppo.data.problems import lines_of
from fppo.data.read import FORMATS, read_rows
from fppo.fields import Problem, Problems, only, problem_of, wrong_values
from fppo.runtime.exports import check_replaceable
from fppo.runtime.gguf_files import GgufHeader, gguf_of, read_header
from fppo.runtime.remote import check_address, problem_of_place
from fppo.runtime.weights import no_weights, weight_files
from fppo.settings import files
from fppo.settings.model import whole_teachers
from fppo.settings.train import TrainSettings

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
MODEL = "model"  # where in its output_dir a run exports its policy
_DIRECTORIES = (  # what commands write to an output_dir
    *(MODEL, files.STARTS, "checkpoints", "configs", "samples", "evaluations", "truth", "rollouts", "dumps"),
    *("profiles", "memory", "trace", "tensorboard", "wandb", "swanlog"),
)
_FILES = (  # what they write beside these
    *(files.SETTINGS, "metrics.jsonl", "digests.jsonl", "wandb_id", "trackio_id", "mlflow_id", "swanlab_id"),
    *("report.html", "curves.png", "trace.json", f"{files.SETTINGS}.kept", "metrics.jsonl.damaged"),
    "digests.jsonl.damaged",
)
OUTPUTS = (*_DIRECTORIES, *_FILES)
_MARKS = ("starts/step_*.toml", "checkpoints/step_*", "rollouts/step_*", "metrics.jsonl")  # of these a run has one
_BESIDE = (".toml", ".log", ".out", ".err")  # what may stand there before: settings, and what a shell writes
_NO_PLACE = "is no directory, or a link that leads to none"
_CONFIG = "config.json"
NO_TEMPLATE = "its tokenizer has no chat template, which chat = true needs; use a chat model, or set it to false"
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
_MOST_BYTES = 32 << 20  # of rows that are all looked at: reading takes time
_FIRST = 1000  # rows that are looked at of more
_LONGEST = 255  # bytes of a name in a directory
_ROWS = (".jsonl", ".json", ".csv", ".parquet")


def place_problems(settings: TrainSettings) -> list[Problem]:
    """List the files and directories that settings name and that are missing or incomplete. Names on the hub are not
    checked, nor are settings with an invalid value, which are reported elsewhere."""
    if wrong := list(_names(settings)):
        return wrong
    refused = {problem.path for problem in wrong_values(settings)}
    return [problem for problem in _problems(settings) if problem.path not in refused]


def _problems(settings: TrainSettings) -> list[Problem]:
    reward = settings.reward
    models = {"model.path": settings.model.path or None, "reward.model.path": reward.model.path}
    models["reward.judge.path"] = reward.judge.path
    if settings.algorithm.uses_critic:
        models["model.critic_path"] = settings.model.critic_path
    if settings.loads_teacher:
        models["model.teacher_path"] = settings.model.teacher_path
        models |= {f"model.teachers.{name}": path for name, path in whole_teachers(settings.model).items()}
    if settings.uses_reference:
        models["model.ref_path"] = settings.model.ref_path
    lines = [*output_problems(settings), *_start(settings)]
    lines += [line for name, path in models.items() if path is not None for line in _model(name, path)]
    lines += [*_tokenizers(settings), *_moments(settings.model.moments_directory)]
    for name in ("path", "eval_path"):
        for path in getattr(settings.data, name):
            lines += _rows(f"data.{name}", path)
    for name in ("chat_template", "tools"):
        path = getattr(settings.data, name)
        lines += [] if path is None else _text(f"data.{name}", path, schemas=name == "tools")
    return lines


def _names(settings: TrainSettings) -> Problems:
    """Yield a problem for each setting with an empty path, which would mean the working directory, and for each path
    with a part too long for file systems."""
    values = files.flat(files.to_dict(settings))
    for setting in (*files.PATHS, "resume", "output_dir"):
        names = values[setting] if isinstance(values[setting], list) else [values[setting]]
        names = [name for name in names if name is not None]
        longest = max((len(os.fsencode(part)) for name in names for part in Path(name).parts), default=0)
        if "" in names and setting not in ("model.path", "output_dir", "module_dirs"):  # two are reported as not set
            yield Problem(
                setting, values[setting], "an empty name; give a file, a directory or a name, or leave it out"
            )
        elif longest > _LONGEST:
            text = f"a part of it has {longest} bytes, and file systems take {_LONGEST}; give a shorter name"
            yield Problem(setting, values[setting], text)


def output_problems(settings: TrainSettings) -> Problems:
    """Yield the reason why a run could not write to its output_dir, if there is one. The directory is not made."""
    path, name = Path(settings.output_dir), settings.output_dir
    if not name:  # reported as not set
        return
    there = next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        wrong = "is a file" if there.is_file() else "may not be written to" if there.is_dir() else _NO_PLACE
        yield Problem("output_dir", name, f"{there} {wrong}; give another directory")
    elif others := foreign_files(path, inputs=_inputs(settings)):
        yield Problem("output_dir", name, f"it holds {some(others)} and no run; give a new or empty directory")
    elif wrong := [*_in_the_way(path)]:
        yield Problem("output_dir", name, f"{'; '.join(wrong)}; move that away, or give another directory")


def _in_the_way(directory: Path) -> Iterator[str]:
    """Yield a text for each name that a run writes in a directory and that exists there as another kind (file or
    directory), or is not writable."""
    for names, is_right, kind in ((_DIRECTORIES, Path.is_dir, "directory"), (_FILES, Path.is_file, "file")):
        for place in (directory / name for name in names if os.path.lexists(directory / name)):
            if not is_right(place):
                yield f"{place} is no {kind}, which a run writes there"
            elif not os.access(place, os.W_OK):
                yield f"{place} may not be written to"


def free_bytes(directory: Path) -> float:
    """Free bytes on the disk of a directory, which need not exist yet; inf if the file system reports no size."""
    place = next(place for place in (directory.absolute(), *directory.absolute().parents) if place.exists())
    disk = shutil.disk_usage(place)
    return float(disk.free) if disk.total else math.inf


def foreign_files(directory: Path, *, inputs: Iterable[Path] = ()) -> list[str]:
    """The names in a directory, except a run's outputs and its `inputs`, settings, logs and hidden files; none if the
    directory is a run's, whatever else is in it."""
    try:
        names = sorted(entry.name for entry in os.scandir(directory))
    except OSError:  # it is not there
        return []
    if any(next(directory.glob(mark), None) is not None for mark in _MARKS):
        return []
    read = {path.absolute().relative_to(directory.absolute()).parts[0] for path in inputs}
    known = {*OUTPUTS, *read, "lost+found"}
    return [name for name in names if name not in known and name[0] != "." and Path(name).suffix not in _BESIDE]


def _inputs(settings: TrainSettings) -> list[Path]:
    """Paths that settings name inside of their output_dir."""
    values, root = files.flat(files.to_dict(settings)), Path(settings.output_dir).absolute()
    named = [values[name] for name in files.PATHS]
    paths = [Path(path).absolute() for each in named for path in ([each] if isinstance(each, str) else each or [])]
    return [path for path in paths if root in path.parents]


def some(names: Sequence[str]) -> str:
    """A text with the first few of many names, and the number of others."""
    return printable(", ".join(names[:3]), 200) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def target_problem(settings: TrainSettings, target: Path) -> str | None:
    """The problem of exporting a model to `target`: it would replace what is not an export, or an input of the run;
    None if there is none."""
    try:
        check_replaceable(target)
    except ValueError as error:
        return str(error)
    values = files.flat(files.to_dict(settings))
    for name in files.PATHS:
        paths = [values[name]] if isinstance(values[name], str) else values[name] or []
        if any(os.path.realpath(path) == os.path.realpath(target) for path in paths):
            return f"{target} is what {name} names, and an export would replace it; give another directory"
    return None


def is_local(path: str) -> bool:
    """Whether a path can only be a place on this machine, and no name on the hub (`owner/name` may be both)."""
    return Path(path).exists() or path.startswith((".", "/", "~")) or path.count("/") > 1


def weights_problem(file: Path) -> str | None:
    """The reason why a file is no whole safetensors file, by its header and its size; None if it is one."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > size - 8:
                return f"{file} is cut off: it has {size:,} bytes; copy or download it again"
            header = json_of(opened.read(length))
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


def remote_problems(settings: TrainSettings) -> Problems:
    """Yield the reason why nothing can be written to checkpoint.remote, if there is one. A small file is written there
    and removed."""
    address = settings.checkpoint.remote
    text = None if address is None or check_address(address) is not None else problem_of_place(address)
    if text is not None:
        yield Problem("checkpoint.remote", address, text)


def _start(settings: TrainSettings) -> Problems:
    """Yield the problems of the checkpoint to resume from, and of the directory of saved rollouts."""
    resume, checkpoints = settings.resume, Path(settings.output_dir) / "checkpoints"
    if resume == "must" and settings.checkpoint.remote is None and not any(checkpoints.glob("step_*")):
        yield Problem("resume", resume, f"there is no checkpoint in {checkpoints}")
    elif resume not in files.RESUMES and not Path(resume).is_dir():
        text = "there is no such checkpoint; give auto, must, never, or a directory named like step_00000100"
        yield Problem("resume", resume, text)
    rollouts = settings.rollout.from_
    if rollouts is not None and not Path(rollouts).is_dir():
        wrong = "is a file, not a directory of rollouts" if Path(rollouts).exists() else _missing(Path(rollouts))
        yield Problem("rollout.from", rollouts, wrong)


def _moments(path: str | None) -> Problems:
    """Yield the reason why no files can be made in model.moments_directory, if there is one."""
    if path is not None and not (Path(path).is_dir() and os.access(path, os.W_OK | os.X_OK)):
        wrong = "files cannot be made there" if Path(path).is_dir() else "there is no such directory"
        yield Problem("model.moments_directory", path, f"{wrong}; make one on a local disk with room for the moments")


def _gguf(path: str) -> GgufHeader | str | None:
    """The header of the GGUF file that a path names, or a text on why it cannot be read; None if the path names no such
    file."""
    try:
        file = gguf_of(path)
        return None if file is None else read_header(file)
    except (ValueError, OSError) as error:
        return str(error)


def _model(name: str, path: str) -> Problems:
    directory = Path(path)
    if (packed := _gguf(path)) is not None:
        if isinstance(packed, str):
            yield Problem(name, path, packed)
        elif name == "reward.model.path":
            text = "a GGUF file holds no head that scores: give the directory of a reward model, or reward.judge.path"
            yield Problem(name, path, text)
        return
    if not is_local(path):
        return
    if not directory.is_dir():
        yield Problem(name, path, _missing(directory))
        return
    if (directory / "settings.toml").exists() and not (directory / _CONFIG).exists():
        hint = directory / "model" if (directory / "model").is_dir() else "a directory that fppo export wrote"
        yield Problem(name, path, f"is the directory of a run, not of a model; give {hint}")
        return
    if not (directory / _CONFIG).exists():
        yield Problem(name, path, f"holds no {_CONFIG}: it is not the directory of a Hugging Face model")
        return
    if (wrong := _not_json(directory / _CONFIG)) is not None:
        yield Problem(name, path, wrong)
    yield from (Problem(name, path, text) for text in _weights(directory))


def _weights(directory: Path) -> Iterator[str]:
    try:
        files = weight_files(directory)
    except ValueError as error:
        yield str(error)
        return
    if not files:
        yield no_weights(directory)
    absent = [file.name for file in files if not file.exists()]
    if absent:
        yield f"lacks files that its index names: {absent}"
    yield from (text for file in files if file.exists() and (text := weights_problem(file)))


def _tokenizers(settings: TrainSettings) -> Problems:
    section, data, reward = settings.model, settings.data, settings.reward
    place = ("model.path", section.path) if section.tokenizer is None else ("model.tokenizer", section.tokenizer)
    template = data.chat and data.chat_template is None and not section.trust_remote_code
    yield from _tokenizer(*place, template=template)
    if reward.model.tokenizer is not None:
        yield from _tokenizer("reward.model.tokenizer", reward.model.tokenizer)
    if reward.judge.path is not None:
        template = reward.judge.chat and not section.trust_remote_code
        yield from _tokenizer("reward.judge.path", reward.judge.path, template=template)


def _tokenizer(name: str, path: str, *, template: bool = False) -> Problems:
    """Yield the problems of the tokenizer in the directory `path`, which the setting `name` gives. With `template` the
    tokenizer must have a chat template."""
    directory, of_model = Path(path), name.endswith(".path")
    if path and (packed := _gguf(path)) is not None:
        if isinstance(packed, str):
            text = None if of_model else packed  # of a model it is reported already
        elif "tokenizer.ggml.tokens" not in packed.metadata:
            text = "its header holds no tokenizer" + _advice(name)
        else:
            missing = template and "tokenizer.chat_template" not in packed.metadata
            text = NO_TEMPLATE if missing else None
        yield from [] if text is None else [Problem(name, path, text)]
        return
    if not path or not is_local(path):
        return
    if not directory.is_dir():
        if not of_model:  # which is reported already
            yield Problem(name, path, _missing(directory))
    elif not of_model or (directory / _CONFIG).exists():
        there = [directory / file for file in TOKENIZER_FILES if (directory / file).exists()]
        if not there:
            yield Problem(name, path, f"holds no tokenizer, none of {list(TOKENIZER_FILES)}{_advice(name)}")
        wrong = [text for file in there if file.suffix == ".json" and (text := _not_json(file)) is not None]
        yield from (Problem(name, path, text) for text in wrong)
        if template and there and not wrong and not _has_template(directory):
            yield Problem(name, path, NO_TEMPLATE)


def _advice(name: str) -> str:
    return "; give one with model.tokenizer" if name == "model.path" else ""


def _has_template(directory: Path) -> bool:
    config = directory / "tokenizer_config.json"
    own = config.exists() and "chat_template" in json_of(config.read_text(encoding="utf-8"))
    return own or any((directory / name).exists() for name in _TEMPLATES)


def _not_json(file: Path) -> str | None:
    """The reason why a file does not hold a JSON object; None if it does."""
    try:
        value = json_of(file.read_text(encoding="utf-8"))
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"
    except ValueError as error:
        return f"{file.name} is not JSON: {error}"
    return None if isinstance(value, dict) else f"{file.name} is not an object of JSON"


def _rows(name: str, path: str) -> Problems:
    file = Path(path)
    if (file.suffix.lower() in _ROWS or path.startswith((".", "/", "~"))) and not file.exists():
        yield Problem(name, path, _missing(file))
    elif (wrong := irregular(file)) is not None:
        yield Problem(name, path, wrong)


def _text(name: str, path: str, *, schemas: bool) -> Problems:
    if (wrong := irregular(Path(path))) is not None:
        yield Problem(name, path, wrong)
        return
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        if schemas and not (isinstance(tools := json_of(text), list) and all(isinstance(x, dict) for x in tools)):
            yield Problem(name, path, "must hold a list of objects, a schema each")
        elif schemas and (half := half_pairs(tools)) is not None:
            yield Problem(name, path, f"{half[:40]!a} holds half of a surrogate pair, which is no character")
    except OSError:
        yield Problem(name, path, _missing(Path(path)))
    except ValueError as error:
        yield Problem(name, path, f"is not {'JSON' if schemas else 'text'}: {error}")


def _missing(path: Path) -> str:
    """A text on a place that cannot be used: it is a file instead of a model's directory, or does not exist, or its
    parent does not."""
    if path.exists():
        return "is a file, not the directory of a model"
    there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    return "there is no such file or directory" if there == path.absolute().parent else f"there is no {path.parent}"


def row_problems(settings: TrainSettings, *, imitates: bool = False) -> list[Problem]:
    """Problems with data sets in local files: fields that no row has, and faulty rows; of large ones only the first
    rows are read. `imitates`: the rows are demonstrations."""
    data, noted, found = settings.data, RowProblems(), list[tuple[str, str]]()
    fields, needed = data.fields, data.fields.needed | {"data.teacher_prompt": data.teacher_field}
    if imitates:
        fields = attrs.evolve(fields, ground_truth=None)
        needed = Answers(**only(settings.sft, "response", "messages", "turns")).needed(fields)
    sets = [*filter(_are_rows, dict.fromkeys((data.path, data.eval_path if data.has_held_out else ())))]
    for paths in sets:
        most = _FIRST if sum(Path(path).stat().st_size for path in paths) > _MOST_BYTES else None
        try:
            rows = read_rows(paths, max_rows=most, problems=noted)
            check_fields(rows, needed, RowProblems())
            for row in rows:
                if not imitates or settings.sft.messages is None:
                    example_of(row, fields, noted)
        except ValueError as error:
            found += [(line, some([Path(path).name for path in paths])) for line in lines_of(error)]
    alike = Counter(line for line, _ in found)
    told = [line if alike[line] == len(sets) or name in line else f"{line} (in {name})" for line, name in found]
    lines = dict.fromkeys([*told, *noted.lines()])
    rest = f"; {noted.unshown()} in the data" if noted.unshown() else ""
    return [problem_of(ValueError(f"{line}{rest * (number == len(lines))}")) for number, line in enumerate(lines, 1)]


def _are_rows(paths: Sequence[str]) -> bool:
    """Whether a data set consists of local files of rows."""
    return bool(paths) and all(Path(path).is_file() and Path(path).suffix.lower() in FORMATS for path in paths)


def token_problems(settings: TrainSettings) -> list[Problem]:
    """List a problem if `rollout.stop_token_ids` has ids that the local tokenizer does not have."""
    given = settings.rollout.stop_token_ids
    file = Path(settings.model.tokenizer or settings.model.path) / "tokenizer.json"
    if not given or not file.exists():
        return []
    try:
        tokenizer = json_of(file.read_text(encoding="utf-8"))
        vocabulary = tokenizer["model"]["vocab"]
        ids = set(vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary)))
        ids |= {token["id"] for token in tokenizer["added_tokens"]}
    except (ValueError, KeyError, TypeError):  # another kind of file, which its library will judge
        return []
    unknown = [i for i in given if i not in ids]
    text = f"the tokenizer has no such ids; they go up to {max(ids, default=0)}"
    return [Problem("rollout.stop_token_ids", unknown, text)] if unknown else []
