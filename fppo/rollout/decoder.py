"""Decode one token per row through layers like Llama's, in fewer and larger operations than their modules take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from fppo.models.adapted import Adapted, Factors, add_own_, taking_adapted
from fppo.models.codes import shapes_of_weights
from fppo.models.heads import embedding_name
from fppo.models.inner import GluSeam, LinearSeam, NormSeam
from fppo.models.known import KINDS, KnownLayer
from fppo.models.model import Model
from fppo.models.quantised import Quantised
from fppo.models.regions import BlockSeam, EmbeddingSeam
from fppo.models.seams import Attend, AttentionLayer, LayerSeam
from fppo.models.slices import MlpSeam
from fppo.rollout.cache import Layers
from fppo_kernels.collectives import Axis, all_reduce
from fppo_kernels.decode_attention.steps import DTYPES, StepColumns, add_norm_step, attend_step, glu_step
from fppo_kernels.linear.bfloat16 import bfloat16, rounded
from fppo_kernels.linear.cpp import Joined, cpp, joined
from fppo_kernels.linear.onednn import is_plain, onednn, packed, stacked
from fppo_kernels.linear.plain import plain
from fppo_kernels.rotary.eager import eager
from fppo_kernels.table import BUILTIN

JOINED = 1 << 28  # if all weights have at most so many bytes, weights with the same input are joined in a copy
PACKED = 1 << 30  # if all weights have at most so many bytes, they are copied in the layout or dtype of products

_Weight = Tensor | Joined  # [O, I]
_Product = tuple[_Weight, Tensor | None]  # with its bias [O]
Packing = Callable[..., _Weight]  # joins weights of the same input, and lays them out for products
_PACKINGS: Mapping[Callable[..., Tensor], Packing] = MappingProxyType({onednn: packed, cpp: joined, bfloat16: rounded})


class Rotation(NamedTuple):
    """Cosines and sines [..., 1, D] of positions, and the rotary kernel; without a kernel the first half of the sines
    is negated."""

    cos: Tensor
    sin: Tensor
    kernel: Callable[..., tuple[Tensor, Tensor]] | None = None

    def at(self, positions: Tensor | slice) -> Rotation:
        return Rotation(self.cos[positions], self.sin[positions], self.kernel)

    def of(self, x: Tensor, queries: int) -> tuple[Tensor, Tensor]:
        """Rotate heads `x` [R, heads, D], of which the first `queries` are queries and the others keys, and return the
        two: transformers' x * cos + rotate_half(x) * sin."""
        sizes = queries, x.shape[1] - queries
        if self.kernel is not None:
            return self.kernel(*x.split(sizes, 1), self.cos[:, 0], self.sin[:, 0])
        turned = (x * self.cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(self.sin))
        query, key = turned.split(sizes, 1)
        return query, key


