"""Run a model on parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from fppo.models.adapted import FACTORS, Adapted, Parts
from fppo.models.codes import is_coded, values
from fppo.models.heads import vocabulary_head
from fppo.models.inner import OWN, Inner, inner_of
from fppo.models.lengths import longest_row, over_long
from fppo.models.model import Model, Params, Span, pass_dtype
from fppo.models.precision import KeepDouble
from fppo.models.recompute import recomputed
from fppo.models.routing import Routes
from fppo.models.seams import ApplyLayer, Attend, LayerSeam
from fppo.models.spans import Relay, absent
from fppo.models.vision_pass import Deep, Images, see
from fppo_kernels.table import Kernels
from fppo_kernels.transforms import outside

T = TypeVar("T")


class _Call(nn.Module):
    """A module that calls `fn(skeleton)`, so that functional_call binds the skeleton's parameters around it."""

    def __init__(self, skeleton: PreTrainedModel) -> None:
        super().__init__()
        self.skeleton = skeleton

    def forward(self, fn: Callable[[PreTrainedModel], Any]) -> Any:
        return fn(self.skeleton)


def bind(
    model: Model,
    params: Params,
    fn: Callable[[PreTrainedModel], T],
    *,
    kernels: Kernels | None = None,
    compiled: bool = False,
    partial: bool = False,
) -> T:
    """Call `fn(skeleton)` once, with `params` in the skeleton for the duration of the call, and return its result.

    The layers run on `kernels` (None: the model's own code), and are `compiled` or not. Raises ValueError for a missing
    parameter, unless `partial` is True: then `apply_layer` supplies the layers' parameters. Raises it also for a kernel
    without a module to replace.
    """
    return Bound.of(model, params, kernels=kernels, compiled=compiled, partial=partial)(fn)


@attrs.frozen(eq=False)
class Bound:
    """A model with parameters, prepared once and then called with many functions of its skeleton; for one call use
    `bind`. Threads may call it at the same time: each uses a skeleton of its own."""

    model: Model
    inner: Inner
    compiled: bool
    params: Params  # the base model's
    tensors: Mapping[str, Tensor]  # by their names in a skeleton

    @staticmethod
    def of(
        model: Model,
        params: Params,
        *,
        kernels: Kernels | None = None,
        compiled: bool = False,
        partial: bool = False,
    ) -> Bound:
        """Bind the model to these parameters; arguments and errors are those of `bind`."""
        if not partial:
            params = model.joined(params)
            missing = [name for name in model.all_shapes if name.startswith(model.prefix) and name not in params]
            if missing:
                raise ValueError(f"the model's parameters {missing} are missing")
        inner = OWN if kernels is None else inner_of(kernels)
        outside(lambda: model.own_skeleton(inner, compiled=compiled))  # built here, outside of transforms
        base_params = _base_params(model, params)
        device = next(iter(base_params.values())).device
        woven = _woven(model, model.prefix, base_params)
        tensors = {f"skeleton.{name}": x for name, x in {**woven, **model.constants_on(device)}.items()}
        return Bound(model, inner, compiled, base_params, tensors)

    def __call__(self, fn: Callable[[PreTrainedModel], T]) -> T:
        """Call `fn(skeleton)` with the parameters in the skeleton for the duration of the call."""
        skeleton = self.model.own_skeleton(self.inner, compiled=self.compiled)
        with self.precision():
            return functional_call(_Call(skeleton), dict(self.tensors), (fn,), tie_weights=self.model.shares)

    def precision(self) -> AbstractContextManager[Any]:
        """A context with the precision of a pass, for operations on these parameters outside of a skeleton: float64
        is kept if any parameter has it."""
        return _precision(self.params)


def in_compute_dtype(model: Model, params: Mapping[str, Tensor]) -> Params:
    """Cast parameters, whole or parts, to the compute dtype where a pass would, so that its numbers stay the same bit
    for bit. An adapted vocabulary head keeps its dtype, since its factors are merged before the cast."""
    head, _ = vocabulary_head(model)
    adapted = model.frozen is not None and head in model.frozen.places
    kept = {head, *(head + factor for factor in FACTORS)} if adapted else set[str]()
    return {name: x if name in kept else x.to(pass_dtype(model, name, x.dtype)) for name, x in params.items()}


