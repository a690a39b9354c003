"""Routers of mixtures of experts: record a pass's choices of experts, or replay those of another pass.

Routers choose by torch.topk. A replay returns the other pass's experts from topk, so that each family's own scores,
normalisation and gradients stay (router replay, arXiv:2510.11370).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from fppo.models.seams import take_place


@attrs.frozen
class Router:
    """A router: its layer, the numbers of experts and of chosen ones, and the name of its bias if that is a buffer,
    which no gradient trains."""

    layer: int
    experts: int
    chosen: int
    bias: str | None


class Routed(NamedTuple):
    """The outputs of a router for N tokens."""

    logits: Tensor  # [N, E]
    chosen: Tensor  # [N, k] int64
    own: Tensor  # [N, k] int64: its choice without replay, if requested; else `chosen`


class Routes:
    """The choices of experts that the routers make in one pass, by router index (`routed`). If given, the choices
    `again` [N, L, k] int64 are replayed; with `own` the choices without replay are recorded too."""

    def __init__(self, again: Tensor | None = None, *, own: bool = False) -> None:
        self.again, self.own = again, own
        self.routed: dict[int, Routed] = {}

    def through(self, layer: nn.Module) -> nn.Module:
        """Wrap a layer so that its routers record or replay choices; a layer without routers is returned as it is."""
        routers = [module for module in layer.modules() if isinstance(module, RouterSeam)]
        return RoutedLayer(layer, routers, self) if routers else layer


class RoutedLayer(nn.Module):
    """Replaces a layer for one pass, in which its routers record or replay choices, also if the layer is recomputed."""

    def __init__(self, layer: nn.Module, routers: Sequence[RouterSeam], routes: Routes) -> None:
        super().__init__()
        take_place(self, layer)
        self._routed = (layer, routers, routes)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layer, routers, routes = self._routed
        for router in routers:
            router._routes = routes
        try:
            return layer(*args, **kwargs)
        finally:
            for router in routers:
                router._routes = None


class RouterSeam(nn.Module):
    """Replaces a router, and records or replays choices while a `RoutedLayer` gives it `Routes`; else it runs as it
    is."""

    def __init__(self, number: int, router: nn.Module, experts: int) -> None:
        super().__init__()
        take_place(self, router)
        self._inner = (router,)  # in a tuple, it is no child
        self._number, self._experts = number, experts
        self._routes: Routes | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        (router,), routes = self._inner, self._routes
        if routes is None:
            return router(*args, **kwargs)
        choose = None
        if routes.again is None:
            out = router(*args, **kwargs)
        else:
            with Choose(routes.again[:, self._number].long(), self._experts, own=routes.own) as choose:
                out = router(*args, **kwargs)
            if not choose.asked:
                raise ValueError(f"{type(router).__name__} chooses experts without torch.topk: fppo cannot replay it")
        logits, _, chosen = out
        own = chosen if choose is None or choose.own is None else choose.own
        routes.routed.setdefault(self._number, Routed(logits, chosen, own))  # recomputation gives the same
        return out


class Choose(TorchFunctionMode):
    """A context in which the topk of scores [N, `experts`] gives the indices `chosen` [N, k]; with `own` the indices of
    the real topk are recorded."""

    def __init__(self, chosen: Tensor, experts: int, *, own: bool = False) -> None:
        super().__init__()
        self._chosen, self._experts, self._asks_own, self.asked = chosen, experts, own, False
        self.own: Tensor | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.topk, Tensor.topk) and args[0].shape[1:] == (self._experts,):  # others are of groups
            if len(args[0]) != len(self._chosen):
                raise ValueError(
                    f"a router gets {len(args[0])} tokens, and the replayed experts of {len(self._chosen)}"
                )
            self.asked = True
            if self._asks_own:
                self.own = args[0].detach().topk(self._chosen.shape[1]).indices
            return torch.return_types.topk((args[0].gather(1, self._chosen), self._chosen))
        return func(*args, **kwargs)


def experts_of(routed: Mapping[int, Routed], routers: Sequence[Router], like: Tensor) -> Tensor:
    """The routers' choices without replay for N tokens, the length of `like` [N]: uint8 or int32 [N, L, k], zeros for
    routers that did not run."""
    nothing = like.new_zeros(len(like), routers[0].chosen, dtype=torch.int64)
    own = [routed[number].own if number in routed else nothing for number in range(len(routers))]
    return torch.stack(own, 1).to(torch.uint8 if routers[0].experts <= 1 << 8 else torch.int32)


def planned(config: PreTrainedConfig, rule: str, paths: Iterable[str]) -> list[str]:
    """The paths of modules, among `paths` inside the base model, to which transformers' plan of expert parallelism
    gives this rule."""
    plan: Mapping[str, str] = getattr(config, "base_model_ep_plan", None) or {}
    patterns = [re.escape(pattern).replace(r"\*", r"\d+") for pattern, own in plan.items() if own == rule]
    return [path for path in paths if any(re.fullmatch(pattern, path) for pattern in patterns)]


def put_routers(base: PreTrainedModel, layers: Sequence[str], buffers: Mapping[str, torch.Size]) -> tuple[Router, ...]:
    """Replace the routers in `base` by seams; `buffers` are those with state. Routers are found by their class among
    the outputs that transformers records or, in older versions, by their paths in its plan of expert parallelism.

    Empty for a model with unknown routers: of several kinds, or without a matrix of a row per expert.
    """
    recorders = (getattr(base, "_can_record_outputs", None) or {}).get("router_logits")
    kind = recorders if isinstance(recorders, type) else getattr(recorders, "target_class", None)
    modules = dict(base.named_modules())
    paths = planned(base.config, "ep_router", modules)
    paths = paths or [path for path, module in modules.items() if kind is not None and isinstance(module, kind)]
    routers = [_router(base, path, layers, buffers) for path in paths]
    known = [router for router in routers if router is not None]
    if len(known) < len(paths) or len({(router.experts, router.chosen) for router in known}) > 1:
        return ()
    for number, (path, router) in enumerate(zip(paths, known, strict=True)):
        parent, _, child = path.rpartition(".")
        modules = base.get_submodule(parent)._modules
        inner = modules[child]
        assert inner is not None
        modules[child] = RouterSeam(number, inner, router.experts)
    return tuple(known)


def _router(
    base: PreTrainedModel, path: str, layers: Sequence[str], buffers: Mapping[str, torch.Size]
) -> Router | None:
    module = base.get_submodule(path)
    layer = next((number for number, start in enumerate(layers) if path.startswith(f"{start}.")), None)
    experts = max((p.shape[0] for p in module.parameters() if p.dim() == 2), default=0)
    chosen = getattr(module, "top_k", None) or getattr(base.config, "num_experts_per_tok", None)
    if layer is None or not experts or not chosen:
        return None
    block = path.rpartition(".")[0]
    biases = [name for name, shape in buffers.items() if name.startswith(f"{block}.") and shape.numel() == experts]
    return Router(layer, experts, chosen, biases[0] if len(biases) == 1 else None)