class _DecoderNorm(NamedTuple):
    weight: Tensor
    eps: float
    kernel: Callable[..., Tensor] | None  # None: the model's own code

    @property
    def numbers(self) -> tuple[Tensor, float]:
        return self.weight, self.eps

    def of(self, x: Tensor) -> Tensor:
        if self.kernel is not None:
            return self.kernel(x, self.weight, eps=self.eps)
        if x.dtype in (torch.float32, torch.float64):
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class _Embedding(NamedTuple):
    """A plain embedding that keeps its weight, and so works outside of `bind` too."""

    weight: Tensor

    def __call__(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class _Layer(NamedTuple):
    """A decoder layer's parameters. Weights with the same input are together, joined into one or as several."""

    before: _DecoderNorm
    qkv: Sequence[_Product]
    head_norms: tuple[_DecoderNorm, _DecoderNorm] | None  # of queries and keys
    out: _Product
    after: _DecoderNorm
    gate_up: Sequence[_Product]
    glu: Callable[[Tensor, Tensor], Tensor]
    down: _Product


_GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {  # groups of weights with the same input
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "out": ("self_attn.o_proj",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    }
)


class DecoderFactors(NamedTuple):
    """An adapter's factors in a decoder's layout: for each layer, the factors of weights with the same input,
    joined."""

    embedding: Factors | None
    layers: Sequence[Mapping[str, Factors]]  # by group of `_GROUPS`; only the groups that it adapts

    @staticmethod
    def of(model: Model, factors: Mapping[str, Factors]) -> DecoderFactors:
        """Arrange a model's factors, given by the names of their weights, in a decoder's layout."""
        shapes = shapes_of_weights(model.shapes, model.forms, model.layout)
        layers: list[dict[str, Factors]] = []
        for path in model.layers:
            names = {group: [f"{model.prefix}{path}.{end}.weight" for end in ends] for group, ends in _GROUPS.items()}
            adapted = {group: own for group, own in names.items() if any(name in factors for name in own)}
            layers.append({group: _side_by_side(shapes, own, factors) for group, own in adapted.items()})
        return DecoderFactors(factors.get(embedding_name(model)), layers)


class OwnSteps(NamedTuple):
    """The rows of a step that use one adapter."""

    rows: Tensor  # int64 [r]
    factors: DecoderFactors


class FusedStep(NamedTuple):
    """A kernel for linear layers with plain weights, and the activation of the MLPs."""

    linear: Callable[..., Tensor]
    activation: str


class Decoder(NamedTuple):
    """The parameters of a skeleton inside `bind`, laid out for `hidden`. If they are `held`, `hidden` works outside of
    `bind` too.

    On a tensor axis they are shards, and each rank computes its share of the output of attention and MLP for all rows.
    """

    embedding: nn.Module | _Embedding
    axis: Axis
    layers: Sequence[_Layer]
    norm: _DecoderNorm
    heads: tuple[int, int, int]  # of queries, of keys; width
    rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    linear: Callable[..., Tensor]
    turn: Callable[..., tuple[Tensor, Tensor]] | None  # the rotary kernel; None: the model's own code
    fused: FusedStep | None = None  # if all kernels between products are in C++: how `fused_hidden` computes

    @property
    def held(self) -> bool:
        """Whether the decoder itself holds all parameters of `hidden`."""
        return isinstance(self.embedding, _Embedding)

    def rotation(self, length: int) -> Rotation:
        """The rotation of all positions of a row of this length."""
        like: Any = self.embedding.weight
        cos, sin = self.rotary(like, torch.arange(length, device=like.device)[None])
        if self.turn is not None:
            return Rotation(cos[0][:, None], sin[0][:, None], self.turn)
        half = sin.shape[-1] // 2
        return Rotation(cos[0][:, None], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)[:, None])

    def hidden(
        self,
        tokens: Tensor,
        rotation: Rotation,
        *,
        attend: Attend,
        attention_layers: Sequence[AttentionLayer],
        own: Sequence[OwnSteps] = (),
    ) -> Tensor:
        """Compute hidden states [R, H], after the last norm, of one token per row [R]. `rotation` is that of each row's
        position [R, 1, D].

        `attention_layers` are the arguments of each layer's `attend`. `own` are the rows that use adapters, with the
        factors.
        """
        embedding, axis = self.embedding, self.axis
        shares = embedding.share if isinstance(embedding, EmbeddingSeam) else embedding
        x = all_reduce(shares(tokens), axis)
        for rows, factors in own:
            if factors.embedding is not None:
                a, b, scale = factors.embedding
                x.index_add_(0, rows, F.embedding(tokens[rows], b) @ a, alpha=scale)
        queries, keys, width = self.heads
        for number, (layer, what) in enumerate(zip(self.layers, attention_layers, strict=True)):
            with_own = partial(_with_own, own, number)
            inner = layer.before.of(x)
            heads = with_own("qkv", inner, self._products_of(inner, layer.qkv)).view(len(x), -1, width)
            turned, value = heads.split((queries + keys, keys), 1)
            if layer.head_norms is not None:
                pairs = zip(layer.head_norms, turned.split((queries, keys), 1), strict=True)
                turned = torch.cat([norm.of(part) for norm, part in pairs], 1)
            query, key = rotation.of(turned, queries)
            mixed = attend(query[:, None], key[:, None], value[:, None], what).flatten(1)
            x = all_reduce(with_own("out", mixed, self.linear(mixed, *layer.out)), axis).add_(x)
            inner = layer.after.of(x)
            gate, up = with_own("gate_up", inner, self._products_of(inner, layer.gate_up)).chunk(2, -1)
            inner = layer.glu(gate, up)
            x = all_reduce(with_own("down", inner, self.linear(inner, *layer.down)), axis).add_(x)
        return self.norm.of(x)

    def fused_hidden(
        self, tokens: Tensor, where: StepColumns, cache: Layers, attention_layers: Sequence[AttentionLayer]
    ) -> Tensor:
        """Compute `hidden`, bit for bit, by one call in C++ between two products; for rows without adapters."""
        assert self.fused is not None
        (linear, activation), (queries, keys, width) = self.fused, self.heads
        x = residual = self.embedding(tokens)
        inner = add_norm_step(x, None, *self.layers[0].before.numbers)
        norms = [*(layer.before for layer in self.layers[1:]), self.norm]
        behind = {window: where.behind(window) for window in {what.window for what in attention_layers}}
        for number, (layer, what, norm) in enumerate(zip(self.layers, attention_layers, norms, strict=True)):
            heads = linear(inner, *layer.qkv[0]).view(len(x), queries + 2 * keys, width)
            mixed = attend_step(heads, *cache[number], behind[what.window], **what.numbers)
            inner = add_norm_step(linear(mixed, *layer.out), residual, *layer.after.numbers)
            inner = glu_step(linear(inner, *layer.gate_up[0]), activation)
            inner = add_norm_step(linear(inner, *layer.down), residual, *norm.numbers)
        return inner

    def _products_of(self, x: Tensor, products: Sequence[_Product]) -> Tensor:
        """Multiply `x` with each of the weights, and concatenate the results."""
        results = [self.linear(x, *product) for product in products]
        return results[0] if len(results) == 1 else torch.cat(results, -1)


