"""Read a rank's part of a checkpoint tensor by tensor, so that no rank holds more than its part and one parameter."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from fppo.models.model import Model, Params, causal_lm, state_dtype
from fppo.models.place import own_params
from fppo.runtime import fsdp
from fppo.runtime.layout import Extent
from fppo.runtime.mesh import Mesh
from fppo.runtime.parts import holds, part_of

_ROWS = 1 << 20  # numbers compared at a time


class _Stored(NamedTuple):
    """A stored tensor; `pattern` is its source pattern in a converter, or "" if no converter takes it."""

    name: str
    file: Path
    pattern: str
    dtype: str  # as safetensors calls it


def read_parts(
    model: Model, files: Sequence[Path], *, dtype: torch.dtype, mesh: Mesh, ignored: Callable[[str], bool]
) -> Params | None:
    """Read this rank's part of the parameters in `dtype`, without a value head, copied out of the files.

    Parameters that transformers stores in another form, such as experts one by one, are converted first. None if the
    files lack parameters, have unknown ones (those `ignored` or ignored by transformers aside), or need transformers'
    own reader. Raises ValueError for duplicate parameters, and for quantisation codes in place of numbers.
    """
    module = causal_lm(model.whole_config, "meta", trust_remote_code=model.trust_remote_code)
    known = {name for name in model.whole_shapes if name.startswith(model.prefix) or model.head == "lm"}
    converters, groups = _groups(module, files)
    _check_sources({target: sources for target, sources in groups.items() if target in known})
    beyond = [target for target in groups if target not in known and not ignored(target)]
    unknown = {name for name in _unexpected(module, beyond) if not _is_tied_copy(module, name, groups)}
    parts: Params = {}
    others: set[str] = set()  # held by other stages
    for target, sources in groups.items():
        converter = converters.get(sources[0].pattern)
        if target in unknown and converter is None:
            return None
        if target not in known and target not in unknown:
            continue
        if target in known and not holds(model.extents[target], mesh):
            others.add(target)
        elif converter is None:
            parts[target] = _read(sources[0], model.extents[target], state_dtype(model, target, dtype), mesh)
        else:
            whole = _converted(module, target, sources, converter)
            own = own_params(model, whole, mesh)
            parts |= {name: _own(x, state_dtype(model, name, dtype)) for name, x in own.items()}
    own = {name: shape for name, shape in model.shapes.items() if name in known}
    fits = {name: tuple(x.shape) for name, x in parts.items()} == fsdp.shard_shapes(own, mesh, model.cuts)
    return parts if fits and known == parts.keys() | others else None


def _unexpected(module: PreTrainedModel, names: Sequence[str]) -> set[str]:
    """Select the stored names that transformers would report as unexpected; it ignores some in each family, such as the
    layers that predict several tokens."""
    info = SimpleNamespace(missing_keys=set[str](), unexpected_keys=set(names))
    module._adjust_missing_and_unexpected_keys(info)  # type: ignore[arg-type]
    return info.unexpected_keys


def _is_tied_copy(module: PreTrainedModel, name: str, groups: Mapping[str, Sequence[_Stored]]) -> bool:
    """Whether a stored tensor equals the one that the config ties it to, such as a vocabulary head and embeddings. Both
    are read by blocks of rows; `groups` has the stored tensors of each parameter."""
    tied: Mapping[str, str] = getattr(module, "all_tied_weights_keys", {})
    sources = [source for each in (name, tied.get(name, "")) for source in groups.get(each, ())]
    if len(sources) != 2 or any(source.pattern for source in sources):
        return False
    with safe_open(sources[0].file, "pt") as one, safe_open(sources[1].file, "pt") as other:
        copy, first = one.get_slice(sources[0].name), other.get_slice(sources[1].name)
        rows, *rest = copy.get_shape() or [0]
        if [rows, *rest] != first.get_shape() or copy.get_dtype() != first.get_dtype():
            return False
        step = max(1, _ROWS // max(1, math.prod(rest)))
        return all(torch.equal(copy[i : i + step], first[i : i + step]) for i in range(0, rows, step))


def _check_sources(groups: Mapping[str, Sequence[_Stored]]) -> None:
    """Raise ValueError for parameters stored twice, and for parameters stored as integers."""
    for target, sources in groups.items():
        names = [source.name for source in sources]
        if len(set(names)) < len(names) or (len(names) > 1 and any(not source.pattern for source in sources)):
            places = ", ".join(f"{source.name} in {source.file.name}" for source in sources)
            raise ValueError(f"{sources[0].file.parent} holds {target} more than once: {places}; leave one of them")
        if codes := [source for source in sources if not source.dtype.startswith(("F", "BF"))]:
            raise ValueError(
                f"{codes[0].file} holds {codes[0].name} as {codes[0].dtype}, and transformers does not know how "
                "it was quantised; give the model in floating point"
            )


def _groups(
    module: PreTrainedModel, files: Sequence[Path]
) -> tuple[Mapping[str, WeightConverter], dict[str, list[_Stored]]]:
    """transformers' converters by source pattern, and the stored tensors by the first parameter made of them."""
    transforms = get_model_conversion_mapping(module)
    renamings = [x for x in transforms if isinstance(x, WeightRenaming)]
    converters = {pattern: x for x in transforms if isinstance(x, WeightConverter) for pattern in x.source_patterns}
    state, prefix = module.state_dict(), module.base_model_prefix
    stored = []
    for file in files:
        with safe_open(file, "pt") as tensors:
            stored += [(name, file, tensors.get_slice(name).get_dtype()) for name in tensors.keys()]  # noqa: SIM118
    groups: dict[str, list[_Stored]] = {}
    for name, file, dtype in sorted(stored, key=lambda each: dot_natural_key(each[0])):
        target, pattern = rename_source_key(name, renamings, list(converters.values()), prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        groups.setdefault(target, []).append(_Stored(name, file, pattern or "", dtype))
    return converters, groups


def _converted(module: PreTrainedModel, target: str, sources: Sequence[_Stored], converter: WeightConverter) -> Params:
    """Convert the stored `sources` of the parameter `target` to whole parameters by transformers' converter."""
    converter = copy.deepcopy(converter)
    for name, file, pattern, _ in sources:
        with safe_open(file, "pt") as tensors:
            converter.add_tensor(target, name, pattern, tensors.get_tensor(name))
    whole = converter.convert(target, model=module, config=module.config)
    return {name: x[0] if isinstance(x, list) else x for name, x in whole.items()}


def _read(source: _Stored, extent: torch.Size | Extent, dtype: torch.dtype, mesh: Mesh) -> Tensor:
    """This rank's part of the stored tensor `source`; the whole tensor if it lacks the shape of `extent`."""
    with safe_open(source.file, "pt") as tensors:  # anew each time: an open file keeps all it has read in memory
        stored = tensors.get_slice(source.name)
        shape = torch.Size(stored.get_shape())
        cut = isinstance(extent, Extent) and shape == extent.shape
        part = part_of(extent if cut else shape, mesh)
        if part.own_shape == tuple(shape):
            return _own(tensors.get_tensor(source.name), dtype)
        own = torch.empty(part.own_shape, dtype=dtype)
        for box in part.boxes:
            here, there = (
                tuple(slice(first, first + size) for first, size in zip(places, box.size, strict=True))
                for places in (box.at, box.start)
            )
            own[here] = stored[there]
        return own


def _own(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy a tensor contiguously in `dtype`: tensors in a file's memory are aligned differently, and kernels then round
    differently."""
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)
