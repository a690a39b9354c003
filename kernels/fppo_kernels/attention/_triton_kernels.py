# pyright: basic, reportMissingTypeStubs=false
"""The Triton programs of `attention/fixed` and `decode_attention/fixed`.

A row is one head of one query; the rows of all query heads that read a key head are adjacent, `groups` for each query.
Keys are taken in blocks of BN that begin at the first key of a sequence. A key that a row does not see adds 0 to its
sums. So a row's bits depend on its own keys alone, and prompts and single tokens run the same program.

`places` [6, S] has, for each sequence: its first query, the number of its queries, the places of its first key and
value, the number of its keys, and the place of its first key in `seen`, by which keys are hidden. Steps between keys
and between heads of keys are in units of a key; so are those of values. A CAP of 0 is none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fppo_kernels._triton_kernels import multiply_add, tanh

FORWARD = [
    "sequences",
    "tiles",
    "groups",
    "heads",
    "window",
    "key_step",
    "key_head",
    "value_step",
    "value_head",
    "step",
]
BACKWARD = ["sequences", "tiles", "groups", "heads", "window"]


@triton.jit
def _rows_of(first, count, row, groups, heads, head, BM: tl.constexpr):
    """BM rows from `row` on: the number of each one's query in its sequence, its place, and whether it exists."""
    rows = row + tl.arange(0, BM)
    query = rows // groups
    place = (first + query) * heads + head * groups + rows % groups
    return query, place, query < count