def _with_own(own: Sequence[OwnSteps], layer: int, group: str, x: Tensor, out: Tensor) -> Tensor:
    """Add the products of `x` with the adapters' factors to the adapters' rows of `out`, for one group of weights (a
    key of `_GROUPS`) of one layer; `own` are each adapter's rows and factors."""
    found = [(rows, factors.layers[layer].get(group)) for rows, factors in own]
    return add_own_(out, x, [(rows, factors) for rows, factors in found if factors is not None])


def _side_by_side(shapes: Mapping[str, torch.Size], names: Sequence[str], factors: Mapping[str, Factors]) -> Factors:
    """Join the factors of several weights into one pair for the stacked weights: A [r, in] concatenated, and B [out, r]
    block-diagonal. Weights without factors have zeros in B."""
    some = next(factors[name] for name in names if name in factors)
    if len(names) == 1:
        return some
    ranks = [len(factors[name].a) if name in factors else 0 for name in names]
    heights = [shapes[name][0] for name in names]
    b = some.b.new_zeros(sum(heights), sum(ranks))
    for i, name in enumerate(names):
        if name in factors:
            above, left = sum(heights[:i]), sum(ranks[:i])
            b[above : above + heights[i], left : left + ranks[i]] = factors[name].b
    return Factors(torch.cat([factors[name].a for name in names if name in factors]), b, some.scale)


def packing_of(linear: Callable[..., Tensor], size: int) -> Packing | None:
    """The function that lays out weights of `size` bytes in all for the products of a kernel; None: there is none."""
    return _PACKINGS.get(linear) if size <= PACKED else None


