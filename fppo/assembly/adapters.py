"""Policy and critic of a run from its settings; their adapters share one base if both start from the same weights."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import attrs
import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase, ProcessorMixin

from fppo import models
from fppo._errors import words_of
from fppo.assembly.functions import value_head_of
from fppo.assembly.parts import bare_model, load_actor, load_critic, on_device
from fppo.assembly.texts import directory_of
from fppo.data.privileged import TRUTH_SIGNS
from fppo.key import Key
from fppo.models import bases, hidden_width, lora, lora_files
from fppo.models.adapted import Lora
from fppo.models.init import init_value_head
from fppo.models.load import read_value_head
from fppo.models.model import Model, Params
from fppo.models.place import own_params, place_beside
from fppo.pipeline.program import Base
from fppo.runtime.mesh import LOCAL, Mesh
from fppo.settings.learning import CriticSettings
from fppo.settings.model import LoraSettings, ModelSettings
from fppo.steps.confidence import init_confidence
from fppo.steps.hidden import init_hidden


def lora_of(section: LoraSettings) -> Lora:
    """The policy's adapter, from the settings or from the files that they name.

    Raises ValueError if the files hold no adapter, or one with features that fppo does not have.
    """
    if section.path is not None:
        return lora_files.read_config(Path(section.path))
    return Lora(section.rank, section.alpha, section.targets, section.scaling, section.exclude)


def load_policy(
    section: ModelSettings, critic: CriticSettings, key: Key, mesh: Mesh, device: torch.device
) -> tuple[Model, Params]:
    """The policy and its trained parameters on the device, before the first update; with an adapter, the adapter's
    alone.

    Raises ValueError for a model that uses weights in ways that adapters do not support, and, if quantisation is asked
    for, for a model that cannot be quantised.
    """
    model, params = load_actor(section, critic, mesh)
    if not section.lora.used:
        return model, on_device(params, device)
    spec = lora_of(section.lora)
    lora.check_adapted(model, spec)
    model, base = _quantised_base(section.lora.base, model, params, mesh, device)
    model, adapter = lora.adapt(model, on_device(base, device), spec, key=key.fold("adapter"), mesh=mesh)
    if section.lora.path is not None:
        adapter = lora_files.load(model, Path(section.lora.path), mesh=mesh, like=adapter)
    return model, adapter


def _quantised_base(
    kind: Literal["float", "int8", "nf4"], model: Model, params: Params, mesh: Mesh, device: torch.device
) -> tuple[Model, Params]:
    """The base of an adapter from a loaded model: quantised before it goes to a device, unless `kind` is "float"."""
    return (model, params) if kind == "float" else bases.quantise(model, params, kind, mesh=mesh, device=device)


def adapted_critic(
    section: ModelSettings,
    critic: CriticSettings,
    key: Key,
    mesh: Mesh,
    device: torch.device,
    policy: Model | None = None,
) -> tuple[Model | None, Params]:
    """The critic and its parameters. It shares the base of `policy`, if given, where both are adapted and begin from
    the same weights; else it is loaded. A critic that reads no tokens has parameters, and None as its model."""
    if critic.reads != "tokens":
        return None, on_device(reader_params(section, critic, key.fold("critic")), device)
    if policy is not None and section.shares_base:
        model, params = _on_base(section, critic, policy, key, mesh)
    else:
        model, params = load_critic(section, critic, key, mesh)
        if section.lora.of_critic:
            model, params = _quantised_base(section.lora.base, model, params, mesh, device)
    params = on_device(params, device)
    own, begun = section.lora, section.lora.critic_path
    if not own.of_critic:
        return model, params
    spec = _critic_spec(own)
    if begun is not None:  # whose targets are not the policy's
        lora.check_adapted(bare_model(section, critic), spec)
    model, adapter = lora.adapt(model, params, spec, key=key.fold("critic's adapter"), mesh=mesh)
    return model, adapter if begun is None else lora_files.load(model, Path(begun), mesh=mesh, like=adapter)


def reader_params(section: ModelSettings, critic: CriticSettings, key: Key) -> Params:
    """Initial parameters of a critic without a model: a reader of the policy's confidence or hidden states."""
    outputs = value_head_of(critic.loss).outputs
    shape = {"members": critic.ensemble, "outputs": outputs, "signs": TRUTH_SIGNS if critic.privileged else 0}
    if critic.reads == "confidence":
        return init_confidence(key, **shape)
    return init_hidden(key, hidden_width(bare_model(section)), **shape)


def _on_base(
    section: ModelSettings, critic: CriticSettings, policy: Model, key: Key, mesh: Mesh
) -> tuple[Model, Params]:
    """A critic whose layers are the tensors of the policy's base, with the checkpoint's value head or a fresh one."""
    again, model = critic.checkpoint_layers, bare_model(section, critic)
    model = model if again is None else attrs.evolve(model, checkpoint_layers=again)
    model = place_beside(model, policy, mesh)
    if (kind := bases.base_kind(policy)) is not None:
        model = bases.in_codes(model, kind, next(iter(policy.forms.values())).dtype)
    directory = directory_of(section.path, "model.path")
    head = read_value_head(directory, torch.float32) or init_value_head(model, key.fold("value head"))
    wrong = [f"{name} has shape {list(x.shape)}" for name, x in head.items() if x.shape != model.whole_shapes[name]]
    if wrong:
        raise ValueError(f"model.path: the value head in {directory} has other outputs than the critic: {wrong}")
    base = lora.frozen_of(policy).params
    return model, {name: base[name] for name in model.shapes if name in base} | own_params(model, head, mesh)