@triton.jit
def _numbers(x, place, real, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load [BLOCK] numbers, of which WIDTH are real, of each place of `x`; zeros for places that do not exist."""
    columns = tl.arange(0, BLOCK)
    return tl.load(x + place[:, None] * WIDTH + columns[None, :], real[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def _scores(q, k, position, columns, visible, window, SCALE: tl.constexpr, CAP: tl.constexpr, WIDE: tl.constexpr,
            WIDEN: tl.constexpr):  # fmt: skip
    """Scores [BM, BN] of rows at `position` for keys at `columns`; -inf where a row does not see a key."""
    empty = tl.zeros((q.shape[0], k.shape[0]), WIDE)
    scores = multiply_add(q, tl.trans(k), empty, WIDEN) * SCALE
    if CAP > 0:
        scores = tanh(scores / CAP) * CAP
    distance = position[:, None] - columns[None, :]
    return tl.where(visible[None, :] & (distance >= 0) & (distance < window), scores, float("-inf"))


@triton.jit(do_not_specialize=FORWARD)
def attention_forward(
    query, key, value, seen, sinks, out, log_sums, places, sequences, tiles, groups, heads, window,
    key_step, key_head, value_step, value_head, step,
    SCALE: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Write the result of BM rows of one sequence and key head, and the logarithm of each softmax's denominator."""
    sequence, head = tl.program_id(0) // tiles, tl.program_id(1)
    row = tl.program_id(0) % tiles * BM
    own = places + sequence
    count, keys = tl.load(own + sequences).to(tl.int32), tl.load(own + 4 * sequences).to(tl.int32)
    if row < count * groups:
        number, place, real = _rows_of(tl.load(own), count, row, groups, heads, head, BM)
        q = _numbers(query, place, real, D, BD)
        position = keys - count + number
        first_key = tl.load(own + 2 * sequences) + head * key_head
        first_value = tl.load(own + 3 * sequences) + head * value_head
        first_seen = tl.load(own + 5 * sequences)
        maximum = tl.full((BM,), float("-inf"), WIDE)
        total, mixed = tl.zeros((BM,), WIDE), tl.zeros((BM, BE), WIDE)
        begin = max(keys - count + row // groups - window + 1, 0) // BN * BN
        end = min(keys - count + (row + BM - 1) // groups + 1, keys)
        for block in range(begin, end, BN):
            columns = block + tl.arange(0, BN)
            there, far = columns < keys, columns.to(tl.int64)
            visible = there & (tl.load(seen + first_seen + far * step, there, other=0) != 0)
            k = _numbers(key, first_key + far * key_step, there, D, BD)
            scores = _scores(q, k, position, columns, visible, window, SCALE, CAP, WIDE, WIDEN)
            larger = tl.maximum(maximum, tl.max(scores, 1))
            base = tl.where(larger == float("-inf"), 0.0, larger)  # for rows that have seen nothing yet
            shrink, grown = tl.exp(maximum - base), tl.exp(scores - base[:, None])
            total = total * shrink + tl.sum(grown, 1)
            near = visible & (columns > keys - count + row // groups - window)  # what no row sees may hold nan
            v = _numbers(value, first_value + far * value_step, near, E, BE)
            mixed = multiply_add(grown.to(v.dtype), v, mixed * shrink[:, None], WIDEN)
            maximum = larger
        if SINKS:
            sink = tl.load(sinks + place % heads, real, other=0.0).to(WIDE)
            larger = tl.maximum(maximum, sink)
            shrink = tl.exp(maximum - larger)
            total, mixed = total * shrink + tl.exp(sink - larger), mixed * shrink[:, None]
            maximum = larger
        total = tl.where(total == 0, 1.0, total)  # of rows that do not exist
        result, columns = mixed / total[:, None], tl.arange(0, BE)
        target = out + place[:, None] * E + columns[None, :]
        tl.store(target, result.to(out.dtype.element_ty), real[:, None] & (columns < E)[None, :])
        tl.store(log_sums + place, maximum + tl.log(total), real)


@triton.jit
def _slopes(q, k, v, grad, log_sum, dot, position, columns, visible, window, SCALE: tl.constexpr, CAP: tl.constexpr,
            WIDE: tl.constexpr, WIDEN: tl.constexpr):  # fmt: skip
    """The softmax [BM, BN] and the gradient by the products of queries and keys."""
    scores = _scores(q, k, position, columns, visible, window, SCALE, CAP, WIDE, WIDEN)
    shares = tl.exp(scores - log_sum[:, None])
    empty = tl.zeros((q.shape[0], k.shape[0]), WIDE)
    slopes = shares * (multiply_add(grad, tl.trans(v), empty, WIDEN) - dot[:, None]) * SCALE
    if CAP > 0:
        bend = tl.where(shares > 0, scores, 0.0) / CAP
        slopes *= 1 - bend * bend
    return shares, slopes


@triton.jit(do_not_specialize=BACKWARD)
def attention_backward_queries(
    query, key, value, grad, log_sums, dots, d_query, places, sequences, tiles, groups, heads, window,
    SCALE: tl.constexpr, CAP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Write the gradient by BM rows of one sequence and key head. Keys and values are packed."""
    sequence, head = tl.program_id(0) // tiles, tl.program_id(1)
    row = tl.program_id(0) % tiles * BM
    own, key_heads = places + sequence, heads // groups
    count, keys = tl.load(own + sequences).to(tl.int32), tl.load(own + 4 * sequences).to(tl.int32)
    if row < count * groups:
        number, place, real = _rows_of(tl.load(own), count, row, groups, heads, head, BM)
        q, slope = _numbers(query, place, real, D, BD), _numbers(grad, place, real, E, BE)
        log_sum, dot = tl.load(log_sums + place, real, other=0.0), tl.load(dots + place, real, other=0.0)
        first = tl.load(own + 2 * sequences) + head
        found = tl.zeros((BM, BD), WIDE)
        begin = max(keys - count + row // groups - window + 1, 0) // BN * BN
        end = min(keys - count + (row + BM - 1) // groups + 1, keys)
        for block in range(begin, end, BN):
            columns = block + tl.arange(0, BN)
            there, at = columns < keys, first + columns.to(tl.int64) * key_heads
            k, v = _numbers(key, at, there, D, BD), _numbers(value, at, there, E, BE)
            _, slopes = _slopes(q, k, v, slope, log_sum, dot, keys - count + number, columns, there, window,
                                SCALE, CAP, WIDE, WIDEN)  # fmt: skip
            found = multiply_add(slopes.to(k.dtype), k, found, WIDEN)
        columns = tl.arange(0, BD)
        target = d_query + place[:, None] * D + columns[None, :]
        tl.store(target, found.to(d_query.dtype.element_ty), real[:, None] & (columns < D)[None, :])


@triton.jit(do_not_specialize=BACKWARD)
def attention_backward_keys(
    query, key, value, grad, log_sums, dots, d_key, d_value, places, sequences, tiles, groups, heads, window,
    SCALE: tl.constexpr, CAP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Write the gradients by BN keys and values of one sequence and key head, both packed: rows are added in order."""
    sequence, head = tl.program_id(0) // tiles, tl.program_id(1)
    column = tl.program_id(0) % tiles * BN
    own, key_heads = places + sequence, heads // groups
    count, keys = tl.load(own + sequences).to(tl.int32), tl.load(own + 4 * sequences).to(tl.int32)
    if column < keys:
        columns = column + tl.arange(0, BN)
        there, at = columns < keys, tl.load(own + 2 * sequences) + head + columns.to(tl.int64) * key_heads
        k, v = _numbers(key, at, there, D, BD), _numbers(value, at, there, E, BE)
        by_key, by_value = tl.zeros((BN, BD), WIDE), tl.zeros((BN, BE), WIDE)
        begin = max(column - keys + count, 0) * groups // BM * BM
        end = min(column + BN - 1 - keys + count + window, count) * groups
        for row in range(begin, end, BM):
            number, place, real = _rows_of(tl.load(own), count, row, groups, heads, head, BM)
            q, slope = _numbers(query, place, real, D, BD), _numbers(grad, place, real, E, BE)
            log_sum, dot = tl.load(log_sums + place, real, other=0.0), tl.load(dots + place, real, other=0.0)
            shares, slopes = _slopes(q, k, v, slope, log_sum, dot, keys - count + number, columns, there, window,
                                     SCALE, CAP, WIDE, WIDEN)  # fmt: skip
            by_value = multiply_add(tl.trans(shares.to(slope.dtype)), slope, by_value, WIDEN)
            by_key = multiply_add(tl.trans(slopes.to(q.dtype)), q, by_key, WIDEN)
        for_key, for_value = tl.arange(0, BD), tl.arange(0, BE)
        target = d_key + at[:, None] * D + for_key[None, :]
        tl.store(target, by_key.to(d_key.dtype.element_ty), there[:, None] & (for_key < D)[None, :])
        target = d_value + at[:, None] * E + for_value[None, :]
        tl.store(target, by_value.to(d_value.dtype.element_ty), there[:, None] & (for_value < E)[None, :])
