"""Compare fppo's forward pass with transformers' on a small random instance of a model's architecture."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from typing import cast

import attrs
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from fppo.batch import RowInputs
from fppo.key import Key
from fppo.models.heads import logits_of, output_head
from fppo.models.lengths import longest_row
from fppo.models.model import BUILDING, Model, Params, build, causal_lm, named_state
from fppo.models.rows import RowWise, packed_attention
from fppo.models.run import hidden_states
from fppo.models.seams import AttentionLayer
from fppo.models.states import without_tokens
from fppo.models.vision_pass import place_images
from fppo.models.vision_probe import WORDS, composite_inputs, probe_inputs, with_text
from fppo_kernels.attention.sdpa import sdpa
from fppo_kernels.padding import make_lengths

TOLERANCE = 1e-3  # for float32 numbers of size 1; faults found in models were above 0.1
CUT_TOLERANCE = 1e-6  # for float64 numbers of size 1: a cut model against the whole one
_SHORT, _LONG = 5, 24  # tokens of the two rows, without those of an image
_BEFORE = (5, 6, 7)  # tokens before an image
_EDGE = 16  # the length at which a rope changes, lowered so that the long row exceeds it
_WINDOW = 7
_VOCABULARY = _INNER_WIDTH = 64
_WIDTH = 128  # of a head in models without heads
_MOST = 1 << 28  # parameters
_LINEAR_HEADS = ("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads")
_INNER = re.compile(r".*(intermediate_size|inner_size|ffn_hidden_size)$|ffn_dim|n_inner|d_ff")


@attrs.frozen(eq=False)
class Probe:
    """A small random instance of a model's architecture, as a `Model` and as transformers' module (`plain`)."""

    model: Model
    params: Params  # float32, on the CPU
    plain: PreTrainedModel
    inputs: RowInputs | None = None  # an image, and a video, if the model takes any
    head: tuple[int, ...] = ()  # the first tokens of a row, up to the end of `inputs`

    def inputs_of(self, row: Tensor) -> RowInputs | None:
        """The images of a row of tokens [S] that begins with `head`; None for others."""
        return self.inputs if self.head and row[: len(self.head)].tolist() == list(self.head) else None

    @torch.no_grad()
    def expected(self, row: Tensor) -> Tensor:
        """transformers' logits [S, V] of a single row of tokens [S]."""
        inputs = self.inputs_of(row)
        beside = {} if inputs is None else composite_inputs(self.plain, row, inputs)
        return self.plain(input_ids=row[None], use_cache=False, **beside).logits[0]


def make_probe(model: Model, *, heads: Sequence[int | None] = (2, 4, None)) -> Probe:
    """The probe of a model: few layers, narrow and with a small vocabulary, but one layer of each of the model's kinds.

    It has the first number of `heads` that fits the architecture (None: the model's). Where fewer layers or narrower
    widths do not fit, the model's stay. Raises ValueError if no small instance runs in transformers.
    """
    model = model.plain
    few, total = _layers_of_each_kind(model), len(model.layers)
    problems: list[Exception] = []
    sizes: list[tuple[int, int | None]] = [(few, n) for n in heads]
    for count, number in (*sizes[:-1], (total, 2), sizes[-1]):
        try:
            config = _smaller(model.config, count, number)
            config = config if model.vision is None else with_text(model.vision, config)
            small = build(config, trust_remote_code=model.trust_remote_code)
            if _parts(small, count) == _parts(model, count) and sum(x.numel() for x in small.shapes.values()) < _MOST:
                probe = _filled(small)
                for row in probe_rows(probe):
                    probe.expected(row)
                return probe
        except Exception as error:  # a class may raise any exception for sizes that do not fit
            problems.append(error)
    why = "; ".join(dict.fromkeys(f"{type(error).__name__}: {error}" for error in problems))
    raise ValueError(
        f"fppo cannot check whether it runs model type {model.whole_config.model_type!r} as transformers does: small "
        f"random instances of it do not run in transformers either, are too large, or have other parameters. {why}"
    )


