"""Operations and their implementations by name, and `Kernels`, one of each, chosen once and passed down.

An operation takes a line of `BUILTIN` for each implementation, and a field of `Kernels`. No torch is imported here.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import shutil
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, overload

import attrs

from fppo_kernels import prebuilt

if TYPE_CHECKING:
    from torch import Tensor

    from fppo_kernels.log_probs.reference import LogProbs
    from fppo_kernels.padding import Packed


def _never() -> str | None:
    return None


def _has_cuda() -> bool:
    import torch  # imported in functions, here and below, since settings read the names

    return torch.cuda.is_available()


def _needs_cuda() -> str | None:
    return None if _has_cuda() else "needs CUDA"


def _needs_onednn() -> str | None:
    import torch

    return None if torch.backends.mkldnn.is_available() else "this torch was built without oneDNN"


def _needs_bfloat16() -> str | None:
    if _has_cuda():
        return 'is for CPUs; on a GPU model.compute_dtype = "bfloat16" has such products'
    from fppo_kernels.linear.bfloat16 import multiplies

    return None if multiplies() else "needs a processor that multiplies bfloat16 (AVX512-BF16 or AMX)"


def _needs_float8() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return None
    able = torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 9)
    return None if able else "needs a GPU that multiplies 8-bit numbers: of NVIDIA, compute capability 8.9 or later"


def _lacks(module: str, extra: str) -> str | None:
    """Instructions to install a module that an extra of fppo provides; None if it is installed."""
    there = importlib.util.find_spec(module) is not None
    return None if there else f"{module.replace('_', '-')} is not installed: pip install 'fppo[{extra}]'"


def _needs_flash() -> str | None:
    return _lacks("flash_attn", "flash-attn") or _needs_cuda()


def _needs_flex() -> str | None:
    return None if _has_cuda() else "needs CUDA: FlexAttention has no backward pass on CPUs"


def needs_compiler() -> str | None:
    """The reason why torch.compile cannot run here (it needs a C++ compiler for the CPU, Triton for a GPU), or None."""
    return _lacks("triton", "triton") if _has_cuda() else lacks_cpp_compiler()


def lacks_cpp_compiler() -> str | None:
    """The reason why C++ cannot be compiled here, or None."""
    return None if shutil.which("g++") or shutil.which("clang++") else "no C++ compiler (g++ or clang++) is installed"


def needs_cpp() -> str | None:
    """The reason why kernels in C++ are neither built in nor can be compiled here, or None."""
    return None if isinstance(prebuilt.here(), prebuilt.Build) else lacks_cpp_compiler()


def _needs_cpp() -> str | None:
    return "runs on CPUs, and this machine has a GPU" if _has_cuda() else needs_cpp()


def _needs_liger() -> str | None:
    return _lacks("liger_kernel", "liger")


def _needs_liger_cuda() -> str | None:
    return _needs_liger() or _needs_cuda()  # its other kernels are Triton's


def _needs_triton() -> str | None:
    if lacking := _lacks("triton", "triton"):
        return lacking
    if _has_cuda():
        return None
    from triton import knobs  # pyright: ignore[reportMissingTypeStubs]  # reads TRITON_INTERPRET

    return None if knobs.runtime.interpret else "needs CUDA, or TRITON_INTERPRET=1"


@attrs.frozen
class Implementation:
    """One implementation of an operation.

    `fn` is the function, or "module:function", which is imported when the kernel is chosen. `refuse()` returns the
    reason why it cannot run on this machine, or None. `lacks` names keywords of the operation and dtypes that it does
    not support. An `opaque` implementation supports no transform of torch.func; others support those of the operation's
    record. `reference` is its own float64 definition, if it does not compute the operation itself: a function or
    "module:function". `tolerance` names the dtype to which it rounds results whatever its inputs; laws then have the
    tolerance of that dtype.
    """

    fn: Callable[..., Any] | str
    refuse: Callable[[], str | None] = _never
    lacks: frozenset[str] = frozenset()
    reference: Callable[..., Any] | str | None = None
    opaque: bool = False
    tolerance: str | None = None

    def load(self) -> Callable[..., Any]:
        """Import the function."""
        return found(self.fn)

    def is_of(self, fn: Callable[..., Any]) -> bool:
        """Whether `fn` is this implementation's function, which is not imported for the comparison."""
        return fn is self.fn or f"{getattr(fn, '__module__', '')}:{getattr(fn, '__name__', '')}" == self.fn

    def definition(self) -> Callable[..., Any] | None:
        """Import the implementation's own reference; None if the operation's applies."""
        return None if self.reference is None else found(self.reference)


def found(fn: Any) -> Any:
    """Import the object that "module:name" names; return anything else as it is."""
    if not isinstance(fn, str):
        return fn
    module, _, name = fn.partition(":")
    return getattr(importlib.import_module(module), name)