def shape_of(section: ModelSettings, critic: CriticSettings | None = None) -> Model:
    """The policy's model without tensors, or the critic's if its section is given; with its adapter, if it has one."""
    model, own = bare_model(section, critic), section.lora
    if not (own.used if critic is None else own.of_critic):
        return model
    try:
        return lora.without_base(model, lora_of(own) if critic is None else _critic_spec(own))
    except ValueError as error:
        name = "exclude" if str(error).startswith("exclude") else "targets"
        if critic is not None and own.critic_path is not None:
            name = f"critic_path = {own.critic_path!r}"
        elif own.path is not None:
            name = f"path = {own.path!r}"
        raise ValueError(f"model.lora.{name}: {error}") from error


def _critic_spec(section: LoraSettings) -> Lora:
    """The description of the critic's adapter, from the settings or from the files that it starts from."""
    if section.critic_path is not None:
        return lora_files.read_config(Path(section.critic_path))
    spec, rank = lora_of(section), section.critic_rank
    return spec if rank is None else attrs.evolve(spec, rank=rank)


def check_export(
    section: ModelSettings, texts: PreTrainedTokenizerBase | ProcessorMixin, generation: GenerationConfig
) -> None:
    """Write all files of the policy's export but its weights, to a directory that is removed at once. Raises ValueError
    for targets of an adapter that match nothing, and for a model, a tokenizer or a processor that cannot be written."""
    model = shape_of(section)
    with tempfile.TemporaryDirectory(prefix="fppo_") as place:
        try:
            models.save_config(model, Path(place) / "model", tokenizer=texts, generation_config=generation)
        except Exception as error:  # transformers raises what it likes of what it cannot write
            raise ValueError(f"model.path: the policy could not be exported: {words_of(error, 400)}") from error


def exported_bytes(model: Model, itemsize: int) -> int:
    """Bytes of the weights that `export_policy` writes, at `itemsize` bytes per parameter; merged adapters take 4."""
    if model.frozen is None:
        return itemsize * sum(shape.numel() for shape in model.whole_shapes.values())
    if lora_files.obstacle(model) is not None:
        return 4 * sum(shape.numel() for shape in model.plain.whole_shapes.values())
    return itemsize * sum(model.whole_shapes[name].numel() for name in model.extents)


def export_policy(
    model: Model,
    params: Mapping[str, torch.Tensor],
    target: Path,
    *,
    base: str | None,
    texts: PreTrainedTokenizerBase | ProcessorMixin,
    generation: GenerationConfig | None,
    mesh: Mesh = LOCAL,
) -> None:
    """Write a policy as a Hugging Face directory. An adapter over `base` is written in PEFT's files or, if these cannot
    hold it, merged into its base as whole float32 weights.

    Every rank must call this on a mesh that cuts parameters.
    """
    if model.frozen is not None and base is not None and lora_files.obstacle(model) is None:
        lora_files.save(model, params, target, base=base, tokenizer=texts, mesh=mesh)
        return
    if model.frozen is not None:  # the device may have no room for whole weights
        place = None if mesh.cuts else torch.device("cpu")
        model, params = bases.widened(model, place), {name: x.to(place or x.device) for name, x in params.items()}
    models.save(model, dict(params), target, tokenizer=texts, generation_config=generation, mesh=mesh)


def policy_model(section: ModelSettings, critic: CriticSettings, key: Key, mesh: Mesh, device: torch.device) -> Model:
    """The policy's model without its trained parameters; an adapted one comes with its base, on the device."""
    return load_policy(section, critic, key, mesh, device)[0] if section.lora.used else bare_model(section)


def base_of_role(section: ModelSettings, role: str, model: Model | None) -> Base | None:
    """A checkpoint's description of the base under the actor's or the critic's adapter; None without an adapter."""
    if model is None or (frozen := model.frozen) is None:
        return None
    path = section.path if role == "actor" else section.critic_path or section.path
    kinds = [form.dtype for form in model.forms.values()] or [x.dtype for x in frozen.params.values()]
    dtype, kind = str(kinds[0]).removeprefix("torch."), bases.base_kind(model)
    dtype = dtype if kind is None else f"{kind} and {dtype}"
    return Base(source=path, digest=frozen.digest, dtype=dtype, adapter=words(frozen.lora))


def bases_of(bases: Mapping[str, Base | None]) -> dict[str, Base] | None:
    """Select the bases of adapted models, by role; None if no model is adapted."""
    return {role: base for role, base in bases.items() if base is not None} or None


def words(spec: Lora) -> str:
    """An adapter in words."""
    without = f" without {', '.join(spec.exclude)}" if spec.exclude else ""
    return f"rank {spec.rank}, alpha {spec.alpha:g}, {spec.scaling} scaling, of {', '.join(spec.targets)}{without}"
