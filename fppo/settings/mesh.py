"""The settings of the mesh."""

from __future__ import annotations

from typing import Literal

import attrs

from fppo.settings.fields import MOST_SECONDS, above, at_least, at_most, setting


@attrs.frozen(kw_only=True)
class MeshSettings:
    """How a run is spread over processes: `fppo train --nproc N` or torchrun starts pipeline * replicate * shard *
    expert * sequence * context * tensor."""

    replicate: int = setting(1, at_least(1))
    """Groups of ranks with the same parameters and other rows."""
    shard: int | None = setting(None, at_least(1))
    """Ranks over which parameters, gradients and moments are cut (FSDP); None: all that the other axes leave."""
    expert: int = setting(1, at_least(1))
    """Ranks with other rows over which a mixture's experts are cut, and which send each other tokens."""
    sequence: int = setting(1, at_least(1))
    """Ranks over which packed sequences are cut (Ulysses); it must divide the attention heads."""
    context: int = setting(1, at_least(1))
    """Ranks to which packed sequences are dealt in blocks of equal work; they may be more than the attention heads."""
    ring: bool = setting(False)
    """Hand keys and values around the context axis, for less memory and more time; else gather them for each layer."""
    tensor: int = setting(1, at_least(1))
    """Ranks over which heads, inner widths and the vocabulary are cut; it must divide all but the last."""
    pipeline: int = setting(1, at_least(1))
    """Ranks over which a model's layers are cut: each runs a stage of them, and sends what comes out to the next."""
    virtual_stages: int = setting(1, at_least(1))
    """Stages of each pipeline rank, run by turns: with more it waits less and sends more; the layers must suffice."""
    stage: Literal[1, 2, 3] = setting(3)
    """When layers are gathered: 3, for each use; 2, kept until the backward pass; 1, once for a mini-batch."""
    reduce_dtype: Literal["float32", "bfloat16"] = setting("float32")
    """The dtype in which gradients are added up over ranks."""
    prefetch: bool = setting(True)
    """Gather the next layer while one runs, and embeddings and head once for all passes of a mini-batch."""
    timeout: float = setting(600.0, above(0), at_most(MOST_SECONDS))
    """Seconds that a collective waits for the other ranks before the run ends with an error."""

    @property
    def others(self) -> int:
        """The ranks of all axes but shard."""
        return self.pipeline * self.replicate * self.expert * self.sequence * self.context * self.tensor

    def sizes(self, shard: int) -> dict[str, int]:
        """Every axis and its size: ranks of the last axis are neighbours."""
        inside = {"expert": self.expert, "sequence": self.sequence, "context": self.context, "tensor": self.tensor}
        return {"pipeline": self.pipeline, "replicate": self.replicate, "shard": shard, **inside}

    @property
    def least_ranks(self) -> int:
        """The processes that it takes if it cuts parameters over no more than it says."""
        return self.others * (self.shard or 1)