Table = Mapping[str, Mapping[str, Implementation]]
NO_DOUBLE = frozenset({"float64"})
NO_HALF = frozenset({"float16"})

BUILTIN: Table = MappingProxyType(
    {
        "unpad": {"torch": Implementation("fppo_kernels.padding:unpad")},
        "pad": {"torch": Implementation("fppo_kernels.padding:pad")},
        "attention": {
            "sdpa": Implementation("fppo_kernels.attention.sdpa:sdpa"),
            "eager": Implementation("fppo_kernels.attention.eager:eager"),
            "cpp": Implementation("fppo_kernels.attention.cpp:cpp", _needs_cpp, lacks=NO_HALF),
            "fixed": Implementation("fppo_kernels.attention.fixed:fixed", _needs_triton, lacks=NO_HALF),
            "flash": Implementation(
                "fppo_kernels.attention.flash:flash",
                _needs_flash,
                lacks=frozenset({"sinks", "float32", "float64"}),
                opaque=True,
            ),
            "varlen": Implementation(
                "fppo_kernels.attention.varlen:varlen",
                _needs_cuda,
                lacks=frozenset({"softcap", "sinks", "float32", "float64"}),
                opaque=True,
            ),
            "flex": Implementation(
                "fppo_kernels.attention.flex:flex", _needs_flex, lacks=frozenset({"float64"}), opaque=True
            ),
        },
        "decode_attention": {
            "sdpa": Implementation("fppo_kernels.decode_attention.sdpa:sdpa"),
            "eager": Implementation("fppo_kernels.decode_attention.eager:eager"),
            "cpp": Implementation("fppo_kernels.decode_attention.cpp:cpp", _needs_cpp, lacks=NO_HALF),
            "fixed": Implementation("fppo_kernels.decode_attention.fixed:fixed", _needs_triton, lacks=NO_HALF),
        },
        "log_probs": {
            "reference": Implementation("fppo_kernels.log_probs.reference:reference"),
            "chunked": Implementation("fppo_kernels.log_probs.chunked:chunked"),
            "cpp": Implementation("fppo_kernels.log_probs.cpp:cpp", _needs_cpp, lacks=NO_HALF),
            "compiled": Implementation(
                "fppo_kernels.log_probs.compiled:compiled", needs_compiler, lacks=frozenset({"axis"}), opaque=True
            ),
            "liger": Implementation(
                "fppo_kernels.log_probs.liger:liger",
                _needs_liger,
                lacks=frozenset({"bias", "softcap", "sum_squared", "axis"}),
                opaque=True,
            ),
            "triton": Implementation("fppo_kernels.log_probs.triton:triton", _needs_triton, lacks=NO_HALF),
            "fixed": Implementation("fppo_kernels.log_probs.fixed:fixed", _needs_triton, lacks=NO_HALF | NO_DOUBLE),
        },
        "linear": {
            "torch": Implementation("fppo_kernels.linear.plain:plain"),
            "onednn": Implementation("fppo_kernels.linear.onednn:onednn", _needs_onednn),
            "cpp": Implementation("fppo_kernels.linear.cpp:cpp", lambda: _needs_onednn() or _needs_cpp()),
            "fixed": Implementation("fppo_kernels.linear.fixed:fixed", _needs_triton, lacks=NO_HALF),
            "bfloat16": Implementation(
                "fppo_kernels.linear.bfloat16:bfloat16",
                _needs_bfloat16,
                lacks=NO_DOUBLE | NO_HALF,
                opaque=True,
                tolerance="bfloat16",
            ),
            "float8": Implementation(
                "fppo_kernels.linear.float8:float8",
                _needs_float8,
                lacks=NO_DOUBLE,
                reference="fppo_kernels.linear.float8_reference:reference",
                opaque=True,
            ),
        },
        "rms_norm": {
            "eager": Implementation("fppo_kernels.rms_norm.eager:eager"),
            "torch": Implementation("fppo_kernels.rms_norm.functional:functional"),
            "cpp": Implementation("fppo_kernels.rms_norm.cpp:cpp", _needs_cpp, lacks=NO_HALF),
            "liger": Implementation(
                "fppo_kernels.rms_norm.liger:liger", _needs_liger_cuda, lacks=NO_DOUBLE, opaque=True
            ),
            "triton": Implementation("fppo_kernels.rms_norm.triton:triton", _needs_triton, lacks=NO_DOUBLE),
        },
        "add_rms_norm": {
            "eager": Implementation("fppo_kernels.rms_norm.eager:add_eager"),
            "cpp": Implementation("fppo_kernels.rms_norm.cpp:add_cpp", _needs_cpp, lacks=NO_HALF),
            "liger": Implementation(
                "fppo_kernels.rms_norm.liger:add_liger", _needs_liger_cuda, lacks=NO_DOUBLE, opaque=True
            ),
            "triton": Implementation("fppo_kernels.rms_norm.triton:add_triton", _needs_triton, lacks=NO_DOUBLE),
        },
        "layer_norm": {
            "eager": Implementation("fppo_kernels.layer_norm:eager"),
            "torch": Implementation("fppo_kernels.layer_norm:functional"),
            "liger": Implementation("fppo_kernels.layer_norm:liger", _needs_liger_cuda, lacks=NO_DOUBLE, opaque=True),
        },
        "rotary": {
            "eager": Implementation("fppo_kernels.rotary.eager:eager"),
            "cpp": Implementation("fppo_kernels.rotary.cpp:cpp", _needs_cpp, lacks=NO_HALF),
            "liger": Implementation("fppo_kernels.rotary.liger:liger", _needs_liger_cuda, lacks=NO_DOUBLE, opaque=True),
            "triton": Implementation("fppo_kernels.rotary.triton:triton", _needs_triton, lacks=NO_DOUBLE),
        },
        "glu": {
            "eager": Implementation("fppo_kernels.glu.eager:eager"),
            "cpp": Implementation("fppo_kernels.glu.cpp:cpp", _needs_cpp, lacks=NO_HALF),
            "liger": Implementation(
                "fppo_kernels.glu.liger:liger", _needs_liger_cuda, lacks=NO_DOUBLE | {"gelu"}, opaque=True
            ),
            "triton": Implementation("fppo_kernels.glu.triton:triton", _needs_triton, lacks=NO_DOUBLE),
        },
        "all_to_all": {"torch": Implementation("fppo_kernels.collectives:all_to_all")},
        "adamw": {
            "torch": Implementation("fppo_kernels.adamw:adamw_"),
            "reference": Implementation("fppo_kernels.adamw:reference_"),
        },
        "gae": {
            "scan": Implementation("fppo_kernels.gae.scan:scan"),
            "loop": Implementation("fppo_kernels.gae.loop:loop"),
            "cpp": Implementation("fppo_kernels.gae.cpp:cpp", _needs_cpp),
        },
    }
)


