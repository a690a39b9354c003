"""The parts of a run, as its settings name them: device, mesh, models, kernels, micro-batching."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import attrs
import torch
from transformers import PreTrainedConfig

from fppo import models, tree
from fppo.assembly.texts import config_of, config_place, directory_of
from fppo.key import Key
from fppo.losses import ValueHead
from fppo.models import lora
from fppo.models.bases import check_cuts
from fppo.models.inner import inner_of
from fppo.models.lengths import over_long
from fppo.models.model import HeadKind, Model, Params, state_dtype
from fppo.models.narrow import narrow
from fppo.models.spans import layer_spans
from fppo.models.vision import takes_images
from fppo.runtime.devices import named_device
from fppo.runtime.mesh import Mesh, Sharding
from fppo.settings import checks, files
from fppo.settings.component import bound
from fppo.settings.learning import ActorSettings, CriticSettings
from fppo.settings.modules import kernels_named
from fppo.settings.placement import places_of, pools_of, ranks_without_gpus
from fppo.settings.tables import VALUE_HEADS
from fppo.settings.train import TrainSettings
from fppo.steps.micro_batching import MicroBatching
from fppo.workers.imports import imported
from fppo_kernels import table as tables
from fppo_kernels.collectives import Axis
from fppo_kernels.table import Kernels

Role = Literal["actor", "critic", "ref", "reward model", "judge"]
Offload = Literal["none", "moments", "all"]


def device_of(settings: TrainSettings) -> torch.device:
    """The device that the settings name. Raises ValueError if it is not there."""
    name = settings.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() and not ranks_without_gpus(settings.placement) else "cpu"
    return named_device(name, f"device = {name!r}")


def mesh_sizes(settings: TrainSettings, world: int) -> dict[str, int]:
    """The axes for `world` processes, checked. Raises SettingsError if the settings do not fit them."""
    if wrong := checks.mesh_problems(settings, world):
        raise files.SettingsError(wrong)
    mesh = settings.mesh
    return mesh.sizes(mesh.shard or world // mesh.others)


def mesh_at(settings: TrainSettings, role: str, mesh: Mesh) -> tuple[str, Mesh]:
    """The axes of a role's pool, a mesh without groups, with words that name it; without a pool none, and `mesh`."""
    name = places_of(settings.placement).get(role)
    if name is None:
        return "", mesh
    pool = pools_of(settings.placement)[name]
    axes = {axis: Axis(size) for axis, size in pool.axes.items()}
    return f"placement.pools.{name}: ", Mesh(axes, virtual_stages=pool.virtual_stages)


def sharding_of(settings: TrainSettings) -> Sharding:
    """How parameters are cut over the shard axis."""
    mesh = settings.mesh
    return Sharding(stage=mesh.stage, reduce_dtype=getattr(torch, mesh.reduce_dtype), prefetch=mesh.prefetch)


def bare_model(settings: TrainSettings, head: HeadKind = "lm") -> Model:
    """The policy's model, or with a value head the critic's, without parameters: it takes only a config."""
    section = settings.model
    name, path = ("model.path", section.path)
    if head == "value" and section.critic_path is not None:
        name, path = "model.critic_path", section.critic_path
    model = models.build(
        config_of(section, config_place(path, name)),
        head,
        outputs=1 if head == "lm" else value_head_of(settings).outputs,
        compute_dtype=compute_dtype_of((head == "value" and settings.critic.compute_dtype) or section.compute_dtype),
        checkpoint_layers=section.checkpoint_layers,
        trust_remote_code=section.trust_remote_code,
    )
    return _as_set(model, settings)


def load_actor(settings: TrainSettings, mesh: Mesh) -> tuple[Model, Params]:
    """The policy: its parameters are this rank's part of them on a mesh that cuts them. What adapters stand on is in
    the dtype that it is computed with."""
    kept = base_dtype(settings) if settings.model.lora.used else torch.float32
    model, params = _loader(settings, mesh)(directory_of(settings.model.path, "model.path"), dtype=kept)
    return _as_set(model, settings), params


def _as_set(model: Model, settings: TrainSettings) -> Model:
    """The model with what settings say of how it runs and what of it is trained."""
    vision = model.vision and attrs.evolve(model.vision, trains=not settings.model.freeze_vision)
    return attrs.evolve(model, compile_layers=settings.model.compile_layers, vision=vision)


