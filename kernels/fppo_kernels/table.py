"""Operations and their implementations, by name."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, overload

import attrs
import torch

from fppo_kernels import adamw, collectives, padding
from fppo_kernels._cpp import needs_cpp
from fppo_kernels.attention import eager, sdpa
from fppo_kernels.context import takes_key_lengths
from fppo_kernels.decode_attention import eager as decode_eager
from fppo_kernels.decode_attention import sdpa as decode_sdpa
from fppo_kernels.gae import loop, scan
from fppo_kernels.glu import eager as glu
from fppo_kernels.linear import plain
from fppo_kernels.log_probs import chunked, reference
from fppo_kernels.rms_norm import eager as rms_norm
from fppo_kernels.rotary import eager as rotary


def _never() -> str | None:
    return None


def _needs_cuda() -> str | None:
    return None if torch.cuda.is_available() else "needs CUDA"


def _needs_onednn() -> str | None:
    return None if torch.backends.mkldnn.is_available() else "this torch was built without oneDNN"


def _needs_float8() -> str | None:
    if not torch.cuda.is_available():
        return None
    able = torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 9)
    return None if able else "needs a GPU that multiplies 8-bit numbers: of NVIDIA, compute capability 8.9 or later"


def _lacks(module: str, extra: str) -> str | None:
    """How to come by a module that an extra of fppo brings; None if it is there."""
    there = importlib.util.find_spec(module) is not None
    return None if there else f"{module.replace('_', '-')} is not installed: pip install 'fppo[{extra}]'"


def _needs_flash() -> str | None:
    return _lacks("flash_attn", "flash-attn") or _needs_cuda()


def _needs_flex() -> str | None:
    return None if torch.cuda.is_available() else "needs CUDA: FlexAttention has no backward pass on CPUs"


def needs_compiler() -> str | None:
    """Why torch.compile cannot run here: it wants a C++ compiler for the CPU, and Triton for a GPU; or None."""
    if torch.cuda.is_available():
        return _lacks("triton", "triton")
    return needs_cpp()


def _needs_cpp() -> str | None:
    return "runs on CPUs, and this machine has a GPU" if torch.cuda.is_available() else needs_cpp()


def _needs_liger() -> str | None:
    return _lacks("liger_kernel", "liger")


def _needs_liger_cuda() -> str | None:
    return _needs_liger() or _needs_cuda()  # its other kernels are Triton's


def _needs_triton() -> str | None:
    if lacking := _lacks("triton", "triton"):
        return lacking
    if torch.cuda.is_available():
        return None
    from triton import knobs  # pyright: ignore[reportMissingTypeStubs]  # reads TRITON_INTERPRET

    return None if knobs.runtime.interpret else "needs CUDA, or TRITON_INTERPRET=1"


@attrs.frozen
class Implementation:
    """One way to compute an operation.

    `fn` is the function, or "module:function", which is imported when the kernel is chosen. `refuse()` says why it
    cannot run on this machine, or None. `lacks` names the keywords of the operation that it cannot honour, and the
    dtypes that it does not compute in. `reference` is what it computes, in float64, where that is not the operation
    itself: a function or "module:function".
    """

    fn: Callable[..., Any] | str
    refuse: Callable[[], str | None] = _never
    lacks: frozenset[str] = frozenset()
    reference: Callable[..., Any] | str | None = None

    def load(self) -> Callable[..., Any]:
        """The function itself."""
        return _found(self.fn)

    def definition(self) -> Callable[..., Any] | None:
        """The reference itself; None where it is that of the operation."""
        return None if self.reference is None else _found(self.reference)


def _found(fn: Callable[..., Any] | str) -> Callable[..., Any]:
    if not isinstance(fn, str):
        return fn
    module, _, name = fn.partition(":")
    return getattr(importlib.import_module(module), name)


Table = Mapping[str, Mapping[str, Implementation]]
NO_DOUBLE = frozenset({"float64"})
NO_HALF = frozenset({"float16"})

BUILTIN: Table = MappingProxyType(
    {
        "unpad": {"torch": Implementation(padding.unpad)},
        "pad": {"torch": Implementation(padding.pad)},
        "attention": {
            "sdpa": Implementation(sdpa.sdpa),
            "eager": Implementation(eager.eager),
            "cpp": Implementation("fppo_kernels.attention.cpp:cpp", _needs_cpp, lacks=NO_HALF),
            "flash": Implementation(
                "fppo_kernels.attention.flash:flash", _needs_flash, lacks=frozenset({"sinks", "float32", "float64"})
            ),
            "varlen": Implementation(
                "fppo_kernels.attention.varlen:varlen",
                _needs_cuda,
                lacks=frozenset({"softcap", "sinks", "float32", "float64"}),
            ),
            "flex": Implementation("fppo_kernels.attention.flex:flex", _needs_flex, lacks=frozenset({"float64"})),
        },
        "decode_attention": {
            "sdpa": Implementation(decode_sdpa.sdpa),
            "eager": Implementation(decode_eager.eager),
            "cpp": Implementation("fppo_kernels.decode_attention.cpp:cpp", _needs_cpp, lacks=NO_HALF),
        },
        "log_probs": {
            "reference": Implementation(reference.reference),
            "chunked": Implementation(chunked.chunked),
            "cpp": Implementation("fppo_kernels.log_probs.cpp:cpp", _needs_cpp, lacks=NO_HALF),
            "compiled": Implementation(
                "fppo_kernels.log_probs.compiled:compiled", needs_compiler, lacks=frozenset({"axis"})
            ),
            "liger": Implementation(
                "fppo_kernels.log_probs.liger:liger",
                _needs_liger,
                lacks=frozenset({"bias", "softcap", "sum_squared", "axis"}),
            ),
            "triton": Implementation("fppo_kernels.log_probs.triton:triton", _needs_triton, lacks=NO_HALF),
        },
        "linear": {
            "torch": Implementation(plain.plain),
            "onednn": Implementation("fppo_kernels.linear.onednn:onednn", _needs_onednn),
            "float8": Implementation(
                "fppo_kernels.linear.float8:float8",
                _needs_float8,
                lacks=NO_DOUBLE,
                reference="fppo_kernels.linear.float8_reference:reference",
            ),
        },
        "rms_norm": {
            "eager": Implementation(rms_norm.eager),
            "torch": Implementation("fppo_kernels.rms_norm.functional:functional"),
            "cpp": Implementation("fppo_kernels.rms_norm.cpp:cpp", _needs_cpp, lacks=NO_HALF),
            "liger": Implementation("fppo_kernels.rms_norm.liger:liger", _needs_liger_cuda, lacks=NO_DOUBLE),
            "triton": Implementation("fppo_kernels.rms_norm.triton:triton", _needs_triton, lacks=NO_DOUBLE),
        },
        "add_rms_norm": {
            "eager": Implementation(rms_norm.add_eager),
            "cpp": Implementation("fppo_kernels.rms_norm.cpp:add_cpp", _needs_cpp, lacks=NO_HALF),
            "liger": Implementation("fppo_kernels.rms_norm.liger:add_liger", _needs_liger_cuda, lacks=NO_DOUBLE),
            "triton": Implementation("fppo_kernels.rms_norm.triton:add_triton", _needs_triton, lacks=NO_DOUBLE),
        },
        "rotary": {
            "eager": Implementation(rotary.eager),
            "cpp": Implementation("fppo_kernels.rotary.cpp:cpp", _needs_cpp, lacks=NO_HALF),
            "liger": Implementation("fppo_kernels.rotary.liger:liger", _needs_liger_cuda, lacks=NO_DOUBLE),
            "triton": Implementation("fppo_kernels.rotary.triton:triton", _needs_triton, lacks=NO_DOUBLE),
        },
        "glu": {
            "eager": Implementation(glu.eager),
            "cpp": Implementation("fppo_kernels.glu.cpp:cpp", _needs_cpp, lacks=NO_HALF),
            "liger": Implementation("fppo_kernels.glu.liger:liger", _needs_liger_cuda, lacks=NO_DOUBLE | {"gelu"}),
            "triton": Implementation("fppo_kernels.glu.triton:triton", _needs_triton, lacks=NO_DOUBLE),
        },
        "all_to_all": {"torch": Implementation(collectives.all_to_all)},
        "adamw": {"torch": Implementation(adamw.adamw_), "reference": Implementation(adamw.reference_)},
        "gae": {
            "scan": Implementation(scan.scan),
            "loop": Implementation(loop.loop),
            "cpp": Implementation("fppo_kernels.gae.cpp:cpp", _needs_cpp),
        },
    }
)


def own(op: str, fn: Callable[..., Any]) -> Implementation:
    """A user's function as an implementation of `op`: of attention, it lacks what its arguments do not name."""
    whole = op != "attention" or takes_key_lengths(fn)
    return Implementation(fn, lacks=frozenset() if whole else frozenset({"key_lengths"}))


