"""Models to Hugging Face checkpoints, file by file, from whole parameters or from shards."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from fppo.models._save_plan import Plan, plan
from fppo.models.model import Model, Params
from fppo.runtime import fsdp
from fppo.runtime.mesh import AXES, LOCAL, Mesh, device_of, gather_objects, is_first

DEFAULT_SHARD_BYTES = 2 << 30
CONTENTS = "fppo_files.json"  # names all files of an export, so that the next one knows what it may replace


@torch.no_grad()
def save(
    model: Model,
    params: Params,
    directory: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    generation_config: GenerationConfig | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    mesh: Mesh = LOCAL,
) -> None:
    """Writes parameters as a directory that transformers loads: AutoModelForCausalLM, or for a value head
    AutoModelForTokenClassification with one label where the family has that class.

    It is written beside `directory` first and takes its place at the end: of nothing, of an empty directory, or of what
    was saved there before, as `check_replaceable` has it. Every rank of the mesh calls it, and the
    first one writes; on a mesh that is `mesh.sharded` `params` are shards. They are gathered one by one, so beyond its
    shards no rank holds more than one parameter, and the first one no more than a file of `max_shard_bytes` besides.
    All ranks return when it is written, or fail with the first one. Raises ValueError if `params` do not fit, or if
    there is something else at `directory`.
    """
    _check(model, params, mesh)
    params = {name: x.detach() for name, x in params.items()}
    chosen = plan(model, {name: x.dtype for name, x in params.items()}, max_shard_bytes)
    target = Path(directory).resolve()
    beside = target.with_name(f".{target.name}.{os.getpid()}.partial")
    device = device_of(params)

    def prepare() -> None:
        check_replaceable(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(beside, ignore_errors=True)
        chosen.write_config(beside)

    def finish() -> None:
        if chosen.index is not None:
            text = json.dumps(chosen.index, indent=2, sort_keys=True) + "\n"
            (beside / "model.safetensors.index.json").write_text(text)
        for extra in (tokenizer, generation_config):
            if extra is not None:
                extra.save_pretrained(beside)
        _complete(beside)
        check_replaceable(target)  # again: writing takes a while
        _take_place(beside, target)

    try:
        _first_alone(prepare, mesh, device)
        for file, names in chosen.files.items():
            _save_file(chosen, names, params, beside / file, mesh)
        _first_alone(finish, mesh, device)
    finally:
        if is_first(mesh):
            shutil.rmtree(beside, ignore_errors=True)


def save_config(
    model: Model,
    directory: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    generation_config: GenerationConfig | None = None,
) -> None:
    """Writes all of a model but its parameters: the configs, a custom model's code, the tokenizer.

    `build` makes the model again of it. Raises ValueError as `save` does for what is in its way.
    """
    target = Path(directory).resolve()
    check_replaceable(target)
    beside = target.with_name(f".{target.name}.{os.getpid()}.partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(beside, ignore_errors=True)
    try:
        plan(model, dict.fromkeys(model.shapes, torch.float32), DEFAULT_SHARD_BYTES).write_config(beside)
        for extra in (tokenizer, generation_config):
            if extra is not None:
                extra.save_pretrained(beside)
        _complete(beside)
        _take_place(beside, target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _check(model: Model, params: Params, mesh: Mesh) -> None:
    """Raises ValueError if the parameters are not this rank's of the model."""

    def own_shape(shape: torch.Size) -> tuple[int, ...]:
        if not mesh.sharded:
            return tuple(shape)
        start, stop = fsdp.bounds(shape[0], mesh["shard"])
        return (stop - start, *shape[1:])

    misfits = sorted(set(params) ^ set(model.shapes))
    misfits = misfits or [n for n, x in params.items() if tuple(x.shape) != own_shape(model.shapes[n])]
    if misfits:
        raise ValueError(f"cannot save: parameters that are missing, unknown or of another shape: {misfits}")


def _first_alone(act: Callable[[], None], mesh: Mesh, device: torch.device) -> None:
    """Runs `act` on the first rank; all wait for it, and fail if it does."""
    problem = None
    if is_first(mesh):
        try:
            act()
        except Exception as error:
            problem = error
    first_problem = gather_objects(problem and f"{type(problem).__name__}: {problem}", mesh, AXES, device)[0]
    if problem is not None:
        raise problem
    if first_problem is not None:
        raise RuntimeError(f"the model could not be saved on the first rank: {first_problem}")


def _save_file(chosen: Plan, names: Iterable[str], params: Params, path: Path, mesh: Mesh) -> None:
    tensors = _tensors(chosen, names, params, mesh)
    write = partial(safetensors.torch.save_file, tensors, path, metadata={"format": "pt"})
    _first_alone(write, mesh, device_of(params))


def _tensors(chosen: Plan, names: Iterable[str], params: Params, mesh: Mesh) -> Params:
    """A file's tensors on the first rank's host; other ranks help to gather them, and get nothing."""
    own: dict[str, Tensor] = {}
    if any(mesh[name].rank for name in AXES if name != "shard"):
        return own  # another rank has the same shards and helps
    wanted = dict.fromkeys(names)
    for group in dict.fromkeys(chosen.made_of[name] for name in wanted):
        whole = {}
        for name in group:
            whole |= fsdp.gather({name: params[name]}, chosen.model.shapes, mesh)
        if is_first(mesh):
            own |= {name: _own(x, whole, mesh) for name, x in chosen.stored(whole).items() if name in wanted}
    return {name: own[name] for name in wanted} if own else own


def _own(x: Tensor, whole: Params, mesh: Mesh) -> Tensor:
    """`x` on the host, contiguous; if it was cut out of gathered parameters, in memory of its own, to free those."""
    piece = mesh.sharded and all(x is not each for each in whole.values())
    return x.to("cpu", copy=piece, memory_format=torch.contiguous_format).contiguous()


def check_replaceable(directory: str | os.PathLike[str]) -> None:
    """Raises ValueError unless `save` may write to the directory: it is not there, or empty, or holds a model that
    `save` has written, and nothing else."""
    target = Path(directory)
    if not target.exists():
        return
    if not target.is_dir():
        raise ValueError(f"{target} is a file, which a model does not replace; give a new directory")
    saved = _saved(target)
    others = sorted(_files(target) - saved if saved else (path.name for path in target.iterdir()))
    if others:
        shown = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        raise ValueError(
            f"{target} holds {shown}, which saving a model would delete; move that away, or give a new or empty "
            "directory, or one that holds an earlier export and nothing else"
        )


def _files(directory: Path) -> set[str]:
    """The paths below a directory, but for those of directories."""
    paths = [path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir()]
    return {path.relative_to(directory).as_posix() for path in paths}


def _saved(directory: Path) -> set[str]:
    """What `save` has written to the directory, by its own list."""
    try:
        return {CONTENTS, *json.loads((directory / CONTENTS).read_text(encoding="utf-8"))["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _complete(directory: Path) -> None:
    """Lists what was written, and gives every file the mode that the umask asks for: safetensors gives 0600."""
    text = json.dumps({"files": sorted(_files(directory))}, indent=1) + "\n"
    (directory / CONTENTS).write_text(text, encoding="utf-8")
    mode = (directory / CONTENTS).stat().st_mode & 0o666
    for file in directory.rglob("*"):
        if file.is_file():
            file.chmod(mode)


def _take_place(beside: Path, target: Path) -> None:
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    if target.exists():
        target.rename(old)
    beside.rename(target)
    shutil.rmtree(old, ignore_errors=True)
