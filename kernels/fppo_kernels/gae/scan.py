"""Reverse scans over time without a step for each token, and generalised advantage estimates by one such scan."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fppo_kernels.shapes import Bool, Float

WINDOW = 128  # tokens that doubling sums, in log2(WINDOW) steps; a loop runs over windows of this size
CPU_CHUNK = 2**18  # numbers of the rows that are scanned together, so that the work stays in the cache

_BITS = {4: torch.int32, 8: torch.int64}


def reverse_scan(x: Float[Tensor, "b t"], decay: Float[Tensor, "b t"] | float) -> Float[Tensor, "b t"]:
    """y_t = x_t + decay_t * y_{t+1}, with y = 0 after the end; x [B, T] floating, decay [B, T] or a number in [-1, 1].

    Nothing is divided by powers of the decay, so small decays neither overflow nor lose digits, and a row's result
    depends on that row alone. The result has the dtype of `x`, is computed in at least float32, and has no gradient.
    """
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    factor = torch.as_tensor(decay, dtype=wide.dtype, device=x.device).detach().expand(x.shape)
    length, result = x.shape[1], torch.empty_like(wide)
    for rows, work in _chunks(wide):
        work[0, :, :length] = wide[rows]
        work[1, :, :length] = factor[rows]
        result[rows] = _scan_(work, length)[:, :length]
    return result.to(x.dtype)


def scan(
    rewards: Float[Tensor, "b t"],
    values: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    *,
    gamma: float | Float[Tensor, ""] = 1.0,
    lam: float | Float[Tensor, ""] = 1.0,
) -> tuple[Float[Tensor, "b t"], Float[Tensor, "b t"]]:
    """Compute advantages and returns as `fppo_kernels.gae.loop.loop` does, by one reverse scan.

    With s the row's next token in the mask, the returns are G_t = r_t + gamma ((1 - lam) V_s + lam G_s): a scan that
    passes values unchanged over holes in the mask. A = G - V.
    """
    dtype, gamma, lam = torch.promote_types(rewards.dtype, values.dtype), float(gamma), float(lam)
    rewards, values = (x.detach().to(torch.promote_types(dtype, torch.float32)) for x in (rewards, values))
    length, bits = mask.shape[1], _BITS[rewards.element_size()]
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    for rows, work in _chunks(rewards):
        # The mask as bits: on the CPU torch.where branches at every number, which is ten times slower.
        keep = mask[rows].to(bits).neg_()
        reward, value = returns[rows], advantages[rows]
        torch.bitwise_and(rewards[rows].view(bits), keep, out=reward.view(bits))
        torch.bitwise_and(values[rows].view(bits), keep, out=value.view(bits))
        ahead, decay, here = work[0, :, :length], work[1, :, :length], work[2, :, :length]
        here.copy_(keep)  # -1 at a token, 0 at a hole
        torch.add(here, 1, out=decay).sub_(here, alpha=gamma * lam)
        torch.mul(reward, gamma * lam, out=ahead).add_(value, alpha=gamma * (1 - lam))
        reward.add_(_scan_(work, length)[:, 1 : length + 1])
        reward.view(bits).bitwise_and_(keep)
        torch.sub(reward, value, out=value)
    return advantages.to(dtype), returns.to(dtype)


def _window(length: int) -> int:
    return min(WINDOW, 1 << max(length - 1, 0).bit_length())


def _chunks(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Cut the rows of `x` [B, T] into groups that are scanned together. Yields each group's slice of the rows, and the
    buffer in which `_scan_` works, zero after column T."""
    batch, length = x.shape
    if not x.numel():
        return
    size = max(CPU_CHUNK // length, 1) if x.device.type == "cpu" else batch
    window = _window(length)
    width = (-(-length // window) + 1) * window
    work = x.new_zeros(4, min(size, batch), width)
    for start in range(0, batch, size):
        yield slice(start, start + size), work[:, : min(size, batch - start)]


def _scan_(work: Tensor, length: int) -> Tensor:
    """The reverse scan of the numbers work[0] with the decays work[1], both [n, T] and followed by zeros. `work`
    [4, n, width] is overwritten.

    First the sum over the window t .. t + WINDOW - 1 and the product of its decays, for every t, by doubling; then y_t
    = sum_t + product_t * y_{t + WINDOW}, for a whole window of t at a time.
    """
    window = _window(length)
    width = work.shape[2] - window
    y, factor, spare, spare_factor = work.unbind()
    step = 1
    while step < window:
        after = slice(step, width + step)
        torch.addcmul(y[:, :width], factor[:, :width], y[:, after], out=spare[:, :width])
        torch.mul(factor[:, :width], factor[:, after], out=spare_factor[:, :width])
        y, spare, factor, spare_factor = spare, y, spare_factor, factor
        step *= 2
    windows: list[tuple[Tensor, ...]] = [
        x[:, :width].unflatten(1, (-1, window)).unbind(1)  # pyright: ignore[reportUnknownMemberType]
        for x in (y, factor, spare)
    ]
    sums, factors, results = windows
    results[-1].copy_(sums[-1])
    for k in reversed(range(len(sums) - 1)):
        torch.addcmul(sums[k], factors[k], results[k + 1], out=results[k])
    return spare
