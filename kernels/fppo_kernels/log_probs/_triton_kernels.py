# pyright: basic, reportMissingTypeStubs=false
"""The Triton programs of `log_probs/triton`: moments of the distributions, the gradient by the logits, and moments of
the whole vocabulary, merged in the order of its splits.

Each instance makes tiles of hidden @ weight.T, [BM, BN], in registers, BK hidden dimensions at a time, and works on
them there. With TMA, `hidden` and `weight` are tensor descriptors, which read zeros beyond the edges; else pointers.
WIDEN is for the interpreter, which cannot multiply bfloat16: its float32 products of them are the same numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fppo_kernels._triton_kernels import tanh

LOWEST = tl.constexpr(-1e18)  # the logit of absent entries; finite, as is its square, because 0 * inf is not a number


@triton.jit
def _find_tile(blocks, columns, GROUP: tl.constexpr):
    """The block of tokens and the column of this instance: GROUP adjacent blocks run side by side, sharing the
    cache."""
    index = tl.program_id(0)
    group = index // (GROUP * columns)
    first = group * GROUP
    height = min(blocks - first, GROUP)
    inside = index % (GROUP * columns)
    return first + inside % height, inside // height


@triton.jit
def _products(
    hidden, weight, row, column, tokens, stop, width,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute hidden[row : row + BM] @ weight[column : column + BN].T in float32; zeros beyond `tokens` and `stop`."""
    total = tl.zeros((BM, BN), tl.float32)
    if TMA:
        for k in range(0, width, BK):
            left = hidden.load([row, k])
            right = weight.load([column, k]).T
            if WIDEN:
                total = tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="ieee")
            else:
                total = tl.dot(left, right, total, input_precision="ieee")
    else:
        rows = (row + tl.arange(0, BM)).to(tl.int64)[:, None]
        columns = (column + tl.arange(0, BN)).to(tl.int64)[None, :]
        for k in range(0, width, BK):
            ks = k + tl.arange(0, BK)
            left = tl.load(hidden + rows * width + ks[None, :], (rows < tokens) & (ks < width)[None, :], other=0.0)
            right = tl.load(weight + columns * width + ks[:, None], (columns < stop) & (ks < width)[:, None], other=0.0)
            if WIDEN:
                total = tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="ieee")
            else:
                total = tl.dot(left, right, total, input_precision="ieee")
    return total


@triton.jit
def _finish(raw, bias, columns, vocab, inner, outer, BIAS: tl.constexpr, SOFTCAP: tl.constexpr):
    """Turn products into logits [BM, BN]. `inner` is the scale, divided by the soft cap if there is one; `outer` [BM]
    is the soft cap (or 1) over each token's temperature."""
    if BIAS:
        raw += tl.maximum(tl.load(bias + columns, columns < vocab, other=0.0).to(tl.float32), LOWEST)[None, :]
    if SOFTCAP:
        raw = tanh(raw * inner)
    else:
        outer *= inner
    return tl.where((columns < vocab)[None, :], raw * outer[:, None], LOWEST)


