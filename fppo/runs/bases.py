"""Whether adapters of a checkpoint go with what they would stand on here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fppo.pipeline.program import Base
from fppo.runtime import checkpoint


def check(own: Mapping[str, Base] | None, path: Path) -> None:
    """Raises ValueError if the adapters in the checkpoint at `path` were trained on other bases than a run's `own`, by
    role, or act otherwise; CheckpointError if it has none of these."""
    for role, base in (own or {}).items():
        before = checkpoint.load(base, path.parent, checkpoint.step_of(path), part=f".bases[{role!r}]")
        setting = "model.path" if role == "actor" else "model.critic_path"
        if before.adapter != base.adapter:
            raise ValueError(
                f"model.lora: the {role}'s adapter in {path} is of {before.adapter}, and here it would be of "
                f"{base.adapter}: give the same, or another output_dir to start anew"
            )
        if before.dtype != base.dtype:
            raise ValueError(
                f"model.compute_dtype or model.lora.base: the {role}'s adapter in {path} stands on weights in "
                f"{before.dtype}, and here they are in {base.dtype}: give the same, or another output_dir to start anew"
            )
        if before.digest != base.digest:
            raise ValueError(
                f"{setting}: the {role}'s adapter in {path} was trained on the weights of {before.source}, whose "
                f"digest was {before.digest}; those of {base.source} have {base.digest}: give that model"
            )
