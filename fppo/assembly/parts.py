"""The parts of a run, as its settings name them: device, mesh, models, kernels, micro-batching."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import attrs
import torch
from transformers import PreTrainedConfig
from transformers.utils import logging as transformers_logging

from fppo import devices, models, tree
from fppo.assembly.functions import value_head_of
from fppo.assembly.texts import config_of, config_place, directory_of
from fppo.fields import only
from fppo.fleet import Here
from fppo.key import Key
from fppo.models import lora
from fppo.models.bases import check_cuts
from fppo.models.inner import inner_of
from fppo.models.lengths import over_long, positions
from fppo.models.model import Model, Params, state_dtype
from fppo.models.narrow import narrow
from fppo.models.spans import layer_spans
from fppo.models.vision import takes_images
from fppo.runtime.mesh import Mesh, Sharding
from fppo.runtime.offload import Lane
from fppo.settings.learning import ActorSettings, CriticSettings
from fppo.settings.model import ModelSettings, Offload
from fppo.settings.placement import (
    AxesSettings,
    MeshSettings,
    PlacementSettings,
    places_of,
    pools_of,
    ranks_without_gpus,
)
from fppo.settings.rollout import RolloutSettings
from fppo.settings.train import DataSettings, EvalSettings
from fppo.steps.micro_batching import MicroBatching
from fppo.workers.imports import imported, search
from fppo_kernels import table as tables
from fppo_kernels.collectives import Axis
from fppo_kernels.table import Kernels


def device_of(name: str, placement: PlacementSettings) -> torch.device:
    """The device of that name; "auto": an accelerator if there is one, unless roles are in pools without GPUs. Raises
    ValueError if this machine does not have it."""
    if name == "auto" and ranks_without_gpus(placement):
        name = "cpu"
    return devices.named(name, f"device = {name!r}")


def axes_at(placement: PlacementSettings, role: str, otherwise: AxesSettings) -> AxesSettings:
    """The axes of a role's pool; `otherwise`, those of the run's mesh, for a role without a pool."""
    return pools_of(placement).get(places_of(placement).get(role, "")) or otherwise


def mesh_at(placement: PlacementSettings, role: str, mesh: Mesh) -> tuple[str, Mesh]:
    """The name of a role's pool as a prefix of messages, and a mesh of its axes without process groups; without a pool
    an empty prefix and `mesh`."""
    name = places_of(placement).get(role)
    if name is None:
        return "", mesh
    pool = pools_of(placement)[name]
    axes = {axis: Axis(size) for axis, size in pool.axes.items()}
    return f"placement.pools.{name}: ", Mesh(axes, virtual_stages=pool.virtual_stages)


def sharding_of(mesh: MeshSettings) -> Sharding:
    """How parameters are cut over the shard axis."""
    return Sharding(stage=mesh.stage, reduce_dtype=getattr(torch, mesh.reduce_dtype), prefetch=mesh.prefetch)


def bare_model(section: ModelSettings, critic: CriticSettings | None = None) -> Model:
    """The policy's model without parameters, or the critic's if its section is given; only a config is read."""
    name, path, dtype = "model.path", section.path, section.compute_dtype
    if critic is not None:
        dtype = critic.compute_dtype or dtype
        if section.critic_path is not None:
            name, path = "model.critic_path", section.critic_path
    model = models.build(
        config_of(section, config_place(path, name)),
        "lm" if critic is None else "value",
        outputs=1 if critic is None else value_head_of(critic.loss).outputs,
        compute_dtype=compute_dtype_of(dtype),
        **only(section, "checkpoint_layers", "trust_remote_code"),
    )
    return _as_set(model, section)


def load_actor(section: ModelSettings, critic: CriticSettings, mesh: Mesh) -> tuple[Model, Params]:
    """The policy and this rank's part of its parameters, in float32 or, as the base under an adapter, in the dtype that
    `base_dtype` gives."""
    kept = base_dtype(section, critic) if section.lora.used else torch.float32
    model, params = _loader(section, mesh)(directory_of(section.path, "model.path"), dtype=kept)
    return _as_set(model, section), params


def _as_set(model: Model, section: ModelSettings) -> Model:
    """The model, set to compile its layers, slice its MLPs and train its vision tower as the settings say."""
    vision = model.vision and attrs.evolve(model.vision, trains=not section.freeze_vision)
    return attrs.evolve(model, **only(section, "compile_layers", "mlp_slice_tokens"), vision=vision)


def base_dtype(section: ModelSettings, critic: CriticSettings) -> torch.dtype:
    """The dtype of the base under the policy's adapter, which no update changes: the policy's compute dtype, or float32
    if policy and critic share the base and compute in different dtypes."""
    names = {section.compute_dtype}
    names |= {critic.compute_dtype or section.compute_dtype} if section.shares_base else set()
    return getattr(torch, names.pop()) if len(names) == 1 else torch.float32


def load_critic(section: ModelSettings, critic: CriticSettings, key: Key, mesh: Mesh) -> tuple[Model, Params]:
    """A critic with a model, and its parameters."""
    setting, again = "critic_path" if section.critic_path else "path", critic.checkpoint_layers
    model, params = _loader(section, mesh)(
        directory_of(section.critic_path or section.path, f"model.{setting}"),
        "value",
        key=key.fold("value head"),
        outputs=value_head_of(critic.loss).outputs,
        compute_dtype=compute_dtype_of(critic.compute_dtype or section.compute_dtype),
        checkpoint_layers=section.checkpoint_layers if again is None else again,
        dtype=base_dtype(section, critic) if section.shares_base else torch.float32,
    )
    return _as_set(model, section), params


def load_reference(
    section: ModelSettings, mesh: Mesh, policy: tuple[Model, Params] | None = None
) -> tuple[Model, Params]:
    """The reference: the model that `model.ref_path` names or, without that setting, the policy before its first
    update, as a copy of `policy` if given, else loaded. If the policy has an adapter, the reference may be its base
    alone: where the adapter changes nothing yet, or the settings say so."""
    dtype, setting = getattr(torch, section.ref_dtype), "path" if section.ref_path is None else "ref_path"
    if policy is not None and section.ref_path is None:
        model, params = policy
        if model.frozen is not None and section.lora.reference_is_base:
            return lora.base_of(model), {}
        if model.frozen is not None:
            return model, {name: x.clone() for name, x in params.items()}
        return model, {name: x.to(state_dtype(model, name, dtype), copy=True) for name, x in params.items()}
    path = section.path if section.ref_path is None else section.ref_path
    model, params = _loader(section, mesh)(directory_of(path, f"model.{setting}"), dtype=dtype)
    return _as_set(model, section), params


def load_teacher(section: ModelSettings, mesh: Mesh, place: tuple[str, str]) -> tuple[Model, Params]:
    """A teacher, a model of its own, and this rank's part of its parameters. `place` is its path, and the setting that
    gives it."""
    directory = directory_of(*place)
    model, params = _loader(section, mesh)(directory, dtype=getattr(torch, section.teacher_dtype))
    return _as_set(model, section), params


def _loader(section: ModelSettings, mesh: Mesh) -> Callable[..., tuple[Model, Params]]:
    how = only(section, "checkpoint_layers", "trust_remote_code", "config")
    return partial(models.load, compute_dtype=compute_dtype_of(section.compute_dtype), mesh=mesh, **how)


def offload_of(common: Offload, own: Offload | bool | None) -> Offload:
    """The part of a role that is on the host between uses: nothing, the optimizer's moments, or all of it. A role whose
    `own` setting is None has the `common` one."""
    if own is None:
        return common
    return ("all" if own else "none") if isinstance(own, bool) else own


def on_device(params: Params, device: torch.device) -> Params:
    """The parameters on the device."""
    return tree.map(lambda x: x.to(device), params)


def compute_dtype_of(name: str) -> torch.dtype | None:
    """The dtype by name that parameters are cast to; None for float32, which they are kept in."""
    return None if name == "float32" else getattr(torch, name)


def check_mesh(config: PreTrainedConfig, pool: str, mesh: Mesh) -> None:
    """Raises ValueError for fewer layers than stages, an expert axis that does not divide the experts, a tensor axis
    that does not divide the model's sizes, or a sequence axis that does not divide the remaining heads. `pool` begins
    messages."""
    try:
        _check_mesh(config, mesh)
    except ValueError as error:
        raise ValueError(f"{pool}{error}") from error


def _check_mesh(config: PreTrainedConfig, mesh: Mesh) -> None:
    stages, virtual = mesh["pipeline"].size, mesh.virtual_stages
    layers = config.get_text_config().num_hidden_layers
    models.check_rows_whole(config, {name: axis.size for name, axis in mesh.axes.items()})
    if stages * virtual > layers:
        of = f" and mesh.virtual_stages = {virtual} make {stages * virtual} stages" if virtual > 1 else ""
        raise ValueError(
            f"mesh.pipeline = {stages}{of}: the model has {layers} layers, and a stage has one at least; give at most "
            f"{layers} stages"
        )
    if takes_images(config) and stages > 1:
        try:
            layer_spans(models.build(config), stages * virtual)
        except ValueError as error:
            raise ValueError(f"mesh.pipeline = {stages}: {error}") from error
    ranks, tensor, expert = (mesh[name].size for name in ("sequence", "tensor", "expert"))
    text, axis = config.get_text_config(), f"mesh.expert = {expert}"
    try:
        if expert > 1:
            models.dispatched(models.build(config), expert)
        if ranks == tensor == 1:
            return
        axis = f"mesh.tensor = {tensor}"
        heads = (text if tensor == 1 else narrow(text, tensor)).num_attention_heads
    except ValueError as error:
        raise ValueError(f"{axis}: {error}") from error
    if heads % ranks:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0]
        left = f" that mesh.tensor = {tensor} leaves each rank" if tensor > 1 else ""
        raise ValueError(
            f"mesh.sequence = {ranks} does not divide the model's {heads} attention heads{left}; give one of {fitting}"
        )


def check_base(kind: Literal["float", "int8", "nf4"], config: PreTrainedConfig, pool: str, mesh: Mesh) -> None:
    """Raises ValueError if the mesh would cut a quantised base within a block of one scale. `pool` begins messages."""
    if kind == "float" or mesh["tensor"].size == 1:
        return
    try:
        check_cuts(models.build(config), kind, mesh)
    except ValueError as error:
        raise ValueError(f"{pool}model.lora.base = {kind!r}: {error}") from error


def check_vision(section: ModelSettings, config: PreTrainedConfig) -> None:
    """Raises ValueError for settings of a vision tower that the model does not have."""
    if section.freeze_vision and not takes_images(config):
        raise ValueError(
            f"model.freeze_vision = True: a model of type {config.model_type!r} takes no images; leave it out"
        )


def check_length(
    config: PreTrainedConfig, rows: DataSettings, rollout: RolloutSettings, how: EvalSettings, privileged: int = 0
) -> None:
    """Raises ValueError if rows, with a critic's `privileged` tokens, may become longer than `models.longest_row`:
    beyond it the model computes another function."""
    limit = models.longest_row(config.get_text_config())
    prompt, response, name = rows.max_prompt_tokens, rollout.max_tokens, "rollout.max_tokens"
    if (rows.has_held_out or rollout.environment.has_held_out) and (how.max_tokens or 0) > response:
        response, name = how.max_tokens or 0, "eval.max_tokens"
    longest = privileged + prompt + response
    if limit is not None and longest > limit:
        before = f"critic.privileged = {privileged}, " if privileged else ""
        raise ValueError(
            f"{before}data.max_prompt_tokens = {prompt} and {name} = {response} allow rows of {longest} "
            f"tokens: {over_long(config, limit)}"
        )


def check_positions(config: PreTrainedConfig, prompt: int, named: tuple[str, int], *, place: tuple[str, str]) -> None:
    """Raises ValueError if a prompt of `prompt` tokens and a response as long as `named` (setting, tokens) allows
    exceed the positions of the model at `place` (path, setting)."""
    (name, response), most = named, positions(config)
    if most is not None and prompt + response > most:
        total = prompt + response
        room = f"give at most {most - prompt}" if prompt < most else "leave long prompts out (data.max_prompt_tokens)"
        made = f"{place[1]} = {place[0]!r} has {most} positions (max_position_embeddings)"
        raise ValueError(
            f"{name} = {response}: with the longest prompt of {prompt} tokens a row may have {total}, and {made}; "
            f"{room}, or, where positions are rotary, model.config = {{max_position_embeddings = {total}}}"
        )


def kernels_need_check(names: Mapping[str, str], *, compiled: bool) -> bool:
    """Whether the settings' kernels must be checked against the models: if one lacks a feature or replaces layers, or
    if layers are compiled."""
    table = kernel_table(names)
    named = [table[op].get(names[f"model.{op}"]) for op in ("attention", "decode_attention", "log_probs")]
    inside = any(names[f"model.{op}"] != tables.DEFAULTS[op] for op in tables.INSIDE)
    return any(kernel is not None and kernel.lacks for kernel in named) or inside or compiled


def check_kernels(names: Mapping[str, str], model: Model, axes: AxesSettings) -> None:
    """Raises ValueError if a kernel that the settings name lacks a feature that the model needs on a mesh of these
    axes, does not support the model's dtype, or replaces a layer that the model does not have."""
    dtype = str(model.compute_dtype or torch.float32).removeprefix("torch.")
    table, gathers = kernel_table(names), axes.context > 1 and not axes.ring
    attention = models.attention_needs(model) | ({"key_lengths"} if gathers else set())
    needs = {"attention": attention, **dict.fromkeys(("decode_attention", "log_probs", *tables.INSIDE), ())}
    for op, features in needs.items():
        _kernel(f"model.{op}", names[f"model.{op}"], table, {*features, dtype})
    model.own_skeleton(inner_of(kernels_of(names)), compiled=model.compile_layers)


