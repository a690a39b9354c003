"""AdamW whose moments are 8-bit codes, with a scale for each block of numbers.

T. Dettmers et al., 2022, "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861. Blocks lie along the last
axis of a parameter, so that no cut of rows goes through one. The second moment differs from the paper's in two ways. A
number above 0 gets a code above 0, since a step is divided by its root. And it is rounded up or down by a threshold
that changes with every update: an average over 1,000 updates changes by less than half the distance of two codes, and
would stand still if each update rounded to the nearest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fppo.models.model import Params
from fppo.runtime.layout import divided
from fppo.runtime.mesh import Mesh
from fppo.steps.optimizers import AdamWState, Optimizer, UpdateCall, adamw_write, clipped, init_adamw
from fppo.steps.schedules import Schedule
from fppo.tree import replace, state
from fppo_kernels.adamw import adamw_
from fppo_kernels.shapes import Float, Shaped

BLOCK = 64  # numbers that share a scale
POWER = 4  # the levels of the first moment are powers of equally spaced numbers, the closer the smaller
DECADES = 9  # the range of the second moment's levels, whose ratios are equal
CHUNK = 1 << 22  # numbers of a parameter whose moments are decoded together
_STRIDES = (12664746, 9560334)  # of thresholds over updates and over places in a block, times 2^-24 (the R2 sequence)


@state
class Blocks:
    """A moment of parameters by their names: `codes`, uint8 with the shape [..., n] of a parameter, and `scales`,
    float32 [..., n / block_size], the largest absolute value in each block."""

    codes: Params
    scales: Params


@state
class AdamW8bitState:
    """First and second moments in blocks, and AdamW's state of the parameters without blocks, with the count of
    updates."""

    mu: Blocks
    nu: Blocks
    adamw: AdamWState


def levels(device: torch.device, *, signed: bool) -> Float[Tensor, " codes"]:
    """The values of the codes relative to a block's scale, in order, float32: 255 from -1 to 1 if `signed`, with 0 in
    the middle, else 256 from 0 to 1."""
    if signed:
        values = [math.copysign((abs(k) / 127) ** POWER, k) for k in range(-127, 128)]
    else:
        values = [0.0, *(10 ** (DECADES * (k / 254 - 1)) for k in range(255))]
    return torch.tensor(values, device=device)


def encoded(
    x: Float[Tensor, "*rows n"],
    values: Float[Tensor, " codes"],
    block_size: int,
    threshold: float | Float[Tensor, " block_size"] = 0.5,
    *,
    positive: bool = False,
) -> tuple[Shaped[Tensor, "*rows n"], Float[Tensor, "*rows blocks"]]:
    """Encode numbers [..., n] by `levels` in blocks of `block_size` along the last axis: codes uint8 [..., n], and
    scales float32 [..., n / block_size].

    A number between two levels gets the upper one if it lies above the fraction `threshold` of their distance. With
    `positive` no number may be below 0, and only 0 gets the code of 0. `decoded` is off by at most half the distance of
    the neighbouring levels times the scale, with other thresholds by the whole distance.
    """
    blocks = x.unflatten(-1, (-1, block_size))
    blocks = blocks if blocks.dtype == torch.float64 else blocks.float()
    scales, values = blocks.abs().amax(-1).float(), values.to(blocks.dtype)
    relative = blocks / torch.where(scales > 0, scales, 1.0).to(blocks.dtype)[..., None]
    upper = torch.bucketize(relative, values, out_int32=True).clamp(1, len(values) - 1)
    low, high = values[upper - 1], values[upper]
    codes = upper - (relative - low <= threshold * (high - low)).int()
    if positive:
        codes = torch.where(blocks > 0, codes.clamp(min=1), 0)
    return codes.to(torch.uint8).flatten(-2), scales


def decoded(
    codes: Shaped[Tensor, "*rows n"],
    scales: Float[Tensor, "*rows blocks"],
    values: Float[Tensor, " codes"],
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "*rows n"]:
    """The numbers [..., n] that codes uint8 [..., n] of `levels` and scales float32 [..., blocks] stand for, in
    `dtype`."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    blocks = codes.unflatten(-1, (scales.shape[-1], -1)).int()
    return (values.to(wide)[blocks] * scales.to(wide)[..., None]).flatten(-2).to(dtype)


def thresholds(count: Float[Tensor, ""], block_size: int) -> Float[Tensor, " block_size"]:
    """The thresholds of rounding after `count` updates (0-d) for the places in a block, float32 in [0, 1): evenly
    spread over consecutive updates, and over neighbouring places. They do not depend on the block."""
    places = torch.arange(block_size, device=count.device)
    return (count.long() * _STRIDES[0] + places * _STRIDES[1]).remainder(1 << 24).float() / (1 << 24)