@torch.no_grad()
def check_model(model: Model) -> None:
    """Compare a small model of this architecture with transformers' plain forward pass.

    Two rows of different lengths are packed into one, the longer beyond the length at which its rope changes, unless
    that is refused (`longest_row`). Raises ValueError that names the model type and the fault: a layer whose attention
    bypasses the attention seam, or other logits.
    """
    kind = model.whole_config.model_type
    probe = make_probe(model)
    rows = probe_rows(probe)
    expected = torch.cat([probe.expected(row) for row in rows])
    try:
        logits, asked = _packed_logits(probe, rows)
    except Exception as error:
        raise ValueError(
            f"fppo cannot run model type {kind!r}, whose code fails where it gets packed rows and no attention mask: "
            f"{type(error).__name__}: {error}"
        ) from error
    if asked | {*probe.model.stateful} | without_tokens(probe.model.config) != set(range(len(probe.model.layers))):
        raise ValueError(
            f"fppo cannot run model type {kind!r}: its layers compute attention in code of their own, not by "
            "transformers' attention interface, so that rows packed together would see one another"
        )
    compare(kind, logits, expected, f"the logits of packed rows of {_SHORT} and {len(rows[1])} tokens")


def probe_rows(probe: Probe) -> tuple[Tensor, Tensor]:
    """A short and a long row of tokens [S] int64; the long one has an image if the model takes any."""
    config = probe.model.config
    long = min(_LONG, longest_row(config) or _LONG)
    tokens = torch.arange(3, 3 + _SHORT + long) * 7 % (WORDS if probe.head else config.vocab_size)
    return tokens[:_SHORT], torch.cat([torch.tensor(probe.head, dtype=torch.int64), tokens[_SHORT:]])


def difference(got: Tensor, expected: Tensor, tolerance: float = CUT_TOLERANCE) -> float | None:
    """The largest difference of two tensors if it exceeds rounding (`tolerance`) or is nan, else None."""
    largest = (got - expected).abs().max().item()
    return None if largest <= tolerance * max(1.0, expected.abs().max().item()) else largest


def compare(kind: str, got: Tensor, expected: Tensor, noun: str) -> None:
    """Raise ValueError if numbers (`noun`) of model type `kind` differ from those expected, beyond float32 rounding."""
    if (wrong := difference(got, expected, TOLERANCE)) is not None:
        raise ValueError(
            f"fppo cannot run model type {kind!r}: {noun} differ from transformers' by {wrong:.2g} in a small "
            "random model of this kind; its head, its positions or its attention do something unknown to fppo"
        )


def _packed_logits(probe: Probe, rows: tuple[Tensor, ...]) -> tuple[Tensor, set[int]]:
    """The logits [N, V] of rows packed into one, and the indices of the layers whose attention went by the seam."""
    asked: set[int] = set()
    inputs = [probe.inputs_of(row) for row in rows]
    hidden = packed_hidden(probe.model, probe.params, rows, asked, inputs)
    return logits_of(output_head(probe.model, probe.params), hidden), asked


def packed_hidden(
    model: Model,
    params: Params,
    rows: Sequence[Tensor],
    attention_layers: set[int] | None = None,
    inputs: Sequence[RowInputs | None] = (),
) -> Tensor:
    """The hidden states [N, H] of rows packed into one, with their images; `attention_layers` gets the indices of the
    layers that call the attention seam."""
    plain = packed_attention(sdpa, make_lengths([len(row) for row in rows]))

    def attend(query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer) -> Tensor:
        if attention_layers is not None:
            attention_layers.add(layer.number)
        return plain(query, key, value, layer)

    positions = torch.cat([torch.arange(len(row)) for row in rows])
    tokens = torch.cat(list(rows))
    images, positions = place_images(model, inputs, tokens, positions, [len(row) for row in rows])
    return hidden_states(model, params, tokens, positions, attend=RowWise(attend, plain.carry), received=images)


def _filled(small: Model) -> Probe:
    """The probe of a small model, with weights large enough for attention patterns and positions to matter."""
    with BUILDING, torch.random.fork_rng(devices=[]):
        plain = causal_lm(small.whole_config, "cpu", trust_remote_code=small.trust_remote_code)
    plain.config._attn_implementation = "eager"
    generator = Key(0).generator()
    for parameter in plain.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.data = 1.5 * noise / parameter.shape[-1] ** 0.5
        else:
            parameter.data += 0.3 * noise
    named = named_state(plain)
    for name in sorted(small.buffers):
        if name.endswith("bias"):  # of a router; other buffers may have to be positive
            named[name].data += 0.3 * torch.randn(named[name].shape, generator=generator)
    inputs, head = None, []
    if small.vision is not None:
        inputs, head = probe_inputs(small.vision, cast(PreTrainedModel, plain.base_model), _BEFORE)
    return Probe(small, {name: named[name].detach() for name in small.shapes}, plain, inputs, tuple(head))