def _base_params(model: Model, params: Params) -> Params:
    """The base model's parameters by their names in the skeleton, in the compute dtype."""
    start = len(model.prefix)
    return {name[start:]: _bound(model, name, x) for name, x in params.items() if name.startswith(model.prefix)}


def _bound(model: Model, name: str, x: Tensor) -> Tensor:
    """Cast a parameter to the dtype of a pass; buffers and quantised codes are only detached. A parameter that is added
    to a sum over ranks, like a whole bias, becomes zero on all ranks but the first."""
    if name in model.buffers or is_coded(name):
        return x.detach()
    layout = model.layout
    x = x * 0.0 if layout is not None and layout.rank and name in layout.once else x
    return x.to(pass_dtype(model, name, x.dtype))


def _woven(model: Model, start: str, tensors: Params) -> Params:
    """Replace codes and scales in `tensors`, whose names lack the prefix `start`, by quantised weights, and weights
    with factors by adapted ones."""
    tensors = values(tensors, model.forms, model.compute_dtype, start=start) if model.forms else tensors
    if model.frozen is None:
        return tensors
    woven = {name: x for name, x in tensors.items() if not name.endswith(FACTORS)}
    for name in [name for name in woven if start + name in model.frozen.places]:
        a, b = (tensors[name + factor] for factor in FACTORS)
        parts = Parts(woven[name], a, b, model.frozen.lora.scale, model.frozen.places[start + name])
        woven[name] = Adapted.of(parts)
    return woven


def _precision(params: Params) -> AbstractContextManager[Any]:
    return KeepDouble() if any(x.dtype == torch.float64 for x in params.values()) else nullcontext()


def forward(
    skeleton: PreTrainedModel,
    tokens: Tensor,
    positions: Tensor,
    *,
    attend: Attend,
    apply_layer: ApplyLayer | None = None,
    embedded: Tensor | None = None,
    routes: Routes | None = None,
    deep: Deep | None = None,
) -> Tensor:
    """Hidden states [B, S, H] after the last norm, of tokens [B, S] and positions [B, S] or [3, B, S]; call it inside
    `bind`. `embedded` [B, S, H] replaces the tokens' embeddings, and `deep` has image features for the first layers."""
    inputs = {"input_ids": tokens} if embedded is None else {"inputs_embeds": embedded}
    keywords = {"attend": attend, "apply_layer": apply_layer, "routes": routes}
    handed = next(x for x in skeleton.modules() if isinstance(x, LayerSeam)).handed
    given = nullcontext(keywords) if handed is None else handed.over(keywords)
    with given as beside:
        out = skeleton(**inputs, position_ids=positions, use_cache=False, return_dict=True, **beside, **(deep or {}))
    return out.last_hidden_state