def adamw_8bit(
    schedule: Schedule,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    max_grad_norm: float | None = 1.0,
    block_size: int = BLOCK,
    kernel: Callable[..., None] = adamw_,
) -> Optimizer:
    """AdamW with moments in 8 bits: about a quarter of the state of `adamw` in float32.

    Parameters of two or more dimensions whose last one is a multiple of `block_size` have such moments; vectors and all
    others have moments in their own dtype. An update decodes moments some rows at a time, applies the `kernel` of
    `adamw`, and encodes them again. `Optimizer.says` counts the parameters of each kind. Raises ValueError for a
    `block_size` below 1 and, in an update, for a mesh that cuts a parameter's last axis inside of a block.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be 1 or more, got {block_size}")
    numbers = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
    rest_ = adamw_write(schedule, **numbers, kernel=kernel)

    def write_(params: Params, grads: Params, state: AdamW8bitState, call: UpdateCall) -> AdamW8bitState:
        _check(call.mesh, block_size)
        own = {"grad_scale": call.scale, "found_inf": call.skipped}
        step = partial(kernel, lr=schedule(call.step), **numbers, **own)
        code = _Code.of(state.adamw.count, block_size)
        for name, codes in state.mu.codes.items():
            moments = [codes, state.mu.scales[name], state.nu.codes[name], state.nu.scales[name]]
            rows = max(1, CHUNK // max(1, codes[:1].numel()))
            for chunk in zip(*(x.split(rows) for x in (params[name], grads[name], *moments)), strict=True):
                _write_(*chunk, step=step, count=state.adamw.count, code=code, skipped=call.skipped.bool())
        return replace(state, adamw=rest_(params, grads, state.adamw, call))

    def init(params: Params) -> AdamW8bitState:
        blocked = {name: x for name, x in params.items() if has_blocks(x.shape, block_size)}
        rest = {name: x for name, x in params.items() if name not in blocked}
        return AdamW8bitState(
            mu=_zeros(blocked, block_size, zero=127),
            nu=_zeros(blocked, block_size, zero=0),
            adamw=init_adamw(rest),
        )

    made = clipped(init, write_, max_grad_norm=max_grad_norm, schedule=schedule)
    return made._replace(kernel=kernel, says=partial(_says, block_size))


def has_blocks(shape: torch.Size, block_size: int) -> bool:
    """Whether the moments of a parameter of this shape are in blocks."""
    return len(shape) > 1 and shape[-1] > 0 and shape[-1] % block_size == 0


def _zeros(params: Params, block_size: int, zero: int) -> Blocks:
    """Zeros, whose code is `zero`, with the shapes of the parameters."""
    return Blocks(
        codes={name: torch.full(x.shape, zero, dtype=torch.uint8, device=x.device) for name, x in params.items()},
        scales={
            name: torch.zeros((*x.shape[:-1], x.shape[-1] // block_size), dtype=torch.float32, device=x.device)
            for name, x in params.items()
        },
    )


class _Code(NamedTuple):
    """The levels of first and second moments, the size of a block, and the thresholds for second moments."""

    signed: Tensor
    positive: Tensor
    block_size: int
    thresholds: Tensor

    @staticmethod
    def of(count: Tensor, block_size: int) -> _Code:
        """The code after `count` updates, on the device of `count`."""
        signed, positive = (levels(count.device, signed=signed) for signed in (True, False))
        return _Code(signed, positive, block_size, thresholds(count, block_size))


def _write_(
    param: Tensor,
    grad: Tensor,
    *moments: Tensor,
    step: Callable[..., None],
    count: Tensor,
    code: _Code,
    skipped: Tensor,
) -> None:
    """Update rows of a parameter and of its moments (codes and scales of the first, then of the second) in place, by
    the kernel `step`."""
    mu = decoded(*moments[:2], code.signed, param.dtype)
    nu = decoded(*moments[2:], code.positive, param.dtype)
    moved = param.contiguous()
    step([moved], [grad], [mu], [nu], [count.clone()])
    if moved is not param:
        param.copy_(moved)
    after = (
        *encoded(mu, code.signed, code.block_size),
        *encoded(nu, code.positive, code.block_size, code.thresholds, positive=True),
    )
    for old, new in zip(moments, after, strict=True):
        old.copy_(torch.where(skipped, old, new))


def _check(mesh: Mesh, block_size: int) -> None:
    """Raise ValueError for a parameter whose last axis the mesh cuts inside of a block."""
    layout = mesh.layout
    for name, cut in () if layout is None else layout.cuts.items():
        whole, own = layout.whole[name], layout.shape(name)
        if cut.dim == len(whole) - 1 and (has_blocks(whole, block_size) or has_blocks(own, block_size)):
            divided(name, layout.extent(name), cut.dim, block_size)


def _says(block_size: int, params: Mapping[str, Tensor]) -> str:
    """The number of parameters with moments in blocks, and of others by their kinds."""
    blocked = [name for name, x in params.items() if has_blocks(x.shape, block_size)]
    vectors = sum(x.dim() < 2 for x in params.values())
    others = len(params) - len(blocked) - vectors
    rest = f"{vectors} vectors" + f", {others} with a last axis that is no multiple of it" * (others > 0)
    return f"8-bit moments in blocks of {block_size}: {len(blocked)} parameters; without blocks: {rest}"
