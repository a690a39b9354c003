"""A forward pass over rows: its inputs, its settings, and the outputs that it can compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import attrs
from torch import Tensor

from fppo import models
from fppo.losses.value import first_output
from fppo.models.model import Model
from fppo.runtime.mesh import LOCAL, Mesh
from fppo.shapes import Outputs, Tokens
from fppo.steps import experts
from fppo.steps.experts import RouterSums
from fppo_kernels.shapes import Float, Int
from fppo_kernels.table import Kernels, takes_key_lengths

OF_VALUE_HEADS = ("values", "outputs")
OF_ROUTERS = ("routed", "loads", "router_sums")
OF_DISTRIBUTIONS = ("top_ids", "top_log_probs", "listed_log_probs")
OUTPUTS = ("log_probs", "entropy", "sum_squared_probs", "hidden", *OF_DISTRIBUTIONS, *OF_VALUE_HEADS, *OF_ROUTERS)


class Top(NamedTuple):
    """The `kept` most probable of the first `of` tokens of a vocabulary; if `kept` is `of` all, in their order."""

    kept: int
    of: int

    @property
    def whole(self) -> bool:
        """Whether it is all of them, so that no rest is left out."""
        return self.kept >= self.of


@runtime_checkable
class Rows(Protocol):
    """The columns of a record that a pass reads: a Rollout or any later record."""

    @property
    def tokens(self) -> Tensor: ...  # [B, S] int64
    @property
    def attention_mask(self) -> Tensor: ...  # [B, S] bool
    @property
    def response_mask(self) -> Tensor: ...  # [B, T] bool


@attrs.frozen
class Forward:
    """A model bound to the kernels and the mesh of its passes.

    `remove_padding` packs the rows of a pass; without it padded rows run as they are. With `share_prompts` common
    prefixes of rows are computed once; "auto" does so if it saves a tenth of the tokens and everything supports it.
    `read` computes values [...] from the outputs of a value head [..., K]. With `replay` the routers of experts take
    their choices from the rows' column `routed` [B, S, L, k]. `top` says which tokens the "top_ids" of a pass are.
    """

    model: Model
    kernels: Kernels = attrs.field(factory=Kernels.named)
    mesh: Mesh = LOCAL
    remove_padding: bool = True
    share_prompts: Literal["auto"] | bool = "auto"
    read: Callable[[Tensor], Tensor] = first_output
    replay: bool = False
    top: Top | None = None

    def __attrs_post_init__(self) -> None:
        if self.share_prompts is True and (why := self.sharing_hindrance()) is not None:
            raise ValueError(f"share_prompts=True, and {why}: give share_prompts='auto', which then shares none")
        if self.replay:
            experts.check_routers(self.model, "leave out replay (in settings algorithm.router_replay)")
        sizes = {name: axis.size for name, axis in self.mesh.axes.items()}
        models.check_rows_whole(self.model.whole_config, sizes)
        layout = self.model.layout
        for axis, placed in (
            ("tensor", 1 if layout is None else layout.ranks),
            ("expert", 1 if layout is None else layout.expert[1]),
            ("pipeline", 1 if layout is None else layout.stage_ranks),
        ):
            if (size := self.mesh[axis].size) != placed:
                raise ValueError(
                    f"the mesh has a {axis} axis of {size} ranks, and the model is one for {placed}: give "
                    "models.place(model, mesh) of the whole model"
                )
        for name in ("sequence", "context", "tensor"):
            if self.mesh[name].size > 1 and not self.remove_padding:
                raise ValueError(
                    f"remove_padding=False runs padded rows as they are, and a {name} axis of {self.mesh[name].size} "
                    f"ranks cuts one packed row: remove padding, or use a mesh without a {name} axis"
                )
        sequence, context = self.mesh["sequence"].size, self.mesh["context"].size
        if sequence > 1 and context > 1:
            raise ValueError(
                f"a sequence axis of {sequence} ranks and a context axis of {context} both cut the packed row: use one "
                f"of them, of {sequence * context} ranks"
            )

    def sharing_hindrance(self) -> str | None:
        """The reason why rows cannot share common prefixes; None if they can."""
        hindrances = (
            (not self.remove_padding, "padded rows run as they are"),
            (bool(self.model.stateful), f"layers of model type {self.model.config.model_type!r} carry states"),
            (self.mesh["context"].size > 1, "a context axis deals the packed row in blocks"),
            (self.replay, "routers choose for each row what they chose for it before"),
            (not takes_key_lengths(self.kernels.attention), "the attention kernel has no keyword key_lengths"),
        )
        return next((why for hinders, why in hindrances if hinders), None)


class TokenOutputs(NamedTuple):
    """Outputs of a pass, float32 (float64 for float64 parameters), zero outside the response mask.

    Each token's are [B, T]; the K outputs of a value head [B, T, K]; the states before a vocabulary head [B, T, H]; the
    K most probable tokens, and log-probs of these or of the tokens that the rows list as `teacher_top_ids`, [B, T, K].
    Routers report the experts that they choose, or would choose without replay, [B, S, L, k]; and for this pass each
    expert's number of tokens, and sums for the routers' losses.
    """

    log_probs: Tokens | None = None
    entropy: Tokens | None = None
    sum_squared_probs: Tokens | None = None
    values: Tokens | None = None
    outputs: Outputs | None = None
    hidden: Outputs | None = None
    top_ids: Outputs | None = None  # as whole floats
    top_log_probs: Outputs | None = None
    listed_log_probs: Outputs | None = None
    routed: Int[Tensor, "b s l k"] | None = None
    loads: Float[Tensor, "l e"] | None = None  # over the tokens of rows with a response
    router_sums: RouterSums | None = None  # over these tokens, too


def check_outputs(model: Model, outputs: Sequence[str]) -> None:
    """Raise ValueError for unknown outputs, and for outputs that the model does not support."""
    if unknown := [name for name in outputs if name not in OUTPUTS]:
        raise ValueError(f"unknown outputs {unknown}; there are {list(OUTPUTS)}")
    if of_routers := [name for name in outputs if name in OF_ROUTERS]:
        experts.check_routers(model, f"leave out {of_routers}")
    needed = {"value" if name in OF_VALUE_HEADS else "lm" for name in outputs if name not in OF_ROUTERS}
    if needed - {model.head}:
        has, lacks = ("value", "vocabulary") if model.head == "value" else ("vocabulary", "value")
        raise ValueError(f"outputs {list(outputs)} need a {lacks} head; this model has a {has} head")
