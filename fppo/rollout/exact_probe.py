"""Tests of exact kernels on this machine: each on a model's own shapes, with all threads, and then a small instance of
the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from fppo import models
from fppo.batch import Column, Prompts
from fppo.key import Key
from fppo.models.model import Model
from fppo.models.probe import make_probe
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.exact import check_exact_engine
from fppo.runtime.mesh import LOCAL
from fppo.steps import Forward, MicroBatching, compute_log_probs
from fppo_kernels.padding import make_lengths
from fppo_kernels.table import Kernels, exact_here

ROWS, MANY = 67, 1024  # rows computed together (by products: MANY), and the sizes of parts of them
_PARTS = (1, 2, 3, 5, 8, 13, 31, 64)
_WIDEST = 1 << 25  # the most numbers of a tested weight; only a part of wider ones is tested
_PROMPTS, _TOKENS = (1, 9, 4), 6
_REMEDY = "leave rollout.exact out"

Check = tuple[str, Callable[[], bool]]  # an operation, and a function that tests whether it keeps a row's bits


def probe_exact(model: Model, kernels: Kernels, device: torch.device | None = None) -> None:
    """Raise ValueError for the first operation with which a row's bits depend on other rows, on a device (None: the
    CPU, with its number of threads). The last test runs a small instance of the model, for operations other than
    kernels."""
    device = device or torch.device("cpu")
    check_exact_engine(model, kernels, LOCAL)
    dtype = model.compute_dtype or torch.float32
    with torch.inference_mode():
        for operation, holds in operations(model, kernels, dtype, device):
            if not holds():
                op = operation.partition(" ")[0]
                raise ValueError(
                    f"rollout.exact: {operation} gives a row other bits beside other rows, in "
                    f"{str(dtype).removeprefix('torch.')} on {_place(device)}; fppo's own is model.{op} = "
                    f"{exact_here().get(op)!r}; give that{_other_threads(device)}, or {_REMEDY}"
                )
        if (what := _small_instance(model, kernels, device)) is not None:
            raise ValueError(
                f"rollout.exact: {what} of model type {model.config.model_type!r}, whose operations beside the kernels "
                f"depend on the rows that are computed together; {_REMEDY}"
            )


def _place(device: torch.device) -> str:
    return f"{torch.get_num_threads()} thread(s) of this machine" if device.type == "cpu" else str(device)


def _other_threads(device: torch.device) -> str:
    return ", another OMP_NUM_THREADS" if device.type == "cpu" else ""


def operations(
    model: Model, kernels: Kernels, dtype: torch.dtype, device: torch.device | None = None
) -> Iterator[Check]:
    """Yield a `Check` for each operation of the model, on the model's own shapes and a device (None: the CPU), in
    order."""
    draw = partial(_normal, torch.Generator().manual_seed(0), dtype, device)
    config, text = model.config, model.text_of(model.skeleton)
    for out, width in sorted({(shape[0], shape[1]) for shape in model.whole_shapes.values() if len(shape) == 2}):
        weight = partial(draw, min(out, max(1, _WIDEST // width)), width)
        yield f"linear of {width} to {out} numbers", partial(_product_holds, kernels.linear, weight, draw)
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    for op in ("rms_norm", "add_rms_norm", "glu", "rotary"):
        if models.has_place(text, op):
            hidden = getattr(config, "intermediate_size", None) if op == "glu" else config.hidden_size
            yield op, partial(_LAYERS[op], getattr(kernels, op), draw, hidden or config.hidden_size, heads, width)
    yield "attention", partial(_attention_holds, kernels.attention, draw, heads, kv_heads, width)
    decodes = partial(_decoding_holds, kernels.attention, kernels.decode_attention)
    yield "decode_attention", partial(decodes, draw, heads, kv_heads, width)
    yield "log_probs", partial(_log_probs_hold, kernels.log_probs, draw, config.vocab_size, config.hidden_size)


def _normal(
    generator: torch.Generator, dtype: torch.dtype, device: torch.device | None, *shape: int, scale: float = 1.0
) -> Tensor:
    return (torch.randn(shape, generator=generator) * scale).to(device, dtype)


def _rows_hold(fn: Callable[..., tuple[Tensor, ...]], *columns: Tensor) -> bool:
    """Whether `fn` gives rows of `columns` the same bits in parts of the batch as in the whole, wherever a part
    begins."""
    whole, begin = fn(*columns), 0
    for size in _PARTS:
        begin = (begin + 7) % (len(columns[0]) - size + 1)
        part = slice(begin, begin + size)
        if not all(torch.equal(a, b[part]) for a, b in zip(fn(*(x[part] for x in columns)), whole, strict=True)):
            return False
    return True


def _product_holds(linear: Callable[..., Tensor], weight: Callable[[], Tensor], draw: Callable[..., Tensor]) -> bool:
    """Whether `linear` keeps a row's bits in any batch, and those of an output when only half of the outputs are
    computed: decoding joins several weights into one. `draw(*sizes)` gives random tensors."""
    whole = weight()
    rows = draw(MANY, whole.shape[1])
    half = whole[: (len(whole) + 1) // 2].clone()
    apart = torch.equal(linear(rows, half), linear(rows, whole)[:, : len(half)])
    return apart and _rows_hold(lambda x: (linear(x, whole),), rows)


def _norm_holds(norm: Callable[..., Tensor], draw: Callable[..., Tensor], hidden: int, *_: int) -> bool:
    weight = draw(hidden)
    return _rows_hold(lambda x: (norm(x, weight, eps=1e-6),), draw(ROWS, hidden))


def _added_norm_holds(
    norm: Callable[..., tuple[Tensor, Tensor]], draw: Callable[..., Tensor], hidden: int, *_: int
) -> bool:
    weight = draw(hidden)
    return _rows_hold(lambda x, y: norm(x, y, weight, eps=1e-6), draw(ROWS, hidden), draw(ROWS, hidden))


def _glu_holds(glu: Callable[..., Tensor], draw: Callable[..., Tensor], hidden: int, *_: int) -> bool:
    return _rows_hold(lambda x, y: (glu(x, y),), draw(ROWS, hidden), draw(ROWS, hidden))


def _rotary_holds(
    rotary: Callable[..., tuple[Tensor, Tensor]], draw: Callable[..., Tensor], hidden: int, heads: int, width: int
) -> bool:
    columns = draw(ROWS, heads, width), draw(ROWS, 1, width), draw(ROWS, width), draw(ROWS, width)
    return _rows_hold(rotary, *columns)


_LAYERS: dict[str, Callable[..., bool]] = {
    "rms_norm": _norm_holds,
    "add_rms_norm": _added_norm_holds,
    "glu": _glu_holds,
    "rotary": _rotary_holds,
}


def _attention_holds(
    attention: Callable[..., Tensor], draw: Callable[..., Tensor], heads: int, kv_heads: int, width: int
) -> bool:
    """Whether attention gives a sequence the same bits alone as beside other sequences."""
    sizes = (3, 40, 1, ROWS)
    packed = [draw(sum(sizes), count, width) for count in (heads, kv_heads, kv_heads)]
    together = attention(*packed, lengths=make_lengths(sizes, packed[0].device), scale=width**-0.5).split(sizes)
    alone = [
        attention(*rows, lengths=make_lengths([size], rows[0].device), scale=width**-0.5)
        for size, rows in zip(sizes, zip(*(x.split(sizes) for x in packed), strict=True), strict=True)
    ]
    return all(map(torch.equal, together, alone))


def _decoding_holds(
    attention: Callable[..., Tensor],
    decoding: Callable[..., Tensor],
    draw: Callable[..., Tensor],
    heads: int,
    kv_heads: int,
    width: int,
) -> bool:
    """Whether `decoding` gives the last tokens of sequences, in one call over their padded cache, the same bits as
    packed `attention`. Heads have `width` numbers, from `draw(*sizes)`."""
    sizes, scale = (3, 40, 1, ROWS), width**-0.5
    query, *pair = (draw(sum(sizes), count, width) for count in (heads, kv_heads, kv_heads))
    expected = attention(query, *pair, lengths=make_lengths(sizes, query.device), scale=scale)
    caches = [x.new_zeros(len(sizes), kv_heads, ROWS + 5, width) for x in pair]
    bias = query.new_zeros(len(sizes), ROWS + 5)
    for row, (size, *parts) in enumerate(zip(sizes, *(x.split(sizes) for x in pair), strict=True)):
        bias[row, : ROWS - size] = -torch.inf
        for cache, part in zip(caches, parts, strict=True):
            cache[row, :, ROWS - size : ROWS] = part.transpose(0, 1)
    last = torch.tensor(sizes, device=query.device).cumsum(0) - 1
    return torch.equal(decoding(query[last], *caches, bias, start=0, end=ROWS, scale=scale), expected[last])


def _log_probs_hold(kernel: Callable[..., object], draw: Callable[..., Tensor], vocabulary: int, hidden: int) -> bool:
    """Whether the kernel gives tokens' log-probs the same bits in parts of a batch as in the whole; of a wide head only
    a part is tested."""
    vocabulary = min(vocabulary, max(1, _WIDEST // hidden))
    weight = draw(vocabulary, hidden, scale=hidden**-0.5)
    labels = torch.arange(ROWS, device=weight.device) * 7 % vocabulary

    def numbers(states: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        return (kernel(states, weight, labels, temperature=0.7).log_probs,)  # type: ignore[attr-defined]

    return _rows_hold(numbers, draw(ROWS, hidden), labels)


def _small_instance(model: Model, kernels: Kernels, device: torch.device) -> str | None:
    """Compare rollouts of a small instance of the model with passes over them; describe the difference, or return
    None."""
    probe = make_probe(model)
    engine = EmbeddedEngine(model=probe.model, kernels=kernels, pad_token_id=0, exact=True)
    generator, width, texts = torch.Generator().manual_seed(0), max(_PROMPTS), Column([""] * len(_PROMPTS))
    mask = torch.arange(width) >= width - torch.tensor(_PROMPTS)[:, None]
    prompts = Prompts(
        tokens=torch.randint(probe.model.config.vocab_size, mask.shape, generator=generator).where(mask, 0),
        attention_mask=mask,
        row_ids=torch.arange(len(_PROMPTS)),
        ids=texts,
        ground_truth=texts,
        source=texts,
        extras=texts,
    )
    params = {name: x.to(device) for name, x in probe.params.items()}
    rows = engine.generate(params, Ask(prompts, Sampling(max_tokens=_TOKENS), Key(0)))
    forward = Forward(probe.model, kernels)
    for size in (1, len(_PROMPTS)):
        passed = compute_log_probs(params, rows, forward=forward, micro_batching=MicroBatching(size=size))
        if not torch.equal(passed.where(rows.response_mask, 0.0), rows.rollout_log_probs):
            return f"passes of {size} row(s) have other bits than the rollout of a small instance"
    return None
