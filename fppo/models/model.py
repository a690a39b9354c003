"""Models as values: a Hugging Face module on the meta device, without state, and its description."""

from __future__ import annotations

import copy
import math
import re
import threading
from collections.abc import Mapping
from typing import Any, Literal, cast

import attrs
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from fppo._errors import words_of
from fppo.models import codes, routing, seams
from fppo.models.adapted import FACTORS, Frozen
from fppo.models.inner import OWN, Inner, compile_layers, put_kernels
from fppo.models.logits import LogitForm, measure_logits
from fppo.models.precision import NarrowDefault
from fppo.models.recompute import Recompute
from fppo.models.rows import packed_attention, padded_attention
from fppo.models.slices import find_mlps, put_slices
from fppo.models.states import ALONE, has_attention, put_mixers, slides_along, stateful_layers
from fppo.models.vision import Vision, parts_of, put_attention, takes_images, vision_of
from fppo.runtime.layout import Cut, Extent, Layout
from fppo_kernels.padding import sent
from fppo_kernels.transforms import outside

__all__ = ["HeadKind", "Model", "Params", "build", "packed_attention", "padded_attention"]

Params = dict[str, Tensor]
HeadKind = Literal["lm", "value"]
Kept = tuple[Inner, int | None]  # what a copy of a skeleton was made for: its kernels, and the tokens of a slice
BUILDING = threading.RLock()  # transformers builds with torch's process-wide default dtype and generator
SCORE_WEIGHT, SCORE_BIAS = "score.weight", "score.bias"


@attrs.frozen
class Span:
    """One stage of a model that is cut into the `stages` of a pipeline: its number `stage` from 0, its `layers`, and
    the `names` of its parameters. `absent` has the shapes of parameters outside the layers, as the embedding, that only
    other stages have."""

    layers: range
    stage: int
    stages: int
    names: tuple[str, ...]
    absent: Mapping[str, torch.Size]

    @property
    def ends(self) -> bool:
        """Whether this is the last stage, with the head."""
        return self.stage == self.stages - 1


