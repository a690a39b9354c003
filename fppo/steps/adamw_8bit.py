"""AdamW whose moments are 8-bit codes, with a scale for each block of numbers.

T. Dettmers et al., 2022, "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861. Blocks lie along the last
axis of a parameter, so that no cut of rows goes through one. A code is the upper bits of a float32 between 0 and 1, for
the first moment with its sign: 8 codes for each factor of 2. The second moment differs from the paper's in two ways. A
number above 0 gets a code above 0, since a step is divided by its root. And it is rounded up or down by an offset that
changes with every update: an average over 1,000 updates changes by less than half the distance of two codes, and would
stand still if each update rounded to the nearest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

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

CHUNK = 1 << 22  # numbers of a parameter whose moments are decoded together
ONE = 127 << 23  # the bits of 1.0 in float32
STEP = 1 << 20  # the distance in bits between the numbers of two codes
MOST = {True: 127, False: 255}  # the code of the largest number, by whether numbers have signs
_STRIDES = (12664746, 9560334)  # of offsets over updates and over places in a block, times 2^-24 (the R2 sequence)


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


def encoded(
    x: Float[Tensor, "*rows n"],
    block_size: int,
    *,
    signed: bool,
    offsets: int | Shaped[Tensor, " block_size"] = STEP // 2,
) -> tuple[Shaped[Tensor, "*rows n"], Float[Tensor, "*rows blocks"]]:
    """Encode numbers [..., n] in blocks of `block_size` along the last axis: codes uint8 [..., n], and scales float32
    [..., n / block_size].

    A number between two codes' gets the upper one if its distance from the lower one, in units of theirs, and
    `offsets` / `STEP` add up to 1 or more. Without `signed` no number may be below 0, and only 0 gets the code 0.
    `decoded` is off by at most half the distance of the neighbouring codes' numbers, with other offsets by all of it,
    and by the smallest number that has a code.
    """
    blocks = x.unflatten(-1, (-1, block_size))
    blocks = blocks if blocks.dtype == torch.float64 else blocks.float()
    scales, most = blocks.abs().amax(-1).float(), MOST[signed]
    relative = (blocks / torch.where(scales > 0, scales, 1.0).to(blocks.dtype)[..., None]).float()
    codes = ((relative.abs().view(torch.int32) + (offsets + (most * STEP - ONE))) >> 20).clamp(0, most)
    if signed:
        codes = torch.where((relative < 0) & (codes > 0), codes + 128, codes)
    else:
        codes = torch.where(blocks > 0, codes.clamp(min=1), 0)
    return codes.to(torch.uint8).flatten(-2), scales


def decoded(
    codes: Shaped[Tensor, "*rows n"],
    scales: Float[Tensor, "*rows blocks"],
    dtype: torch.dtype = torch.float32,
    *,
    signed: bool,
) -> Float[Tensor, "*rows n"]:
    """The numbers [..., n] that codes uint8 [..., n] and scales float32 [..., blocks] stand for, in `dtype`."""
    wide, most = torch.float64 if dtype == torch.float64 else torch.float32, MOST[signed]
    blocks = codes.unflatten(-1, (scales.shape[-1], -1)).int()
    size = blocks & most
    values = torch.where(size > 0, (size * STEP + (ONE - most * STEP)).view(torch.float32), 0.0)
    values = torch.where(blocks > most, -values, values)
    return (values.to(wide) * scales.to(wide)[..., None]).flatten(-2).to(dtype)


def offsets_after(count: Float[Tensor, ""], block_size: int) -> Shaped[Tensor, " block_size"]:
    """The offsets of rounding after `count` updates (0-d) for the places in a block, int32 from 0 to `STEP` - 1: evenly
    spread over consecutive updates, and over neighbouring places. They do not depend on the block."""
    places = torch.arange(block_size, device=count.device)
    return ((count.long() * _STRIDES[0] + places * _STRIDES[1]).remainder(1 << 24) >> 4).int()


def adamw_8bit(
    schedule: Schedule,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    max_grad_norm: float | None = 1.0,
    block_size: int = 64,
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
        offsets = offsets_after(state.adamw.count, block_size)
        for name, codes in state.mu.codes.items():
            moments = [codes, state.mu.scales[name], state.nu.codes[name], state.nu.scales[name]]
            rows = max(1, CHUNK // max(1, codes[:1].numel()))
            for chunk in zip(*(x.split(rows) for x in (params[name], grads[name], *moments)), strict=True):
                _write_(*chunk, step=step, count=state.adamw.count, offsets=offsets, skipped=call.skipped.bool())
        return replace(state, adamw=rest_(params, grads, state.adamw, call))

    def init(params: Params) -> AdamW8bitState:
        blocked = {name: x for name, x in params.items() if has_blocks(x.shape, block_size)}
        rest = {name: x for name, x in params.items() if name not in blocked}
        return AdamW8bitState(
            mu=_zeros(blocked, block_size),
            nu=_zeros(blocked, block_size),
            adamw=init_adamw(rest),
        )

    made = clipped(init, write_, max_grad_norm=max_grad_norm, schedule=schedule)
    return made._replace(kernel=kernel, says=partial(_says, block_size))


def has_blocks(shape: torch.Size, block_size: int) -> bool:
    """True if the moments of a parameter of this shape are in blocks."""
    return len(shape) > 1 and shape[-1] > 0 and shape[-1] % block_size == 0


def _zeros(params: Params, block_size: int) -> Blocks:
    """Zeros with the shapes of the parameters."""
    return Blocks(
        codes={name: torch.zeros(x.shape, dtype=torch.uint8, device=x.device) for name, x in params.items()},
        scales={
            name: torch.zeros((*x.shape[:-1], x.shape[-1] // block_size), dtype=torch.float32, device=x.device)
            for name, x in params.items()
        },
    )


def _write_(
    param: Tensor,
    grad: Tensor,
    *moments: Tensor,
    step: Callable[..., None],
    count: Tensor,
    offsets: Tensor,
    skipped: Tensor,
) -> None:
    """Update rows of a parameter and of its moments (codes and scales of the first, then of the second) in place, by
    the kernel `step`."""
    first, first_scales, second, second_scales = moments
    mu = decoded(first, first_scales, param.dtype, signed=True)
    nu = decoded(second, second_scales, param.dtype, signed=False)
    moved = param.contiguous()
    step([moved], [grad], [mu], [nu], [count.clone()])
    if moved is not param:
        param.copy_(moved)
    after = (*encoded(mu, len(offsets), signed=True), *encoded(nu, len(offsets), signed=False, offsets=offsets))
    for old, new in zip(moments, after, strict=True):
        old.copy_(torch.where(skipped, old, new))


def _check(mesh: Mesh, block_size: int) -> None:
    """Raise ValueError for a parameter whose last axis the mesh cuts inside of a block."""
    if (layout := mesh.layout) is None:
        return
    for name, cut in layout.cuts.items():
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