def takes_key_lengths(attention: Callable[..., Any]) -> bool:
    """Whether an attention kernel has the keyword `key_lengths`, which a context axis and shared prompts need."""
    return "key_lengths" in inspect.signature(attention).parameters


def takes_spans(decode_attention: Callable[..., Any]) -> bool:
    """Whether a kernel for attention in decoding has the keyword `spans`, by which queries share rows."""
    return "spans" in inspect.signature(decode_attention).parameters


def check_key_lengths(attention: Callable[..., Any], need: str) -> None:
    """Raise ValueError for an attention kernel without the keyword `key_lengths`; `need` says what it is needed for."""
    if not takes_key_lengths(attention):
        name = getattr(attention, "__name__", type(attention).__name__)
        raise ValueError(f"the attention kernel {name} has no keyword key_lengths, which {need}")


def own(op: str, fn: Callable[..., Any]) -> Implementation:
    """Wrap a user's function as an implementation of `op`. It lacks the keywords, features and dtypes in its attribute
    `lacks`, if it has one, and for attention `key_lengths` if it has no such keyword. Raises ValueError for an
    attribute that is no collection of names."""
    lacks: Any = getattr(fn, "lacks", ())
    if type(lacks) not in (tuple, list, set, frozenset) or not all(isinstance(x, str) for x in lacks):
        raise ValueError(f"{getattr(fn, '__name__', fn)}.lacks must be names, as ('sinks', 'float16'), got {lacks!r}")
    whole = op != "attention" or takes_key_lengths(fn)
    return Implementation(fn, lacks=frozenset[str]({*lacks} if whole else {*lacks, "key_lengths"}))


def register(op: str, name: str, implementation: Implementation, *, table: Table = BUILTIN) -> Table:
    """Return a copy of `table` with one more implementation. Raises ValueError if the name is taken."""
    if name in table.get(op, {}):
        raise ValueError(f"kernel {op}/{name} is in the table already: {table[op][name].fn}")
    return {**table, op: {**table.get(op, {}), name: implementation}}


@overload
def available(op: str, *, table: Table = BUILTIN) -> dict[str, str | None]: ...
@overload
def available(op: None = None, *, table: Table = BUILTIN) -> dict[str, dict[str, str | None]]: ...
def available(op: str | None = None, *, table: Table = BUILTIN) -> Any:
    """The implementations of `op` by name, each with None, or the reason why it cannot run here. Without `op` the same
    mapping for every operation, by the operation's name."""
    if op is None:
        return {each: available(each, table=table) for each in table}
    return {name: implementation.refuse() for name, implementation in _implementations(op, table).items()}


