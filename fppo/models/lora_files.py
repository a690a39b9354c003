"""Adapters in PEFT's files: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from fppo._errors import json_of
from fppo.models.adapted import FACTORS, Lora
from fppo.models.heads import embedding_name, vocabulary_head
from fppo.models.lora import frozen_of
from fppo.models.model import Model, Params
from fppo.models.place import own_params, whole_params
from fppo.models.save import first_alone
from fppo.runtime.exports import draft_of, replacing
from fppo.runtime.mesh import LOCAL, Mesh, device_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_START = "base_model.model."
_KINDS = (".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B")
_INNER, _OUTER = "gate_up_proj", "down_proj"  # PEFT wraps a block of experts once for each, in this order
# options that change an adapter's function and that fppo does not support
_REFUSED = (
    *("use_dora", "lora_bias", "rank_pattern", "alpha_pattern", "layer_replication", "modules_to_save", "use_qalora"),
    *("trainable_token_indices", "alora_invocation_tokens", "megatron_config", "eva_config", "corda_config"),
)
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal", None)  # values of init_lora_weights that leave the base alone


def read_config(directory: Path) -> Lora:
    """Read the config of the adapter in a directory; its targets are all adapted weights by name. Dropout, a setting of
    PEFT's own training, is ignored.

    Raises ValueError for missing files, and naming unsupported options.
    """
    try:
        config = json_of((directory / CONFIG).read_text(encoding="utf-8"))
        with safetensors.safe_open(directory / WEIGHTS, "pt") as file:
            stored = list(file.keys())
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{directory} holds no PEFT adapter, {CONFIG} and {WEIGHTS}: {error}") from error
    wrong = [f"{name} = {config[name]!r}" for name in _REFUSED if config.get(name)]
    wrong += [f"peft_type = {kind!r}" for kind in [config.get("peft_type")] if kind != "LORA"]
    wrong += [f"bias = {bias!r}" for bias in [config.get("bias", "none")] if bias != "none"]
    wrong += [f"init_lora_weights = {x!r}" for x in [config.get("init_lora_weights")] if x not in _PLAIN_STARTS]
    if wrong:
        raise ValueError(f"{directory / CONFIG}: fppo does not run adapters with {', '.join(wrong)}")
    scaling = "rslora" if config.get("use_rslora") else "standard"
    return Lora(config["r"], float(config["lora_alpha"]), _targets(stored, directory), scaling)


def _targets(stored: list[str], directory: Path) -> tuple[str, ...]:
    """The paths of the weights whose factors are stored."""
    paths = dict.fromkeys(_path(name) for name in stored)
    if None in paths or not paths:
        unknown = [name for name in stored if _path(name) is None]
        hint = "; PEFT leaves out its copies of embeddings with save_pretrained(..., save_embedding_layers=False)"
        copies = hint if any(".base_layer." in name for name in unknown) else ""
        raise ValueError(f"{directory / WEIGHTS} holds tensors that are no factor of a weight: {unknown[:5]}{copies}")
    names: list[str] = []
    for path in filter(None, paths):
        inner = path.removesuffix(".base_layer")
        if inner != path:
            names.append(f"{inner}.{_INNER}")
        elif f"{path}.base_layer" in paths:
            names.append(f"{path}.{_OUTER}")
        else:
            names.append(path)
    return tuple(names)


def _path(stored: str) -> str | None:
    end = next((kind for kind in _KINDS if stored.endswith(kind)), None)
    return stored[len(_START) : -len(end)] if end and stored.startswith(_START) else None


def load(model: Model, directory: Path, *, like: Mapping[str, Tensor], mesh: Mesh = LOCAL) -> Params:
    """Load the adapter in a directory into an adapted model (`adapt` with `read_config`'s), in the dtypes and on the
    device of `like`; on a mesh that cuts parameters this rank's parts.

    Raises ValueError that names missing or unknown factors, and those of another shape or not in floating point.
    """
    found = safetensors.torch.load_file(directory / WEIGHTS)
    whole, taken, problems = {}, set[str](), list[str]()
    for name, (names, back) in _stored(model).items():
        taken |= set(names)
        if absent := [each for each in names if each not in found]:
            problems.append(f"missing {absent}")
            continue
        factors = back(*(found[each] for each in names))
        whole |= {f"{name}.lora_A": factors[0], f"{name}.lora_B": factors[1]}
    problems += [f"unknown {unknown[:5]}"] if (unknown := sorted(found.keys() - taken)) else []
    problems += [f"{n} of shape {list(x.shape)}" for n, x in whole.items() if x.shape != model.whole_shapes[n]]
    problems += [f"{n} in {x.dtype}" for n, x in whole.items() if not x.is_floating_point()]
    if problems:
        raise ValueError(f"the adapter in {directory} does not fit the model: {'; '.join(problems)}")
    own = own_params(model, whole, mesh)
    return {name: own[name].to(x).contiguous() if name in own else x for name, x in like.items()}


def save(
    model: Model,
    adapter: Mapping[str, Tensor],
    directory: Path,
    *,
    base: str,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    mesh: Mesh = LOCAL,
) -> None:
    """Write an adapter as a directory that PEFT and vLLM load onto `base`, the name or directory of its base.

    It replaces a directory that `check_replaceable` permits. On a mesh that cuts parameters every rank must call, and
    the first one writes. Raises ValueError for adapters that PEFT's files cannot hold: of a value model, of tied
    embeddings.
    """
    frozen, tensors = frozen_of(model), stored(model, adapter, mesh)

    def write() -> None:
        with replacing(directory):
            draft = draft_of(directory)
            draft.mkdir()
            metadata = {"format": "pt", "base_digest": frozen.digest}
            contiguous = {name: x.cpu().contiguous() for name, x in tensors.items()}
            safetensors.torch.save_file(contiguous, draft / WEIGHTS, metadata=metadata)
            _order_metadata(draft / WEIGHTS)
            text = json.dumps(_config(model, base), indent=2, sort_keys=True) + "\n"
            (draft / CONFIG).write_text(text, encoding="utf-8")
            if tokenizer is not None:
                tokenizer.save_pretrained(draft)

    first_alone(write, mesh, device_of(adapter))


def _order_metadata(path: Path) -> None:
    """Sort the metadata in a safetensors file's header: its writer orders them at random, and equal adapters should be
    equal files. The header keeps its length, as the format's spaces at its end allow."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode().ljust(length)
        if len(text) != length:
            raise AssertionError(f"{path}: its header has {length} bytes, and sorted {len(text)}")
        file.seek(8)
        file.write(text)


def stored(model: Model, adapter: Mapping[str, Tensor], mesh: Mesh = LOCAL) -> Params:
    """The whole factors by PEFT's names and in its shapes. On a mesh that cuts parameters every rank must call. Raises
    ValueError for adapters that PEFT's files cannot hold."""
    forms, tensors = _stored(model), dict[str, Tensor]()
    whole = whole_params(model, dict(adapter), mesh)
    for name, (names, _) in forms.items():
        a, b = (whole[name + factor].detach() for factor in FACTORS)
        tensors |= dict(zip(names, _forth(model, name, a, b), strict=True))
    return tensors


def _config(model: Model, base: str) -> dict[str, Any]:
    frozen = frozen_of(model)
    stacks = {name for name in frozen.places if len(model.whole_shapes[name]) == 3}
    ends = sorted({".".join(name.split(".")[-3:]) for name in stacks}, key=lambda end: not end.endswith(_INNER))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": frozen.lora.rank,
        "lora_alpha": frozen.lora.alpha,
        "use_rslora": frozen.lora.scaling == "rslora",
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted(name.removesuffix(".weight") for name in frozen.places if name not in stacks),
        "target_parameters": ends or None,
        "fan_in_fan_out": any(flipped for name, flipped in frozen.places.items() if name not in stacks),
    }