def decoder_of(
    skeleton: PreTrainedModel,
    linear: Callable[..., Tensor] = plain,
    *,
    packs: bool = False,
    decode_attention: Callable[..., Tensor] | None = None,
) -> Decoder | None:
    """Make the decoder of a skeleton, inside `bind`, with the kernel `linear` for linear layers; None if the skeleton,
    or a module in it, is of an unknown class. With `packs`, weights are copied into the layout or dtype of its
    products. `decode_attention` is the kernel for attention."""
    base: Any = skeleton
    kind = type(base).__module__
    if kind not in KINDS or not all(_known(module, kind) for module in base.modules()):
        return None
    size = sum(x.numel() * x.element_size() for x in base.layers.parameters())
    attention, embedding = base.layers[0].self_attn, base.embed_tokens
    width = attention.head_dim
    copied = (packing_of(linear, size) if packs else None) or (stacked if size <= JOINED else None)
    made = Decoder(
        embedding=_Embedding(embedding.weight) if type(embedding) is nn.Embedding else embedding,
        axis=embedding.region.axis if isinstance(embedding, EmbeddingSeam) else Axis(),
        layers=[_layer(layer, copied) for layer in base.layers],
        norm=_norm(base.norm),
        heads=(attention.q_proj.out_features // width, attention.k_proj.out_features // width, width),
        rotary=base.rotary_emb,
        linear=taking_adapted(linear),
        turn=_turn(base.layers[0]),
    )
    return made._replace(fused=_fused(made, base, linear, decode_attention))


def _fused(
    decoder: Decoder, base: Any, linear: Callable[..., Tensor], decode_attention: Callable[..., Tensor] | None
) -> FusedStep | None:
    """Find out with what `fused_hidden` computes; None if a kernel between the products is not in C++, or a layer is of
    another form than it knows."""
    first, mlp = decoder.layers[0], _inside(base.layers[0].mlp)
    kernels = {"decode_attention": decode_attention, "rms_norm": first.before.kernel, "rotary": decoder.turn}
    kernels["glu"] = mlp._kernel if isinstance(mlp, GluSeam) else None
    in_cpp = all(fn is not None and BUILTIN[op]["cpp"].is_of(fn) for op, fn in kernels.items())
    weights = [
        weight
        for layer in decoder.layers
        for weight, _ in (*layer.qkv, layer.out, *layer.gate_up, layer.down, (layer.before.weight, None))
    ]
    plain_weights = all(isinstance(x, Joined) or is_plain(x) for x in weights)
    joined = all(len(layer.qkv) == len(layer.gate_up) == 1 and layer.head_norms is None for layer in decoder.layers)
    if not (in_cpp and plain_weights and joined and decoder.held and first.before.weight.dtype in DTYPES):
        return None
    return FusedStep(linear, mlp._form.activation)


def _known(module: nn.Module, kind: str) -> bool:
    own = module._seam[1] if isinstance(module, LayerSeam) else _inside(module)
    plain = type(own) in (nn.Linear, LinearSeam, NormSeam, GluSeam, KnownLayer, nn.Embedding, nn.ModuleList)
    return plain or type(own).__module__ in (kind, "transformers.activations", "torch.nn.modules.activation")


def _inside(module: Any) -> Any:
    """The module itself, without the wrappers in which a tensor axis exchanges tokens, or an MLP is cut."""
    while isinstance(module, BlockSeam | EmbeddingSeam | MlpSeam):
        module = module._inner[0]
    return module


def _turn(layer: Any) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """A layer's rotary kernel; None for the model's own code."""
    known = layer._seam[1]
    return known._rotary if isinstance(known, KnownLayer) and known._rotary is not eager else None


def _layer(layer: Any, copied: Packing | None) -> _Layer:
    """A layer's parameters, with weights of the same input joined by `copied`. None: the model's own weights, apart."""
    attention, mlp = _inside(layer.self_attn), _inside(layer.mlp)
    own = getattr(attention, "q_norm", None)
    return _Layer(
        before=_norm(layer.input_layernorm),
        qkv=_products((attention.q_proj, attention.k_proj, attention.v_proj), copied),
        head_norms=None if own is None else (_norm(own), _norm(attention.k_norm)),
        out=_product(attention.o_proj, copied),
        after=_norm(layer.post_attention_layernorm),
        gate_up=_products((mlp.gate_proj, mlp.up_proj), copied),
        glu=_glu(mlp),
        down=_product(mlp.down_proj, copied),
    )


def _norm(module: Any) -> _DecoderNorm:
    return _DecoderNorm(
        module.weight, module.variance_epsilon, module._kernel if isinstance(module, NormSeam) else None
    )


def _glu(mlp: Any) -> Callable[[Tensor, Tensor], Tensor]:
    if isinstance(mlp, GluSeam):
        return partial(mlp._kernel, activation=mlp._form.activation)
    act = mlp.act_fn
    return lambda gate, up: act(gate).mul_(up)


def _product(module: nn.Linear, copied: Packing | None) -> _Product:
    return module.weight if copied is None else copied(module.weight), module.bias


def _products(modules: Sequence[nn.Linear], copied: Packing | None) -> list[_Product]:
    """The weights and biases of modules with the same input: joined by `copied`, or without it one by one."""
    weights: list[Tensor] = [module.weight for module in modules]
    if copied is None or any(isinstance(weight, Adapted | Quantised) for weight in weights):
        return [_product(module, copied) for module in modules]
    biases: list[Tensor] = [module.bias for module in modules if module.bias is not None]
    assert len(biases) in (0, len(modules))
    return [(copied(*weights), torch.cat(biases) if biases else None)]