def base_dtype(settings: TrainSettings) -> torch.dtype:
    """The dtype of the base under the policy's adapter: no update changes it, so it is no wider than the passes."""
    names = {settings.model.compute_dtype}
    names |= {settings.critic.compute_dtype or settings.model.compute_dtype} if settings.model.shares_base else set()
    return getattr(torch, names.pop()) if len(names) == 1 else torch.float32


def load_critic(settings: TrainSettings, key: Key, mesh: Mesh) -> tuple[Model, Params]:
    """The critic that is a model, and its parameters."""
    section, role = settings.model, settings.critic
    setting, recompute = "critic_path" if section.critic_path else "path", role.checkpoint_layers
    model, params = _loader(settings, mesh)(
        directory_of(section.critic_path or section.path, f"model.{setting}"),
        "value",
        key=key.fold("value head"),
        outputs=value_head_of(settings).outputs,
        compute_dtype=compute_dtype_of(role.compute_dtype or section.compute_dtype),
        checkpoint_layers=section.checkpoint_layers if recompute is None else recompute,
        dtype=base_dtype(settings) if settings.model.shares_base else torch.float32,
    )
    return _as_set(model, settings), params


def load_reference(
    settings: TrainSettings, mesh: Mesh, policy: tuple[Model, Params] | None = None
) -> tuple[Model, Params]:
    """The reference: a model of its own, or the `policy` before its first update, copied if it is at hand; of an
    adapted one the base alone, where that is the same or the settings say so."""
    section = settings.model
    dtype, setting = getattr(torch, section.ref_dtype), "path" if section.ref_path is None else "ref_path"
    if policy is not None and section.ref_path is None:
        model, params = policy
        if model.frozen is not None and settings.model.lora.reference_is_base:
            return lora.base_of(model), {}
        if model.frozen is not None:
            return model, {name: x.clone() for name, x in params.items()}
        return model, {name: x.to(state_dtype(model, name, dtype), copy=True) for name, x in params.items()}
    path = section.path if section.ref_path is None else section.ref_path
    model, params = _loader(settings, mesh)(directory_of(path, f"model.{setting}"), dtype=dtype)
    model = _as_set(model, settings)
    return (model if policy is None or policy[0].frozen is not None else policy[0]), params


def _loader(settings: TrainSettings, mesh: Mesh) -> Callable[..., tuple[Model, Params]]:
    section = settings.model
    return partial(
        models.load,
        compute_dtype=compute_dtype_of(section.compute_dtype),
        checkpoint_layers=section.checkpoint_layers,
        trust_remote_code=section.trust_remote_code,
        config=section.config,
        mesh=mesh,
    )


def value_head_of(settings: TrainSettings) -> ValueHead:
    """The meaning of the critic's outputs, and its loss. Raises ValueError for a function that makes no value head."""
    (make,) = bound(settings.critic.loss, VALUE_HEADS, "critic.loss")
    head = make()
    if not isinstance(head, ValueHead):
        made = f"it returned a {type(head).__name__}, and must return an fppo.losses.ValueHead"
        raise ValueError(f"critic.loss.name = {settings.critic.loss.name!r}: {made}")
    return head


def offload_of(settings: TrainSettings, role: Role) -> Offload:
    """The part of a role on the host between uses: nothing, the optimizer's moments, or all of it."""
    common = settings.model.offload
    match role:
        case "actor":
            return common
        case "critic":
            return settings.critic.offload or common if settings.uses_critic_model else "none"
        case "ref":
            own = settings.model.ref_offload
        case "reward model":
            own = settings.reward.model.offload
        case "judge":
            own = settings.reward.judge.offload
    return common if own is None else "all" if own else "none"


def on_device(params: Params, device: torch.device) -> Params:
    """The parameters on the device."""
    return tree.map(lambda x: x.to(device), params)


def compute_dtype_of(name: str) -> torch.dtype | None:
    """The dtype by name that parameters are cast to; None for float32, which they are kept in."""
    return None if name == "float32" else getattr(torch, name)


def check_mesh(config: PreTrainedConfig, pool: str, mesh: Mesh) -> None:
    """Raises ValueError, of a pool that `pool` names, for fewer layers than stages, an expert axis that does not divide
    the experts, a tensor axis not the model's sizes, or a sequence axis not the attention heads that this leaves."""
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