def kernel_table(names: Mapping[str, str]) -> tables.Table:
    """The built-in kernels, and those that settings name as module:function. Raises ValueError for a name that is no
    kernel."""
    table = tables.BUILTIN
    for setting, name in names.items():
        if ":" in name:
            table = with_own(table, setting.rpartition(".")[2], name, name, setting)
    return table


def with_own(table: tables.Table, op: str, name: str, place: str, setting: str) -> tables.Table:
    """The table with the kernel at `place` (module:function) added as `name`. Raises ValueError, naming the setting, if
    it is no kernel."""
    return tables.register(op, name, tables.own(op, imported(place, setting)), table=table)


def kernels_of(names: Mapping[str, str]) -> Kernels:
    """The kernels that settings name; `names` has each kernel's name by setting (`settings.modules.kernels_named`)."""
    table = kernel_table(names)
    found = {setting.rpartition(".")[2]: _kernel(setting, name, table) for setting, name in names.items()}
    return attrs.evolve(Kernels.named(), **found)


def _kernel(setting: str, name: str, table: tables.Table, needs: Collection[str] = ()) -> Callable[..., Any]:
    """The kernel that a setting names. Raises ValueError, naming the setting, for an unknown kernel, and for one that
    cannot run here or lacks what it `needs`."""
    try:
        return tables.get(setting.rpartition(".")[2], name, needs=needs, table=table)
    except ValueError as error:
        raise ValueError(f"{setting} = {name!r}: {error}") from error


@attrs.frozen
class Tools:
    """The kernels and the lane of copies that all roles of one process use."""

    kernels: Kernels
    lane: Lane


def make_tools(here: Here, names: Mapping[str, str], module_dirs: Sequence[str]) -> Tools:
    """The tools of this process, a rank of a group. From now on it imports the user's functions from `module_dirs` too;
    `names` has each kernel's name by setting."""
    search(module_dirs)
    transformers_logging.disable_progress_bar()  # the controller reports progress
    return Tools(kernels_of(names), Lane(here.device))


def micro_batching_of(section: ActorSettings | CriticSettings) -> MicroBatching:
    """The micro-batching that a section asks for."""
    size, budget = section.passes
    auto = size is None and section.token_budget == "auto"
    return MicroBatching(size=size, token_budget=budget, halve_on_oom=auto)


def forward_micro_batching_of(section: ModelSettings, actor: ActorSettings) -> MicroBatching:
    """The micro-batching of passes without a gradient: the model section's own, or else the actor's."""
    budget = section.forward_token_budget
    return micro_batching_of(actor) if budget is None else MicroBatching(token_budget=budget)