def _implementations(op: str, table: Table) -> Mapping[str, Implementation]:
    if op not in table:
        raise ValueError(f"no operation {op!r}; there are {sorted(table)}")
    return table[op]


def get(op: str, name: str, *, needs: Collection[str] = (), table: Table = BUILTIN) -> Callable[..., Any]:
    """Look up the implementation `name` of `op`.

    Raises ValueError if it does not exist, cannot run here, or lacks a keyword or dtype in `needs`.
    """
    implementations = _implementations(op, table)
    if name not in implementations:
        raise ValueError(f"no kernel {op}/{name}; there are {sorted(implementations)}")
    chosen = implementations[name]
    reason, missing = chosen.refuse(), sorted(chosen.lacks & {*needs})
    if reason is None and not missing:
        return chosen.load()
    able = sorted(each for each, x in implementations.items() if x.refuse() is None and not x.lacks & {*needs})
    if reason is not None:
        raise ValueError(f"kernel {op}/{name} cannot run here: {reason}; there are {able}")
    raise ValueError(f"kernel {op}/{name} has no {' and no '.join(missing)}, which is needed; there are {able}")


def chosen(operation: str, default: str, *, inside: bool = False) -> Any:
    """Declare a field of `Kernels` by the operation's record, as "module:name", and the name of its default
    implementation. `inside`: the operation is within layers, and its default is the model's own code."""
    return attrs.field(metadata={"operation": f"fppo_kernels.{operation}", "default": default, "inside": inside})


@attrs.frozen(kw_only=True)
class Kernels:
    """The functions for tensor work that steps call, one for each operation. `attrs.evolve` replaces one."""

    log_probs: Callable[..., LogProbs] = chosen("log_probs:OPERATION", "chunked")
    attention: Callable[..., Tensor] = chosen("attention:OPERATION", "sdpa")
    decode_attention: Callable[..., Tensor] = chosen("decode_attention:OPERATION", "sdpa")
    linear: Callable[..., Tensor] = chosen("linear:OPERATION", "torch", inside=True)
    rms_norm: Callable[..., Tensor] = chosen("rms_norm:OPERATION", "eager", inside=True)
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]] = chosen("rms_norm:ADD_OPERATION", "eager", inside=True)
    layer_norm: Callable[..., Tensor] = chosen("layer_norm:OPERATION", "eager", inside=True)
    rotary: Callable[..., tuple[Tensor, Tensor]] = chosen("rotary:OPERATION", "eager", inside=True)
    glu: Callable[..., Tensor] = chosen("glu:OPERATION", "eager", inside=True)
    gae: Callable[..., tuple[Tensor, Tensor]] = chosen("gae:OPERATION", "scan")
    adamw: Callable[..., None] = chosen("adamw:OPERATION", "torch")
    unpad: Callable[..., Packed] = chosen("padding:UNPAD", "torch")
    pad: Callable[..., Tensor] = chosen("padding:PAD", "torch")
    all_to_all: Callable[..., Tensor] = chosen("collectives:OPERATION", "torch")

    @classmethod
    def named(cls, *, table: Table = BUILTIN, **names: str) -> Kernels:
        """Look up kernels by operation and name. Raises ValueError for an unknown kernel, and one that cannot run
        here."""
        return cls(**{op: get(op, name, table=table) for op, name in {**DEFAULTS, **names}.items()})


DEFAULTS: Mapping[str, str] = MappingProxyType(
    {field.name: field.metadata["default"] for field in attrs.fields(Kernels)}
)
# by device, kernels with which the bits of a row do not depend on other rows, and decode attention has the bits of
# packed attention; the own code of a model that does not call one of them must have this property
EXACT: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "cpu": MappingProxyType(
            {
                "attention": "cpp",
                "decode_attention": "cpp",
                "log_probs": "cpp",
                "linear": "onednn",
                "rms_norm": "cpp",
                "add_rms_norm": "cpp",
                "rotary": "cpp",
                "glu": "cpp",
            }
        ),
        "cuda": MappingProxyType(
            {
                "attention": "fixed",
                "decode_attention": "fixed",
                "log_probs": "fixed",
                "linear": "fixed",
                "rms_norm": "triton",
                "add_rms_norm": "triton",
                "rotary": "triton",
                "glu": "triton",
            }
        ),
    }
)


def exact_here() -> Mapping[str, str]:
    """The exact kernels by operation for this machine: those of `EXACT` for a GPU if it has one."""
    return EXACT["cuda" if _has_cuda() else "cpu"]


INSIDE = tuple(field.name for field in attrs.fields(Kernels) if field.metadata["inside"])  # inside layers
