"""Checks that the adapters of a checkpoint fit the bases of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fppo.pipeline.program import Base
from fppo.runtime import checkpoint


def check(own: Mapping[str, Base] | None, path: Path) -> None:
    """Raise ValueError if the adapters in the checkpoint at `path` differ from a run's `own` in base weights, dtype or
    adapter config, by role; CheckpointError if it has no adapters."""
    for role, base in (own or {}).items():
        before = checkpoint.load(base, path.parent, checkpoint.step_of(path), part=f".bases[{role!r}]")
        setting = "model.path" if role == "actor" else "model.critic_path"
        if before.adapter != base.adapter:
            raise ValueError(
                f"model.lora: the {role}'s adapter in {path} is {before.adapter}, but the settings give "
                f"{base.adapter}: give the same, or another output_dir to start anew"
            )
        if before.dtype != base.dtype:
            raise ValueError(
                f"model.compute_dtype or model.lora.base: the {role}'s adapter in {path} has base weights in "
                f"{before.dtype}, the settings give {base.dtype}: give the same, or another output_dir to start anew"
            )
        if before.digest != base.digest:
            raise ValueError(
                f"{setting}: the {role}'s adapter in {path} was trained on the weights of {before.source}, whose "
                f"digest was {before.digest}; those of {base.source} have {base.digest}: give that model"
            )