def hidden_states(
    model: Model,
    params: Params,
    tokens: Tensor,
    positions: Tensor,
    *,
    attend: Attend,
    kernels: Kernels | None = None,
    apply_layer: ApplyLayer | None = None,
    received: Tensor | Images | None = None,
    routes: Routes | None = None,
    longest: int | None = None,
) -> Tensor:
    """Hidden states after the last norm: [N, H] of packed tokens [N], or [B, S, H] of rows [B, S].

    Positions have the tokens' shape, or a further first dimension of 3. `received` holds a pass's images, or the hidden
    states of the pipeline's previous stage.

    Operations inside the layers run on `kernels`, or as the model's own code. With `apply_layer` the layers' parameters
    need not be in `params`; it then casts and checkpoints. A stage of a pipeline returns the output of its last layer,
    normed on the last stage. `routes` records the routers' choices or replays those of another pass. `longest` is the
    length of the longest row; without it the host may wait for the device. Raises ValueError for rows longer than
    `longest_row`, and for a kernel without a module to replace.
    """
    _check_length(model, positions, longest)
    images, received = (received, None) if isinstance(received, Images) else (None, received)
    packed = tokens.ndim == 1
    if packed:
        tokens, positions = tokens[None], positions.unsqueeze(-2)
        received = None if received is None else received[None]
    span = _only_span(model, received)
    params = model.joined(params) if apply_layer is None else params
    embedded = None if received is None else received.detach()
    whole = apply_layer is None and not model.checkpoint_layers
    if apply_layer is None and model.checkpoint_layers:
        inner = {name: x for name, x in params.items() if model.layer_of(name) is not None}
        apply_layer = checkpointed_layers(model, {name[len(model.prefix) :]: x for name, x in inner.items()})
        params = {name: x for name, x in params.items() if name not in inner}
    relay = None
    if span is not None:
        apply_layer = relay = Relay(span, received, apply_layer)
        params = params | absent(span, next(iter(params.values())) if received is None else received)

    def run(skeleton: PreTrainedModel) -> Tensor:
        inner, deep = (embedded, None) if images is None else see(model, skeleton, tokens, images)
        text = model.text_of(skeleton)
        return forward(
            text, tokens, positions, attend=attend, apply_layer=apply_layer, embedded=inner, routes=routes, deep=deep
        )

    out = bind(model, params, run, kernels=kernels, compiled=model.compile_layers, partial=not whole)
    if relay is not None:
        out = relay.result(out)
    return out[0] if packed else out


def _only_span(model: Model, received: Tensor | None) -> Span | None:
    """The single stage of a model on a pipeline axis; None without such an axis. Raises ValueError for several stages
    on this rank, for a first stage with `received` hidden states, and for a later one without them."""
    if not model.spans:
        return None
    (span, *others), layers = model.spans, [list(span.layers) for span in model.spans]
    if others or (received is None) != (span.stage == 0):
        raise ValueError(
            f"this rank has the layers {layers} of a model on a pipeline axis, which run only together with those of "
            "the other ranks: call compute_outputs or an update on all of them"
        )
    return span


def _check_length(model: Model, positions: Tensor, longest: int | None) -> None:
    limit = longest_row(model.config)
    if limit is None:
        return
    if longest is None:
        if type(positions) is not Tensor or positions.is_meta:  # a fake tensor has no numbers
            return
        longest = int(positions.max()) + 1
    if longest > limit:
        raise ValueError(f"a row of {longest} tokens: " + over_long(model.config, limit))


def call_layer(
    model: Model,
    index: int,
    layer: nn.Module,
    layer_params: Params,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """The layer's output on `layer_params`, named as inside the layer and cast here to the compute dtype.

    No `bind` is needed, so a backward pass may run it again.
    """
    start = f"{model.layers[index]}."
    tensors = {name: _bound(model, f"{model.prefix}{start}{name}", x) for name, x in layer_params.items()}
    device = next(iter(tensors.values())).device
    constants = {name[len(start) :]: x for name, x in model.constants_on(device).items() if name.startswith(start)}
    with _precision(tensors):
        woven = _woven(model, model.prefix + start, tensors)
        return functional_call(layer, {**woven, **constants}, args, dict(kwargs), tie_weights=model.shares)


def checkpointed_layers(model: Model, layer_params: Mapping[str, Tensor]) -> ApplyLayer:
    """An `apply_layer` that recomputes layers in the backward pass, as the model's `checkpoint_layers` says. Parameters
    are named as in the skeleton.

    The cast to the compute dtype is recomputed too: no low-precision copy of the weights outlives its layer.
    """

    def apply_layer(index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        start = f"{model.layers[index]}."
        own = {name[len(start) :]: x for name, x in layer_params.items() if name.startswith(start)}

        def run(tensors: Params, *args: Any, **kwargs: Any) -> Any:
            return call_layer(model, index, layer, tensors, args, kwargs)

        return recomputed(run, model.checkpoint_layers, own, *args, **kwargs)

    return apply_layer
