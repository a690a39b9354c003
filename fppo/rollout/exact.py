"""Requirements for rollouts whose log-probs are bit-equal to those of the training pass.

A token's log-prob is bit-equal in both if each operation gives a row the same bits in whatever batch, and if decode
attention sums in the order of packed attention. Kernels with these properties are listed in `fppo_kernels.table.EXACT`;
`exact_probe.probe_exact` tests them on this machine, and `laws.check_exact` whole engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from fppo import models
from fppo.models.heads import Head
from fppo.models.model import Model
from fppo.runtime.mesh import Mesh
from fppo_kernels.table import BUILTIN, EXACT, INSIDE, Kernels, exact_here

# Axes on which a token's log-prob keeps its bits, and axes on which sums have another order; "ring" is a context axis
# whose ranks pass keys on instead of gathering them. A test holds this table.
KEEPS_BITS = {
    "replicate": True,
    "shard": True,
    "sequence": True,
    "pipeline": True,
    "context": True,
    "ring": False,
    "tensor": False,
    "expert": False,
}


def head_log_probs(head: Head, kernel: Callable[..., object], temperature: float) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of hidden states [N, H] and tokens [N] that returns the log-probs [N] of a training pass."""

    def log_probs(hidden: Tensor, tokens: Tensor) -> Tensor:
        result = kernel(
            hidden,
            head.weight,
            tokens,
            bias=head.bias,
            temperature=temperature,
            softcap=head.softcap,
            scale=head.scale,
        )
        return result.log_probs  # type: ignore[attr-defined]

    return log_probs


def rounded_product(linear: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a product with the head by the kernel `linear`, in the head's own dtype and widened afterwards: tokens are
    drawn from logits rounded as in training."""

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = linear(x, weight, bias)
        return out.float() if out.dtype.itemsize < 4 else out

    return product


def hindrances(model: Model, kernels: Kernels, mesh: Mesh) -> Iterator[str]:
    """Yield the reasons why a model's rollouts would not be bit-equal to its training passes."""
    kind = model.config.model_type
    if model.stateful:
        yield f"layers of model type {kind!r} carry states, which decoding carries on in another order"
    if model.routers:
        yield f"model type {kind!r} has experts, whose products take as many rows as choose them"
    if model.vision is not None:
        yield f"model type {kind!r} takes images, and its vision tower has no exact kernels"
    if model.frozen is not None:
        yield "an adapter is merged to decode, and runs beside its base in training"
    if model.compile_layers:
        yield "compiled layers are programs for each number of rows"
    if model.mlp_slice_tokens is not None:
        yield "MLPs in slices of tokens cut products otherwise than decoding does"
    yield from _other_kernels(model, kernels)
    if mesh.ring and mesh["context"].size > 1:
        yield f"a context axis of {mesh['context'].size} ranks merges attention from parts in a ring"
    for name in ("tensor", "expert"):
        if mesh[name].size > 1:
            yield f"a {name} axis of {mesh[name].size} ranks adds up in parts"


def _other_kernels(model: Model, kernels: Kernels) -> Iterator[str]:
    """Yield a reason for each built-in kernel that is not exact. The user's own kernels are tested before a run."""
    text = model.text_of(model.skeleton)
    for op, name in exact_here().items():
        fn, of_devices = getattr(kernels, op), {names[op] for names in EXACT.values()}
        known = next((each for each, x in BUILTIN[op].items() if x.is_of(fn)), name)
        if known not in of_devices and (op not in INSIDE or models.has_place(text, op)):
            lacking = BUILTIN[op][name].refuse()
            remedy = f"give model.{op} = {name!r}" if lacking is None else f"{op}/{name} cannot run here: {lacking}"
            yield f"kernel {op}/{known} adds up in an order that depends on other rows ({remedy})"


def check_exact_engine(model: Model, kernels: Kernels, mesh: Mesh) -> None:
    """Raise ValueError for an engine that cannot be exact, with the reasons."""
    if reasons := list(hindrances(model, kernels, mesh)):
        raise ValueError(f"exact = True: {'; '.join(reasons)}; leave exact out")