def register(op: str, name: str, implementation: Implementation, *, table: Table = BUILTIN) -> Table:
    """A table with one more implementation; `table` itself stays as it is. Raises ValueError if the name is taken."""
    if name in table.get(op, {}):
        raise ValueError(f"kernel {op}/{name} is in the table already: {table[op][name].fn}")
    return {**table, op: {**table.get(op, {}), name: implementation}}


@overload
def available(op: str, *, table: Table = BUILTIN) -> dict[str, str | None]: ...
@overload
def available(op: None = None, *, table: Table = BUILTIN) -> dict[str, dict[str, str | None]]: ...
def available(op: str | None = None, *, table: Table = BUILTIN) -> Any:
    """The implementations of `op` by name, with the reason why it cannot run here or None; without `op`, of all."""
    if op is None:
        return {each: available(each, table=table) for each in table}
    return {name: implementation.refuse() for name, implementation in _implementations(op, table).items()}


def _implementations(op: str, table: Table) -> Mapping[str, Implementation]:
    if op not in table:
        raise ValueError(f"no operation {op!r}; there are {sorted(table)}")
    return table[op]


def get(op: str, name: str, *, needs: Collection[str] = (), table: Table = BUILTIN) -> Callable[..., Any]:
    """The implementation `name` of `op`.

    Raises ValueError if there is none, if it cannot run here, or if it lacks a keyword or dtype that `needs` names.
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
