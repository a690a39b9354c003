"""Save models as Hugging Face checkpoints, file by file, from whole parameters or from shards."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import attrs
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from transformers import (
    AutoModelForTokenClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils import logging as transformers_logging

from fppo.models import lora
from fppo.models.model import BUILDING, SCORE_BIAS, SCORE_WEIGHT, Model, Params, causal_lm
from fppo.models.place import whole_params
from fppo.models.vision import parts_of
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
    """Raise ValueError unless `params` have the names and shapes of this rank's parameters of the model."""
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
    """Write tensors on the first rank as they are gathered; `like` has their names, shapes and dtypes. All ranks gather
    to the end, even after a failed write."""
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
    """Yield the stored tensors `names` of one file of the plan `chosen`, gathered on the first rank in `dtypes`; other
    ranks help and get none."""
    if any(mesh[name].rank for name in AXES if name not in ("shard", *CUTTING_AXES, "pipeline")):
        return  # another rank has the same parts
    wanted = set(names)
    for group in dict.fromkeys(chosen.made_of[name] for name in names):
        whole = {}
        for name in group:
            whole |= whole_params(model, params, mesh, names=[name], dtypes=dtypes)
        if is_first(mesh):
            yield from ((name, x) for name, x in chosen.stored(whole).items() if name in wanted)


Names = tuple[str, ...]
_FIRST_NUMBER = re.compile(r"\D*\d*")


@attrs.frozen
class SavePlan:
    """The contents of a model's files, and its module on meta (None for a family without one for value heads)."""

    model: Model
    dtype: torch.dtype
    module: PreTrainedModel | None
    renamed: Mapping[str, str]  # from our names of parameters to the module's, where they differ
    files: Mapping[str, list[str]]  # stored names by file
    like: Params  # the stored tensors, on meta
    made_of: Mapping[str, Names]  # from stored names to our names of the parameters that they are converted from
    index: Mapping[str, Any] | None  # the index of several files

    def stored(self, params: Params) -> Params:
        """Convert parameters to their stored form: transformers stores the experts of some families one by one."""
        named = {self.renamed.get(name, name): x for name, x in params.items()}
        return named if self.module is None else revert_weight_conversion(self.module, named)

    def write_config(self, directory: Path) -> None:
        """Write all files but the parameters': the config, the generation config, a custom model's code."""
        if self.module is not None:
            with _without_bars():  # it would show one even without parameters
                self.module.save_pretrained(directory, state_dict={})
            return
        directory.mkdir()
        config = _value_config(self.model.whole_config, self.model.outputs)
        config.architectures = [type(self.model.skeleton).__name__.removesuffix("Model") + "ForTokenClassification"]
        config.dtype = self.dtype
        config.save_pretrained(directory)


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Hide transformers' progress bars from logs and scripts' output."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def plan(model: Model, dtypes: Mapping[str, torch.dtype], max_shard_bytes: int) -> SavePlan:
    """Plan the files of a model whose parameters have these dtypes; each holds `max_shard_bytes`, or one tensor.

    Raises ValueError unless the parameters match those of transformers' class.
    """
    with BUILDING:
        params = {n: torch.empty(shape, dtype=dtypes[n], device="meta") for n, shape in model.shapes.items()}
        module, renamed = _module(model)
        named = {renamed.get(name, name): x for name, x in params.items()}
        if module is not None:
            named = _filled(module, named)
            _keep_config(module, model.whole_config)
        first = next(iter(params.values())).dtype
        plan = SavePlan(model, first, module, renamed, files={}, like={}, made_of={}, index=None)
        ours = {theirs: name for name, theirs in renamed.items()}
        order = [ours.get(name, name) for name in named]
        stored = plan.stored({name: params[name] for name in order})
        split = split_torch_state_dict_into_shards(stored, max_shard_size=max_shard_bytes)
        index = {
            "metadata": {"total_parameters": sum(x.numel() for x in params.values()), **split.metadata},
            "weight_map": split.tensor_to_filename,
        }
        return attrs.evolve(
            plan,
            files=split.filename_to_tensors,
            like=stored,
            made_of=_made_of(plan.stored, {name: params[name] for name in order}, stored),
            index=index if split.is_sharded else None,
        )


def _module(model: Model) -> tuple[PreTrainedModel | None, dict[str, str]]:
    if model.head == "lm":
        return causal_lm(model.whole_config, "meta", trust_remote_code=model.trust_remote_code), {}
    module = _token_classifier(model.whole_config, model.outputs)
    if module is None:
        return None, {}
    place = next(name for name, _ in module.named_children() if name in ("score", "classifier"))
    return module, {SCORE_WEIGHT: f"{place}.weight", SCORE_BIAS: f"{place}.bias"}


def _filled(module: PreTrainedModel, named: Params) -> Params:
    """The parameters that the module stores, in its order; the module gets their dtypes."""
    unknown = module.load_state_dict(named, assign=True, strict=False).unexpected_keys
    module.tie_weights()
    left = [name for name, _ in module.named_parameters() if name not in named]
    if left or unknown:
        raise ValueError(
            f"cannot save: {type(module).__name__} has parameters that fppo does not hold: {left}, or lacks {unknown}"
        )
    computed = module._keys_to_ignore_on_save or ()
    return {name: named[name] for name in module.state_dict() if name in named and name not in computed}


def _made_of(convert: Callable[[Params], Params], params: Params, stored: Params) -> dict[str, Names]:
    """For each stored tensor the names of the parameters that it is converted from. All tensors have groups of the same
    kind, the smallest that works: one parameter, a layer's, or all."""
    for place in (lambda name: name, lambda name: _FIRST_NUMBER.findall(name)[0], lambda _: ""):
        groups: dict[str, list[str]] = {}
        for name in params:
            groups.setdefault(place(name), []).append(name)
        outcomes = dict(_outcomes(convert, params, list(groups.values())))
        if {name: x.shape for name, (_, x) in outcomes.items()} == {name: x.shape for name, x in stored.items()}:
            return {name: group for name, (group, _) in outcomes.items()}
    raise AssertionError("all parameters together give what they gave before")


def _outcomes(
    convert: Callable[[Params], Params], params: Params, groups: Sequence[Sequence[str]]
) -> Iterator[tuple[str, tuple[Names, Tensor]]]:
    for group in groups:
        try:
            outcome = convert({name: params[name] for name in group})
        except Exception:  # transformers has no error of its own for a missing partner
            return
        for name, x in outcome.items():
            yield name, (tuple(group), x)


def _keep_config(module: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Restore the config's dropouts, which a `Model` sets to 0."""
    for part, own in zip(parts_of(module.config), parts_of(config), strict=True):
        for name, value in vars(own).items():
            if "drop" in name:
                setattr(part, name, value)


def _value_config(config: PreTrainedConfig, outputs: int) -> PreTrainedConfig:
    config = copy.deepcopy(config)
    config.num_labels = outputs
    return config


def _token_classifier(config: PreTrainedConfig, outputs: int) -> PreTrainedModel | None:
    """The family's token-classification model on meta; None without one that has a plain linear head."""
    if type(config) not in AutoModelForTokenClassification._model_mapping:
        return None
    with torch.device("meta"):
        module = cast(PreTrainedModel, AutoModelForTokenClassification.from_config(_value_config(config, outputs)))
    heads = [child for name, child in module.named_children() if name in ("score", "classifier")]
    return module if len(heads) == 1 and getattr(heads[0], "bias", None) is not None else None