@attrs.frozen(eq=False, kw_only=True)
class Model:
    """A decoder-only language model without its parameters, or one with a vision tower before it.

    Parameters are cast to `compute_dtype` inside a pass, except those that transformers keeps in float32 beside it
    (`pass_dtype`). `checkpoint_layers` recomputes layers in the backward pass, whole or, if "selective", all but their
    attention. `compile_layers` runs layers as programs of torch.compile in `hidden_states`, which round differently.
    `mlp_slice_tokens` has MLPs compute so many tokens at a time, and again in the backward pass (`slices`).
    `attrs.evolve(model, checkpoint_layers=True)` changes these.
    """

    config: PreTrainedConfig  # of the language model
    skeleton: PreTrainedModel  # the base model on meta, with layer seams
    prefix: str  # of the base model's parameters, such as "model."
    layers: tuple[str, ...]  # paths of the decoder layers in the skeleton
    head: HeadKind
    logit_form: LogitForm  # of its vocabulary head's products
    shapes: Mapping[str, torch.Size]  # of every parameter; of tied parameters only the first name
    constants: Mapping[str, Tensor]  # the skeleton's buffers by path, such as "rotary_emb.inv_freq"
    routers: tuple[routing.Router, ...] = ()  # in the order of the layers
    stateful: tuple[int, ...] = ()  # the layers that carry a state along a row
    buffers: frozenset[str] = frozenset()  # those of `shapes` without gradient: state that checkpoints keep in buffers
    # by dtype of the others: the parameters kept in float32
    float32_params: Mapping[torch.dtype, frozenset[str]] = attrs.field(factory=dict)
    shares: bool = True  # whether tensors of the skeleton have several names, to be tied in each pass
    compute_dtype: torch.dtype | None = None
    checkpoint_layers: Recompute = False
    compile_layers: bool = False
    mlp_slice_tokens: int | None = None
    trust_remote_code: bool = False
    layout: Layout | None = None  # of a model placed on tensor, expert and pipeline axes: the cuts that give `shapes`
    spans: tuple[Span, ...] = ()  # this rank's stages of a pipeline
    unplaced: Model | None = None  # the model that it was placed from
    frozen: Frozen | None = None  # the base of an adapted model, whose factors are `shapes` (`lora.adapt`)
    forms: codes.Forms = attrs.field(factory=dict)  # the forms of quantised weights, by name (`bases.quantise`)
    vision: Vision | None = None  # the vision part of a model that takes images
    padding: int | None = None  # of a sequence classifier: the padding token, which its score skips at a row's end
    _copies: threading.local = attrs.field(factory=threading.local, init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if self.checkpoint_layers == "selective" and not has_attention(self.config):
            raise ValueError(
                f"model type {self.config.model_type!r} has no attention to keep results of: give "
                "checkpoint_layers = true in place of selective"
            )

    @property
    def whole_shapes(self) -> Mapping[str, torch.Size]:
        """The shapes of all weights before any axis cuts them, a base's included; for quantised weights the weights'
        shapes, not those of codes."""
        return codes.shapes_of_weights(self.kept_shapes, self.forms)

    @property
    def kept_shapes(self) -> Mapping[str, torch.Size]:
        """The shapes of all stored tensors before any axis cuts them, with codes and scales in place of weights."""
        return self.all_shapes if self.layout is None else self.layout.whole

    @property
    def whole_config(self) -> PreTrainedConfig:
        """The config that the model was built from."""
        return self.config if self.vision is None else self.vision.config

    @property
    def vision_params(self) -> frozenset[str]:
        """The names of the parameters of the vision tower and the projector."""
        text = None if self.vision is None else f"{self.prefix}{self.vision.text}."
        inside = (name for name in self.whole_shapes if name.startswith(self.prefix))
        return frozenset(() if text is None else (name for name in inside if not name.startswith(text)))

    @property
    def untrained_params(self) -> frozenset[str]:
        """The names of the parameters that updates leave alone: buffers with state, and an untrained vision tower."""
        return self.buffers if self.vision is None or self.vision.trains else self.buffers | self.vision_params

    def text_of(self, skeleton: PreTrainedModel) -> PreTrainedModel:
        """The language model in a skeleton of this model."""
        return skeleton if self.vision is None else cast(PreTrainedModel, skeleton.get_submodule(self.vision.text))

    @property
    def extents(self) -> Mapping[str, torch.Size | Extent]:
        """The whole shapes of the parameters on all stages, with the cuts of a tensor or expert axis."""
        layout = self.state_layout
        return self.shapes if layout is None else {name: layout.extent(name) for name in layout.whole}

    @property
    def cuts(self) -> Mapping[str, Cut]:
        """The cuts of parameters over a tensor or expert axis, a frozen base included."""
        return {} if self.layout is None else self.layout.cuts

    @property
    def state_layout(self) -> Layout | None:
        """The layout of the trained parameters: for an adapted model without its base."""
        if self.layout is None or self.frozen is None:
            return self.layout
        return self.layout.only(is_trained)

    def constants_on(self, device: torch.device) -> Mapping[str, Tensor]:
        """The constants on a device, copied once by each thread."""
        if device.type == "cpu":
            return self.constants
        kept: dict[torch.device, Mapping[str, Tensor]] = self._copies.__dict__.setdefault("constants", {})
        if device not in kept:
            with torch.inference_mode(False):  # so that training may use a rollout's copies
                kept[device] = outside(lambda: {name: sent(x, device) for name, x in self.constants.items()})
        return kept[device]

    @property
    def all_shapes(self) -> Mapping[str, torch.Size]:
        """The shapes of all parameters that a pass takes: `shapes`, and those of a base."""
        return self.shapes if self.frozen is None else {**self.frozen.shapes, **self.shapes}

    def joined(self, params: Mapping[str, Tensor]) -> Params:
        """The parameters that a pass takes: an adapter joined with its base; plain parameters as they are."""
        return dict(params) if self.frozen is None else {**self.frozen.params, **params}

    @property
    def plain(self) -> Model:
        """The model without adapter and codes, for the parameters of `lora.merged`; a plain one as it is."""
        if self.frozen is None and not self.forms:
            return self
        own = {name: shape for name, shape in self.all_shapes.items() if not name.endswith(FACTORS)}
        layout = self.layout and codes.layout_of_weights(self.layout, self.forms)
        spans = (
            attrs.evolve(span, names=codes.names_of_weights(x for x in span.names if not x.endswith(FACTORS)))
            for span in self.spans
        )
        return attrs.evolve(
            self,
            shapes=codes.shapes_of_weights(own, self.forms, self.layout),
            layout=layout and layout.only(lambda name: not name.endswith(FACTORS)),
            spans=tuple(spans),
            unplaced=self.unplaced and self.unplaced.plain,
            frozen=None,
            forms={},
        )

    @property
    def outputs(self) -> int:
        """The number of outputs of a value head per token; 1 without one."""
        return self.whole_shapes[SCORE_WEIGHT][0] if self.head == "value" else 1

    def layer_of(self, name: str) -> int | None:
        """The index of the layer that a parameter belongs to; None outside the layers."""
        start = f"{self.prefix}{self.layers[0].rpartition('.')[0]}."
        return int(name[len(start) :].partition(".")[0]) if name.startswith(start) else None

    def own_skeleton(self, inner: Inner = OWN, *, compiled: bool = False) -> PreTrainedModel:
        """A skeleton for this thread, since passes put tensors into it: outside the main thread a copy. With kernels
        `inner` it has seams that call them; the copy for the last kernels is cached.

        Raises ValueError for a kernel without a module to replace, for slices without an MLP that can be cut, and for
        `compiled` layers with slices, without a compiler, on a tensor or expert axis, with recurrent states, or with
        kernels in C++ or Triton.
        """
        if compiled and self.layout is not None and max(self.layout.ranks, self.layout.expert[1]) > 1:
            raise ValueError(
                "layers on a tensor axis or an expert axis cannot be compiled: they exchange tokens; leave "
                "compile_layers out"
            )
        if compiled and self.stateful:
            raise ValueError(
                f"model type {self.config.model_type!r} carries states along rows, and fppo does not compile such "
                "layers: leave compile_layers out"
            )
        if compiled and any(kernel.__module__.endswith((".cpp", ".triton")) for kernel in inner.values()):
            raise ValueError(
                "layers with kernels in C++ or Triton cannot be compiled: leave these or compile_layers out"
            )
        slices = self.mlp_slice_tokens
        if compiled and slices is not None:
            raise ValueError("compiled layers compute their MLPs whole: leave mlp_slice_tokens or compile_layers out")
        plain = inner == OWN and not compiled and slices is None
        if plain and threading.current_thread() is threading.main_thread():
            return self.skeleton
        kept: tuple[Kept, dict[bool, PreTrainedModel]] | None = getattr(self._copies, "kept", None)
        if kept is None or kept[0] != (inner, slices):
            self._copies.kept = kept = (inner, slices), {}
        if compiled not in kept[1]:
            skeleton = copy.deepcopy(self.skeleton)
            text = self.text_of(skeleton)
            mlps = () if slices is None else find_mlps(text)
            put_kernels(text, inner)
            if compiled:
                compile_layers(text)
            if slices is not None:
                put_slices(text, mlps, slices)
            kept[1][compiled] = skeleton
        return kept[1][compiled]


def is_trained(name: str) -> bool:
    """Whether a parameter of an adapted model is trained: a factor or a value head's, not the base's."""
    return name.endswith(FACTORS) or name in (SCORE_WEIGHT, SCORE_BIAS)


def plain_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of `config` without dropout. Raises ValueError for attention patterns that have no kernel."""
    config = copy.deepcopy(config)
    for part in parts_of(config):
        for name, value in vars(part).items():
            if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
                setattr(part, name, 0.0)
    text = config.get_text_config()
    carried = set(stateful_layers(text))
    kinds = {kind for i, kind in enumerate(getattr(text, "layer_types", None) or ()) if i not in carried}
    kinds -= {"full_attention", "sliding_attention", *ALONE}
    if kinds or getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        raise ValueError(
            f"model type {config.model_type!r} has layers of kind {sorted(kinds) or ['bidirectional']}; "
            "fppo runs full and sliding causal attention, and layers with states"
        )
    return config


def without_quantisation(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of `config` without the checkpoint's quantisation: a model's weights are plain."""
    config = copy.deepcopy(config)
    for part in parts_of(config):
        vars(part).pop("quantization_config", None)
    return config


def model_class(config: PreTrainedConfig) -> Any:
    """transformers' class of models with a vocabulary head: of text, or of images and text."""
    return AutoModelForImageTextToText if takes_images(config) else AutoModelForCausalLM


def causal_lm(config: PreTrainedConfig, device: str, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The plain Hugging Face model, freshly initialised on "cpu", or without storage on "meta"."""
    with BUILDING, torch.device(device):
        module = model_class(config).from_config(
            plain_config(config), dtype=torch.float32, trust_remote_code=trust_remote_code
        )
    module.tie_weights()
    return module.eval()


def build(
    config: PreTrainedConfig,
    head: HeadKind = "lm",
    *,
    outputs: int = 1,
    compute_dtype: torch.dtype | None = None,
    checkpoint_layers: Recompute = False,
    trust_remote_code: bool = False,
) -> Model:
    """The model of a Hugging Face config, with a vocabulary head ("lm") or `outputs` numbers per token ("value").

    Raises ValueError for a model that is neither a plain decoder-only causal language model nor one with a vision tower
    before it, and for a config from which transformers builds no model.
    """
    if head not in ("lm", "value"):
        raise ValueError(f"unknown head {head!r}; there are ['lm', 'value']")
    config = without_quantisation(config)
    module = _module(config, trust_remote_code)
    base = cast(PreTrainedModel, module.base_model)
    prefix = f"{module.base_model_prefix}."
    shapes = {name: x.shape for name, x in named_state(module).items()}
    if base is module or not any(name.startswith(prefix) for name in shapes):
        raise ValueError(f"model type {config.model_type!r}: {type(module).__name__} has no base model inside")
    if head == "value":
        shapes = _with_value_head(shapes, module, prefix, outputs)
    logit_form = measure_logits(module)
    constants = compute_constants(base)
    buffers = frozenset(name for name, x in named_state(module).items() if name in shapes and not x.requires_grad)
    vision = vision_of(copy.deepcopy(config), base) if takes_images(config) else None
    text = base if vision is None else cast(PreTrainedModel, base.get_submodule(vision.text))
    layers = tuple(path if vision is None else f"{vision.text}.{path}" for path in seams.find_layers(text))
    own = {name.removeprefix(prefix): shapes[name] for name in buffers if name.startswith(prefix)}
    routers = routing.put_routers(base, layers, own)
    stateful = put_mixers(base, layers)
    seams.put_seams(base, layers, handing=bool(stateful))
    base.requires_grad_(False)
    if vision is None:
        base.config._attn_implementation = seams.ATTENTION
    else:
        put_attention(base, vision, seams.ATTENTION)
    return Model(
        config=copy.deepcopy(config.get_text_config() if vision is not None else config),
        skeleton=base,
        prefix=prefix,
        layers=layers,
        head=head,
        logit_form=logit_form,
        shapes=shapes,
        constants=constants,
        stateful=stateful,
        routers=tuple(attrs.evolve(x, bias=x.bias and prefix + x.bias) for x in routers),
        buffers=buffers,
        float32_params=_float32_params(config, shapes, trust_remote_code),
        shares=_has_shared(base),
        compute_dtype=compute_dtype,
        checkpoint_layers=checkpoint_layers,
        trust_remote_code=trust_remote_code,
        vision=vision,
    )


def _with_value_head(
    shapes: Mapping[str, torch.Size], module: PreTrainedModel, prefix: str, outputs: int
) -> dict[str, torch.Size]:
    """The shapes of the base model's parameters, and of a value head in place of the vocabulary's."""
    width = cast(nn.Linear, module.get_output_embeddings()).weight.shape[1]
    own = {name: shape for name, shape in shapes.items() if name.startswith(prefix)}
    return own | {SCORE_WEIGHT: torch.Size((outputs, width)), SCORE_BIAS: torch.Size((outputs,))}


def _module(config: PreTrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    try:
        return causal_lm(config, "meta", trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError):
        raise
    except Exception as error:  # modules may raise any exception for invalid sizes and names
        text = f"transformers builds no model of its config: {words_of(error, 600)}; fix config.json, or model.config"
        raise ValueError(f"model type {config.model_type!r}: {text}") from error


def named_state(module: PreTrainedModel) -> Params:
    """The parameters and the buffers that checkpoints keep, such as biases of routers; tied ones by the first name."""
    stored = module.state_dict().keys()
    return dict(module.named_parameters()) | {name: x for name, x in module.named_buffers() if name in stored}


def _has_shared(base: PreTrainedModel) -> bool:
    """Whether some parameters or buffers of a skeleton share a tensor."""
    named = [*base.named_parameters(remove_duplicate=False), *base.named_buffers(remove_duplicate=False)]
    return len({id(x) for _, x in named}) < len(named)


def _float32_params(
    config: PreTrainedConfig, shapes: Mapping[str, torch.Size], trust_remote_code: bool
) -> dict[torch.dtype, frozenset[str]]:
    """The parameters that transformers' `from_pretrained` gives in float32 when asked for 16 bits: those that modules
    create in float32, and those that a class lists in `_keep_in_fp32_modules_strict` (for both dtypes) or
    `_keep_in_fp32_modules` (for float16). Entries are found anywhere in a name, as transformers finds them."""
    with NarrowDefault():
        module = causal_lm(config, "meta", trust_remote_code=trust_remote_code)
    created, wide = {name for name, x in named_state(module).items() if x.dtype == torch.float32}, {}
    for dtype in (torch.bfloat16, torch.float16):
        listed = [re.compile(entry.replace("*", ".*")) for entry in module._get_dtype_plan(dtype)]
        wide[dtype] = frozenset(name for name in shapes if name in created or any(x.search(name) for x in listed))
    return wide


def state_dtype(model: Model, name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a parameter or buffer when its model is in `dtype`. Buffers, and parameters that transformers keeps
    in float32 beside `dtype`, are in float32 or wider. An adapter's factors follow their weight."""
    weight = name.removesuffix(FACTORS[0]).removesuffix(FACTORS[1])
    kept = name in model.buffers or weight in model.float32_params.get(dtype, ())
    return torch.promote_types(dtype, torch.float32) if kept else dtype


def float32_names(model: Model, dtype: torch.dtype) -> frozenset[str]:
    """The parameters and buffers that stay in float32 or wider where the others are sent or stored in `dtype`."""
    return model.buffers | model.float32_params.get(dtype, frozenset())


def pass_dtype(model: Model, name: str, own: torch.dtype) -> torch.dtype:
    """The dtype in which a pass uses a parameter stored in the dtype `own`: the one that `state_dtype` gives for the
    compute dtype. Buffers, codes, a value head and a bias of the vocabulary head keep their own.

    Code that copies parameters for passes follows this rule, so that the copies equal a pass's own.
    """
    read = name.startswith(model.prefix) or (model.head == "lm" and not name.endswith("bias"))
    if model.compute_dtype is None or not own.is_floating_point:
        return own
    if not read or name in model.buffers or codes.is_coded(name):
        return own
    return state_dtype(model, name, model.compute_dtype)


def compute_constants(base: PreTrainedModel) -> dict[str, Tensor]:
    """The values of the buffers of `base` (on meta) that no checkpoint keeps, as transformers computes them.

    Raises ValueError for buffers that it does not compute, and for integer buffers that checkpoints keep.
    """
    constants: dict[str, Tensor] = {}
    state = set(base.state_dict())
    owners = {path: x for path, x in base.named_modules() if isinstance(x, PreTrainedModel)}
    for path, module in base.named_modules():
        own = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
        stored = {name for name in own if f"{path}.{name}".lstrip(".") in state}
        if whole := [f"{path}.{name}" for name in sorted(stored) if not own[name].is_floating_point()]:
            raise ValueError(
                f"model type {base.config.model_type!r} keeps integers in buffers: {whole}; fppo cannot run it"
            )
        if names := [name for name in own if name not in stored]:
            above = max((x for x in owners if not x or f"{path}.".startswith(f"{x}.")), key=len)
            constants |= {f"{path}.{name}".lstrip("."): x for name, x in _fill(owners[above], module, names).items()}
    return constants


@torch.no_grad()
def _fill(base: PreTrainedModel, module: nn.Module, names: list[str]) -> dict[str, Tensor]:
    empty = {name: module._buffers[name] for name in names}
    for name, buffer in empty.items():
        assert buffer is not None
        value = torch.full(
            buffer.shape, math.nan if buffer.is_floating_point() else 0, dtype=buffer.dtype, device="cpu"
        )
        module._buffers[name] = value
    base._init_weights(module)
    if any(x is None or x.isnan().any() for x in (module._buffers[name] for name in names)):
        base._init_weights(base)  # as the whole model computes them for its layers
    filled = {name: module._buffers[name] for name in names}
    module._buffers.update(empty)
    unknown = [name for name, x in filled.items() if x is None or x.isnan().any()]
    if unknown:
        raise ValueError(f"{type(module).__name__} does not say how to compute its buffers {unknown}")
    return {name: x for name, x in filled.items() if x is not None}


def attention_needs(model: Model) -> frozenset[str]:
    """The features of attention that the model's layers need beyond plain causal: "window", "softcap", "sinks"."""
    config = model.config
    kinds = getattr(config, "layer_types", None)
    slides = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    needs = {
        "window": slides and (kinds is None or any(slides_along(kind) for kind in kinds)),
        "softcap": getattr(config, "attn_logit_softcapping", None),
        "sinks": any(name.endswith(".sinks") for name in model.all_shapes),
    }
    return frozenset(name for name, needed in needs.items() if needed)
