"""Save models as Hugging Face checkpoints, file by file, from whole parameters or from shards."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import GENERATION_CONFIG_NAME

from fppo.models import lora
from fppo.models._save_plan import SavePlan, plan
from fppo.models.model import Model, Params
from fppo.models.place import whole_params
from fppo.runtime import fsdp
from fppo.runtime.exports import draft_of, replacing
from fppo.runtime.mesh import AXES, CUTTING_AXES, LOCAL, Mesh, device_of, gather_objects, is_first
from fppo.runtime.parts import dtypes_of
from fppo.runtime.streamed import written

DEFAULT_SHARD_BYTES = 2 << 30


@torch.no_grad()
def save(
    model: Model,
    params: Params,
    directory: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    generation_config: GenerationConfig | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    mesh: Mesh = LOCAL,
) -> None:
    """Write parameters as a directory that transformers loads: AutoModelForCausalLM, or for a value head
    AutoModelForTokenClassification with a label for each output where the family has that class.

    A draft is written next to `directory` and moved to it at the end, replacing an empty directory or an earlier save
    (`check_replaceable`). Every rank of the mesh must call, and the first one writes; on a mesh that cuts parameters
    `params` are this rank's parts. They are gathered and written one by one, so that no rank holds more than its parts
    and one parameter. All ranks return once it is written, or fail with the first one. Of an adapted model the merged
    weights are written. Raises ValueError if `params` do not fit, or if `directory` holds anything else.
    """
    if model.frozen is not None:
        model, params = model.plain, lora.merged(model, params, mesh=mesh)
    _check(model, params, mesh)
    params = {name: x.detach() for name, x in params.items()}
    dtypes = dtypes_of(params, mesh)
    chosen = plan(model.unplaced or model, dtypes, max_shard_bytes)
    draft, device = draft_of(directory), device_of(params)
    with contextlib.ExitStack() as opened:

        def prepare() -> None:
            opened.enter_context(replacing(directory))
            chosen.write_config(draft)

        def finish() -> None:
            if chosen.index is not None:
                text = json.dumps(chosen.index, indent=2, sort_keys=True) + "\n"
                (draft / "model.safetensors.index.json").write_text(text)
            _save_others(draft, tokenizer, generation_config)
            opened.close()

        first_alone(prepare, mesh, device)
        for file, names in chosen.files.items():
            like = {name: chosen.like[name] for name in names}
            _save_file(draft / file, like, _tensors(model, chosen, names, params, dtypes, mesh), mesh, device)
        first_alone(finish, mesh, device)


def save_config(
    model: Model,
    directory: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    generation_config: GenerationConfig | None = None,
) -> None:
    """Write a model's directory without parameters: the configs, a custom model's code, the tokenizer.

    `build` restores the model from it. Raises ValueError as `save` does if `directory` holds anything else.
    """
    with replacing(directory) as draft:
        whole = (model.unplaced or model).plain
        plan(whole, dict.fromkeys(whole.shapes, torch.float32), DEFAULT_SHARD_BYTES).write_config(draft)
        _save_others(draft, tokenizer, generation_config)


def _save_others(
    draft: Path, tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None, generation_config: GenerationConfig | None
) -> None:
    if tokenizer is not None:
        tokenizer.save_pretrained(draft)
    if generation_config is not None:  # published ones contradict themselves, which save_pretrained may refuse
        generation_config.to_json_file(draft / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])


def _check(model: Model, params: Params, mesh: Mesh) -> None:
    """Raise ValueError unless the parameters are this rank's of the model."""
    misfits = sorted(set(params) ^ set(model.shapes))
    own = fsdp.shard_shapes(model.shapes, mesh, model.cuts)
    misfits = misfits or [name for name, x in params.items() if tuple(x.shape) != own[name]]
    if misfits:
        raise ValueError(f"cannot save: parameters that are missing, unknown or of another shape: {misfits}")


def first_alone(act: Callable[[], None], mesh: Mesh, device: torch.device) -> None:
    """Run `act` on the first rank; all wait for it, and fail if it does."""
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


def _save_file(
    path: Path, like: Params, tensors: Iterable[tuple[str, Tensor]], mesh: Mesh, device: torch.device
) -> None:
    """Write tensors on the first rank as they are gathered. All ranks help to the last, even after a failed write."""
    with contextlib.ExitStack() as opened:
        writes: list[Callable[[str, Tensor], None]] = []
        problems: list[Exception] = []

        def begin() -> None:
            writes.append(opened.enter_context(written(path, like, metadata={"format": "pt"})))

        def finish() -> None:
            for problem in problems:
                raise problem
            opened.close()

        first_alone(begin, mesh, device)
        for name, x in tensors:
            try:
                if not problems:
                    writes[0](name, x)
            except Exception as error:
                problems.append(error)
            del x  # before the next one is gathered
        first_alone(finish, mesh, device)


def _tensors(
    model: Model,
    chosen: SavePlan,
    names: Iterable[str],
    params: Params,
    dtypes: Mapping[str, torch.dtype],
    mesh: Mesh,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file, gathered on the first rank; other ranks help and get none."""
    if any(mesh[name].rank for name in AXES if name not in ("shard", *CUTTING_AXES, "pipeline")):
        return  # another rank with the same part helps
    wanted = set(names)
    for group in dict.fromkeys(chosen.made_of[name] for name in names):
        whole = {}
        for name in group:
            whole |= whole_params(model, params, mesh, names=[name], dtypes=dtypes)
        if is_first(mesh):
            yield from ((name, x) for name, x in chosen.stored(whole).items() if name in wanted)
