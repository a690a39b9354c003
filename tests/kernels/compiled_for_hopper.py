"""Compiles the bfloat16 programs for an H200, which takes no GPU: prints the matrix instructions and what is used.

And those of norms, gated activations and rotary positions, and of the kernels named "fixed"."""

import re
from collections.abc import Sequence
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fppo_kernels._fixed import wide_of
from fppo_kernels.attention import _triton_kernels as attention
from fppo_kernels.attention.fixed import HeadRule
from fppo_kernels.glu import _triton_kernels as glus
from fppo_kernels.glu.eager import ACTIVATIONS
from fppo_kernels.linear._triton_kernels import product
from fppo_kernels.linear.fixed import tiles_of
from fppo_kernels.log_probs._triton_kernels import log_probs_backward, log_probs_forward, merge_in_order
from fppo_kernels.rms_norm import _triton_kernels as norms
from fppo_kernels.rotary._triton_kernels import rotary_turn

FLOAT_NUMBERS = ("inner", "cap", "scale")
FLOAT_TENSORS = ("temperature", "own", "moments", "rows_of")
SIZES = ("rows", "width", "count", "heads", "half")
KINDS = [{"KIND": name} for name in ACTIVATIONS]
NORMS = [{"WEIGHT": True, "ADD": False}, {"WEIGHT": False, "ADD": True}]
TILE = {"BM": 128, "BN": 256, "BK": 64, "GROUP": 16, "TMA": True, "WIDEN": False}


def kind(name: str, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if name in ("hidden", "weight"):
        return f"tensordesc<bf16[{TILE['BM' if name == 'hidden' else 'BN']},{TILE['BK']}]>"
    if name in FLOAT_NUMBERS:
        return "fp32"
    return {"bias": "*bf16", "slab": "*bf16", "labels": "*i64"}.get(name, "*fp32" if name in FLOAT_TENSORS else "i32")


def compile_for_hopper(kernel: Any, *, full: bool) -> Any:
    constants = {**TILE, **dict.fromkeys(("BIAS", "SOFTCAP", "ENTROPY", "SQUARED"), full)}
    if not full:
        constants["bias"] = None
    signature = {name: kind(name, constants) for name in kernel.arg_names}
    aligned = {"width", "stride"} | {name for name, type_ in signature.items() if type_.startswith("*")}
    marks = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=marks)
    options = {"num_warps": 8, "num_stages": 4}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def compile_inner(kernel: Any, constants: dict[str, Any]) -> Any:
    """A program of norms or gated activations; rows and widths of any size."""
    kinds = {"scales": "*fp32", "d_weight": "*fp32", "eps": "fp32", "offset": "fp32", "sign": "fp32"}
    kinds |= dict.fromkeys(SIZES, "i32")
    signature = {n: "constexpr" if n in constants else kinds.get(n, "*bf16") for n in kernel.arg_names}
    aligned = {"width", "half"} | {name for name, type_ in signature.items() if type_.startswith("*")}
    marks = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=marks)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32))


def compile_fixed(kernel: Any, dtype: torch.dtype, settings: dict[str, Any], aligned: tuple[str, ...] = ()) -> Any:
    """A program of a kernel named "fixed", with a bias or sinks; `aligned` integers are multiples of 16."""
    short = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
    wide = short[wide_of(dtype)[0]]
    kinds = {"places": "*i64", "seen": "*u8", "log_sums": f"*{wide}", "dots": f"*{wide}"}
    kinds |= dict.fromkeys(("moments", "merged"), "*fp32")
    options = {name: settings.pop(name) for name in ("num_warps", "num_stages") if name in settings}
    constants = {name: x for name, x in settings.items() if name in kernel.arg_names}
    tensors = ("x", "weight", "bias", "out", "query", "key", "value", "sinks", "grad", "d_query", "d_key", "d_value")
    kinds |= dict.fromkeys(tensors, f"*{short[dtype]}")
    signature = {n: "constexpr" if n in constants else kinds.get(n, "i32") for n in kernel.arg_names}
    marked = {*aligned, *(name for name, type_ in signature.items() if type_.startswith("*"))}
    marks = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in marked}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=marks)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


STAGES = {"attention_forward": 2, "attention_backward_queries": 1, "attention_backward_keys": 1}
FIXED = (  # dtypes, widths of heads, and programs
    (torch.bfloat16, 128, tuple(STAGES)),
    (torch.bfloat16, 256, ("attention_backward_keys",)),
    (torch.float32, 128, ("attention_forward", "attention_backward_keys")),
)


def fixed_programs(choices: Sequence[tuple[torch.dtype, int, Sequence[str]]] = FIXED) -> None:
    """Compile products and attention: they load 16 bytes at once, and fit the shared memory of any GPU."""
    for dtype, width, names in choices:
        tiles, rows = tiles_of(dtype), torch.empty(0, 1, width, dtype=dtype)
        settings = {"BM": tiles.rows, "BN": tiles.outs, "BK": tiles.inner, "GROUP": 8, "WIDEN": False}
        settings |= {"WIDE": wide_of(dtype)[1], "BIAS": True, "across": 1, "num_warps": 4, "num_stages": tiles.stages}
        made = {"product": compile_fixed(product, dtype, settings, ("width", "along"))} if width <= 128 else {}
        for name in names:
            rule = HeadRule(0.1, 2.0).settings(rows, width, stages=STAGES[name])
            made[f"{name} {width}"] = compile_fixed(getattr(attention, name), dtype, {**rule, "SINKS": True})
        for name, compiled in made.items():
            ptx, shared = compiled.asm["ptx"], compiled.metadata.shared
            assert shared <= 99 << 10, f"{name} of {dtype} takes {shared} bytes of shared memory"
            assert re.search(r"cp\.async\.cg[^;]*0x10|ld\.global[\w.]*(v4\.b32|v2\.b64)", ptx), f"{name} of {dtype}"
            assert "tf32" not in ptx, f"{name} of {dtype}"
            assert "mma" in ptx or dtype != torch.bfloat16, name
            print(f"fixed {name} in {dtype}, {shared} bytes of shared memory: translated")
    merge = {"ENTROPY": True, "SQUARED": True, "BM": 64}
    assert "cubin" in compile_fixed(merge_in_order, torch.float32, merge).asm


if __name__ == "__main__":
    fixed_programs()
    programs = [(kernel, choice) for kernel in (norms.rms_norm_forward, norms.rms_norm_backward) for choice in NORMS]
    programs += [(kernel, choice) for kernel in (glus.glu_forward, glus.glu_backward) for choice in KINDS]
    for kernel, choice in [*programs, (rotary_turn, {"HEADS": 16})]:
        block = {"BLOCK": 64 if kernel is rotary_turn else 1024}
        constants = block | {n: x for n, x in choice.items() if n in kernel.arg_names}
        made = compile_inner(kernel, constants).asm
        assert "cubin" in made
        assert re.search(r"ld\.global[\w.]*\.v4\.b32", made["ptx"]), "numbers are loaded one by one"
        print(f"{kernel.__name__}, {constants}: compiled")
    for kernel in (log_probs_forward, log_probs_backward):
        for full in (False, True):
            compiled = compile_for_hopper(kernel, full=full)
            ptx = compiled.asm["ptx"]
            assert "cubin" in compiled.asm
            assert compiled.metadata.shared <= 227 << 10, compiled.metadata.shared
            assert "cp.async.bulk.tensor" in ptx
            assert "wgmma.mma_async" in ptx
            print(f"{kernel.__name__}, full={full}: wgmma, {compiled.metadata.shared} bytes of shared memory")