@triton.jit(do_not_specialize=["tokens", "vocab", "splits", "tiles"])
def log_probs_forward(
    hidden, weight, bias, labels, temperature, own, moments, tokens, vocab, width, inner, cap, splits, tiles,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, SQUARED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Write the moments [4, splits, N] of BM tokens over one split, which is `tiles` tiles of the vocabulary, and the
    logits of the labels in it."""
    block, split = _find_tile(tl.cdiv(tokens, BM), splits, GROUP)
    rows = block * BM + tl.arange(0, BM)
    real = rows < tokens
    label = tl.load(labels + rows, real, other=-1)
    outer = cap / tl.load(temperature + rows, real, other=1.0)
    maximum = tl.full((BM,), LOWEST, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    first = tl.zeros((BM,), tl.float32)  # sum exp(z - maximum) (z - maximum)
    second = tl.zeros((BM,), tl.float32)  # sum exp(z - maximum)^2
    own_logit = tl.zeros((BM,), tl.float32)
    start = split * tiles * BN
    stop = min(start + tiles * BN, vocab)
    for column in range(start, stop, BN):
        raw = _products(hidden, weight, block * BM, column, tokens, vocab, width, BM, BN, BK, TMA, WIDEN)
        columns = column + tl.arange(0, BN)
        logits = _finish(raw, bias, columns, vocab, inner, outer, BIAS, SOFTCAP)
        here = (label >= column) & (label < column + BN)
        if tl.max(here.to(tl.int32), 0) > 0:  # pyright: ignore[reportOperatorIssue]
            own_logit += tl.sum(tl.where(columns[None, :] == label[:, None], logits, 0.0), 1)
        larger = tl.maximum(maximum, tl.max(logits, 1))
        drop = maximum - larger
        shrink = tl.exp(drop)
        shifted = logits - larger[:, None]
        grown = tl.exp(shifted)
        if ENTROPY:
            first = shrink * (first + drop * total) + tl.sum(grown * shifted, 1)
        if SQUARED:
            second = shrink * shrink * second + tl.sum(grown * grown, 1)
        total = shrink * total + tl.sum(grown, 1)
        maximum = larger
    tl.store(own + rows, own_logit, real & (label >= start) & (label < stop))
    log_sum = tl.log(total)
    place = moments + split * tokens + rows
    plane = splits * tokens
    tl.store(place, maximum, real)
    tl.store(place + plane, log_sum, real)
    if ENTROPY:
        tl.store(place + 2 * plane, log_sum - first / total, real)
    if SQUARED:
        tl.store(place + 3 * plane, second / (total * total), real)


@triton.jit(do_not_specialize=["tokens", "vocab", "start", "stop"])
def log_probs_backward(
    hidden, weight, bias, labels, temperature, rows_of, slab, tokens, vocab, width, inner, cap, scale,
    start, stop, stride,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, SQUARED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute the gradient by hidden @ weight[start:stop].T, [N, stop - start] in `slab`, one tile per instance.

    The rows of `slab` have room for whole tiles; numbers beyond `stop` mean nothing.
    `rows_of` [8, N]: maximum, log_sum, entropy, sum_squared, the gradients of the three outputs, the label's logit.
    With z the logits: d log p_y / dz = 1_y - p; d H / dz = -p (log p + H); d (sum p^2) / dz = 2 p (p - sum p^2).
    """
    block, split = _find_tile(tl.cdiv(tokens, BM), tl.cdiv(stop - start, BN), GROUP)
    column = start + split * BN
    raw = _products(hidden, weight, block * BM, column, tokens, stop, width, BM, BN, BK, TMA, WIDEN)
    rows = block * BM + tl.arange(0, BM)
    columns = column + tl.arange(0, BN)
    real = rows < tokens
    label = tl.load(labels + rows, real, other=-1)
    tempered = tl.load(temperature + rows, real, other=1.0)
    logits = _finish(raw, bias, columns, vocab, inner, cap / tempered, BIAS, SOFTCAP)
    place = rows_of + rows
    maximum = tl.load(place, real, other=0.0)
    log_sum = tl.load(place + tokens, real, other=0.0)
    d_label = tl.load(place + 4 * tokens, real, other=0.0)
    logs = (logits - maximum[:, None]) - log_sum[:, None]
    probs = tl.exp(logs)
    constant = -d_label
    if ENTROPY:
        d_entropy = tl.load(place + 5 * tokens, real, other=0.0)
        constant -= d_entropy * tl.load(place + 2 * tokens, real, other=0.0)
    if SQUARED:
        d_squared = 2 * tl.load(place + 6 * tokens, real, other=0.0)
        constant -= d_squared * tl.load(place + 3 * tokens, real, other=0.0)
    factor = tl.zeros((BM, BN), tl.float32) + constant[:, None]
    if ENTROPY:
        factor -= d_entropy[:, None] * logs
    if SQUARED:
        factor += d_squared[:, None] * probs
    slope = scale / tempered
    grad = probs * factor * slope[:, None]
    at_label = d_label * slope
    if SOFTCAP:
        bend = logits * (tempered / cap)[:, None]
        grad *= 1 - bend * bend
        bend_label = tl.load(place + 7 * tokens, real, other=0.0) * (tempered / cap)
        at_label *= 1 - bend_label * bend_label
    here = (label >= column) & (label < column + BN)
    if tl.max(here.to(tl.int32), 0) > 0:  # pyright: ignore[reportOperatorIssue]
        grad += tl.where(columns[None, :] == label[:, None], at_label[:, None], 0.0)
    target = slab + rows.to(tl.int64)[:, None] * stride + (columns - start)[None, :]
    tl.store(target, grad.to(slab.dtype.element_ty), real[:, None])


@triton.jit(do_not_specialize=["tokens", "splits"])
def merge_in_order(
    moments, merged, tokens, splits, ENTROPY: tl.constexpr, SQUARED: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """Merge the moments [4, splits, N] of BM tokens over the whole vocabulary, from the first split to the last."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    real = rows < tokens
    plane, place = splits * tokens, moments + rows
    maximum = tl.full((BM,), LOWEST, tl.float32)
    for split in range(splits):
        maximum = tl.maximum(maximum, tl.load(place + split * tokens, real, other=0.0))
    total = tl.zeros((BM,), tl.float32)
    for split in range(splits):
        at = place + split * tokens
        total += tl.exp(tl.load(at, real, other=0.0) - maximum + tl.load(at + plane, real, other=0.0))
    log_sum = tl.log(total)
    tl.store(merged + rows, maximum, real)
    tl.store(merged + tokens + rows, log_sum, real)
    entropy, squared = tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32)
    if ENTROPY or SQUARED:
        for split in range(splits):
            at = place + split * tokens
            log_share = tl.load(at, real, other=0.0) - maximum + tl.load(at + plane, real, other=0.0) - log_sum
            share = tl.exp(log_share)  # a split without any probability may have no moments
            if ENTROPY:
                own = tl.load(at + 2 * plane, real, other=0.0) - log_share
                entropy += tl.where(share == 0, 0.0, share * own)
            if SQUARED:
                squared += tl.where(share == 0, 0.0, share * share * tl.load(at + 3 * plane, real, other=0.0))
        if ENTROPY:
            tl.store(merged + 2 * tokens + rows, entropy, real)
        if SQUARED:
            tl.store(merged + 3 * tokens + rows, squared, real)