def _parts(model: Model, count: int) -> set[str]:
    """The names of the model's parameters before the head, without a vision tower's, and without those of layers beyond
    the first `count`."""
    beyond = tuple(f"{model.prefix}{path}." for path in model.layers[count:])
    inside = {name for name in model.whole_shapes if name.startswith(model.prefix) and not name.startswith(beyond)}
    return inside - model.vision_params


def _layers_of_each_kind(model: Model) -> int:
    """The least number of first layers, two or more, with a layer of each kind."""
    total = len(model.layers)
    lists = [x for x in vars(model.config).values() if isinstance(x, (list, tuple)) and len(x) == total]
    kinds: dict[tuple[object, ...], int] = {}
    for i, path in enumerate(model.layers):
        start = f"{model.prefix}{path}."
        names = frozenset(name.removeprefix(start) for name in model.whole_shapes if name.startswith(start))
        kinds.setdefault((names, *(str(x[i]) for x in lists)), i)
    deep = 0 if model.vision is None else model.vision.deep  # the first of two stages needs one more
    return min(max(1 + deep, *kinds.values()) + 1, total)


def _smaller(config: PreTrainedConfig, layers: int, heads: int | None) -> PreTrainedConfig:
    """The config of a model with the first `layers` layers, a small vocabulary, and widths of `heads` heads if fewer.

    A head keeps its width. Windows and the lengths at which a rope changes are lowered below the long row's.
    """
    config, total = copy.deepcopy(config), config.num_hidden_layers
    hidden = config.hidden_size
    before = getattr(config, "num_attention_heads", None) or max(1, hidden // _WIDTH)
    width = (heads or before) * (getattr(config, "head_dim", None) or hidden // before)
    narrow = heads is not None and heads < before and width < hidden
    if heads is not None and narrow:
        if getattr(config, "num_key_value_heads", None):
            config.num_key_value_heads = heads if config.num_key_value_heads == before else heads // 2
        if hasattr(config, "num_attention_heads"):
            config.num_attention_heads = heads
        _narrow_states(config, hidden, width)
    for name, value in list(vars(config).items()):
        if isinstance(value, (list, tuple)) and len(value) == total:
            shrink = narrow and _INNER.fullmatch(name)  # one per layer in Gemma 3n
            setattr(config, name, [min(x, _INNER_WIDTH) for x in value[:layers]] if shrink else value[:layers])
        elif type(value) is int:
            if name.endswith("sliding_window"):
                setattr(config, name, min(value, _WINDOW))
            elif name.startswith("vocab_size"):
                setattr(config, name, min(value, _VOCABULARY))
            elif narrow and _INNER.fullmatch(name):
                setattr(config, name, min(value, _INNER_WIDTH))
            elif narrow and value == hidden:
                setattr(config, name, width)
    config.num_hidden_layers, config.vocab_size = layers, min(config.vocab_size, _VOCABULARY)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(config, name, None) is not None:
            setattr(config, name, 0)
    if longest_row(config) is None:
        for name in ("rope_parameters", "original_max_position_embeddings"):
            if getattr(config, name, None) is not None:
                setattr(config, name, _lowered(name, getattr(config, name)))
    return config


def _narrow_states(config: PreTrainedConfig, hidden: int, width: int) -> None:
    """Reduce the heads of linear attention, in their proportions, to one or two of a kind, and Mamba's where they make
    up a multiple of the hidden width, which becomes `width`."""
    linear = {name: number for name in _LINEAR_HEADS if (number := getattr(config, name, None))}
    common = math.gcd(*linear.values())
    for name, number in linear.items():
        setattr(config, name, number // common * (1 + (common % 2 == 0)))
    for start, (number, size) in {"mamba_": ("n_heads", "d_head"), "": ("num_heads", "head_dim")}.items():
        heads, each, expand = (getattr(config, start + name, None) for name in (number, size, "expand"))
        if heads and each and expand and heads * each == int(expand * hidden):
            fewer = max(1, int(expand * width) // each)
            setattr(config, start + number, fewer)
            setattr(config, f"{start}n_groups", math.gcd(fewer, getattr(config, f"{start}n_groups", 1)))


def _lowered(name: str, value: object) -> object:
    """Lower the length at which a rope changes, in a field of a config or a section of fields."""
    if isinstance(value, Mapping):
        return {key: _lowered(key, x) for key, x in value.items()}
    return _EDGE if name == "original_max_position_embeddings" else value