def check_base(settings: TrainSettings, config: PreTrainedConfig, pool: str, mesh: Mesh) -> None:
    """Raises ValueError, of a pool that `pool` names, if the mesh would cut a quantised base within what has one
    scale."""
    kind = settings.model.lora.base
    if kind == "float" or mesh["tensor"].size == 1:
        return
    try:
        check_cuts(models.build(config), kind, mesh)
    except ValueError as error:
        raise ValueError(f"{pool}model.lora.base = {kind!r}: {error}") from error


def check_vision(settings: TrainSettings, config: PreTrainedConfig) -> None:
    """Raises ValueError for settings of a vision tower that the model does not have."""
    if settings.model.freeze_vision and not takes_images(config):
        raise ValueError(
            f"model.freeze_vision = True: a model of type {config.model_type!r} takes no images; leave it out"
        )


def check_length(settings: TrainSettings, config: PreTrainedConfig, *, critic: bool = False) -> None:
    """Raises ValueError if rows may grow longer than those for which the model is one function; `critic` is whether it
    is the critic's model too."""
    limit = models.longest_row(config.get_text_config())
    prompt, response, name = settings.data.max_prompt_tokens, settings.rollout.max_tokens, "rollout.max_tokens"
    if settings.has_held_out and (settings.eval.max_tokens or 0) > response:
        response, name = settings.eval.max_tokens or 0, "eval.max_tokens"
    privileged = settings.critic.privileged if critic else 0
    longest = privileged + prompt + response
    if limit is not None and longest > limit:
        before = f"critic.privileged = {privileged}, " if privileged else ""
        raise ValueError(
            f"{before}data.max_prompt_tokens = {prompt} and {name} = {response} allow rows of {longest} "
            f"tokens: {over_long(config, limit)}"
        )


def lacks_something(settings: TrainSettings) -> bool:
    """Whether a kernel that the settings name may have not what some model asks of it, or no place in it."""
    section = settings.model
    table = kernel_table(settings)
    named = [table[op].get(getattr(section, op)) for op in ("attention", "decode_attention", "log_probs")]
    inside = any(getattr(section, op) != tables.DEFAULTS[op] for op in tables.INSIDE)
    return any(kernel is not None and kernel.lacks for kernel in named) or inside or section.compile_layers


def check_kernels(settings: TrainSettings, model: Model, role: str = "actor") -> None:
    """Raises ValueError if a kernel that the settings name has not what the model asks of it where the role is, not its
    dtype, or no place in it."""
    dtype = str(model.compute_dtype or torch.float32).removeprefix("torch.")
    table = kernel_table(settings)
    mesh = pools_of(settings.placement).get(places_of(settings.placement).get(role, "")) or settings.mesh
    gathers = mesh.context > 1 and not mesh.ring
    attention = models.attention_needs(model) | ({"key_lengths"} if gathers else set())
    needs = {"attention": attention, **dict.fromkeys(("decode_attention", "log_probs", *tables.INSIDE), ())}
    for op, features in needs.items():
        tables.get(op, getattr(settings.model, op), needs={*features, dtype}, table=table)
    model.own_skeleton(inner_of(kernels_of(settings)), compiled=model.compile_layers)


def kernel_table(settings: TrainSettings) -> tables.Table:
    """The built-in kernels, and those that the settings name as module:function. Raises ValueError for what is none."""
    table = tables.BUILTIN
    for setting, name in kernels_named(settings).items():
        if ":" in name:
            op = setting.rpartition(".")[2]
            kernel = tables.own(op, imported(name, setting))
            table = tables.register(op, name, kernel, table=table)
    return table


def kernels_of(settings: TrainSettings) -> Kernels:
    """The kernels that the settings name."""
    names = {setting.rpartition(".")[2]: name for setting, name in kernels_named(settings).items()}
    return Kernels.named(**names, table=kernel_table(settings))


def micro_batching_of(section: ActorSettings | CriticSettings) -> MicroBatching:
    """The micro-batching that a section asks for."""
    size, budget = section.passes
    return MicroBatching(size=size, token_budget=budget)


def forward_micro_batching_of(settings: TrainSettings) -> MicroBatching:
    """The micro-batching of passes without a gradient."""
    budget = settings.model.forward_token_budget
    return micro_batching_of(settings.actor) if budget is None else MicroBatching(token_budget=budget)