# the stored names of a weight's factors, and the function from the stored tensors to A and B
_Stored = tuple[tuple[str, str], Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]


def _stored(model: Model) -> dict[str, _Stored]:
    """The stored form of each adapted weight's factors. Raises ValueError for adapters that PEFT's files cannot
    hold."""
    frozen, table = frozen_of(model), embedding_name(model)
    tied = model.head == "lm" and vocabulary_head(model.unplaced or model)[0] == table
    if model.head != "lm":
        raise ValueError("the adapter of a value model has a value head, which PEFT's files cannot hold: merge it")
    if tied and table in frozen.places:
        raise ValueError(
            f"{table} is the vocabulary head, too: PEFT adapts one without the other until they are merged; merge the "
            "adapter"
        )
    return {name: _names(name, model, embedding=name == table) for name in frozen.places}


def _names(name: str, model: Model, *, embedding: bool) -> _Stored:
    frozen, shape = frozen_of(model), model.whole_shapes[name]
    path = _START + name.removesuffix(".weight")
    if embedding:
        return (f"{path}.lora_embedding_A", f"{path}.lora_embedding_B"), lambda a, b: (b.T, a.T)
    if len(shape) < 3:
        return (f"{path}.lora_A.weight", f"{path}.lora_B.weight"), lambda a, b: (a, b)
    block, _, kind = path.rpartition(".")
    other = {_INNER: _OUTER, _OUTER: _INNER}.get(kind)
    if other is None or f"{name.removesuffix(kind)}{other}" not in frozen.places:
        raise ValueError(f"{name}: fppo writes PEFT's files of experts only where both of their stacks are adapted")
    experts, rank = shape[0], frozen.lora.rank
    path = f"{block}.base_layer" if kind == _INNER else block

    def back(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:  # [E r, in], [out, r E] with experts innermost
        return a.unflatten(0, (experts, rank)), b.unflatten(1, (rank, experts)).permute(2, 0, 1)

    return (f"{path}.lora_A.weight", f"{path}.lora_B.weight"), back


def _forth(model: Model, name: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Convert A and B to their stored shapes."""
    if name == embedding_name(model):
        return b.T, a.T
    return (a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)) if a.dim() == 3 else (a, b)
