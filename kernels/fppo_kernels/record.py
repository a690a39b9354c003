"""Kernels: one function per operation, chosen once and handed down as an argument."""

from __future__ import annotations

from collections.abc import Callable

import attrs
from torch import Tensor

from fppo_kernels import table as tables
from fppo_kernels.log_probs.reference import LogProbs
from fppo_kernels.padding import Packed


@attrs.frozen
class Kernels:
    """The functions that the steps call for the work on tensors. `attrs.evolve` swaps one for another."""

    unpad: Callable[..., Packed]
    pad: Callable[..., Tensor]
    attention: Callable[..., Tensor]
    decode_attention: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    rotary: Callable[..., tuple[Tensor, Tensor]]
    glu: Callable[..., Tensor]
    log_probs: Callable[..., LogProbs]
    all_to_all: Callable[..., Tensor]
    adamw: Callable[..., None]
    gae: Callable[..., tuple[Tensor, Tensor]]

    @classmethod
    def named(
        cls,
        *,
        attention: str = "sdpa",
        decode_attention: str = "sdpa",
        log_probs: str = "chunked",
        linear: str = "torch",
        rms_norm: str = "eager",
        add_rms_norm: str = "eager",
        rotary: str = "eager",
        glu: str = "eager",
        adamw: str = "torch",
        gae: str = "scan",
        table: tables.Table = tables.BUILTIN,
    ) -> Kernels:
        """The kernels of these names. Raises ValueError, naming the others, if one does not exist or cannot run."""
        return cls(
            unpad=tables.get("unpad", "torch", table=table),
            pad=tables.get("pad", "torch", table=table),
            attention=tables.get("attention", attention, table=table),
            decode_attention=tables.get("decode_attention", decode_attention, table=table),
            linear=tables.get("linear", linear, table=table),
            rms_norm=tables.get("rms_norm", rms_norm, table=table),
            add_rms_norm=tables.get("add_rms_norm", add_rms_norm, table=table),
            rotary=tables.get("rotary", rotary, table=table),
            glu=tables.get("glu", glu, table=table),
            log_probs=tables.get("log_probs", log_probs, table=table),
            all_to_all=tables.get("all_to_all", "torch", table=table),
            adamw=tables.get("adamw", adamw, table=table),
            gae=tables.get("gae", gae, table=table),
        )
