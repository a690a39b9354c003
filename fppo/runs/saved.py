"""Parts of a run on disk, each read alone, for commands that do not train."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import attrs
import torch

from fppo import models
from fppo.assembly.adapters import adapted_critic, base_of_role, bases_of, load_policy
from fppo.assembly.inputs import Inputs
from fppo.assembly.parts import bare_model
from fppo.key import Key
from fppo.models import lora_files
from fppo.models.bases import widened
from fppo.models.model import Model, Params
from fppo.pipeline.program import RunState
from fppo.runs.resuming import check_bases
from fppo.runs.session import CHECKPOINTS, CONFIGS
from fppo.runtime import checkpoint, fsdp
from fppo.runtime.mesh import LOCAL, Mesh
from fppo.settings.train import TrainSettings
from fppo.steps.train_state import TrainState
from fppo.workers.imports import import_modules

Role = Literal["actor", "critic"]
CPU = torch.device("cpu")


def newest(directory: Path, step: int | None = None) -> int | None:
    """The step of the newest checkpoint, at or before `step` if given; None without one."""
    steps = [s for s in checkpoint.steps(directory / CHECKPOINTS) if step is None or s <= step]
    return steps[-1] if steps else None


def bare(settings: TrainSettings) -> TrainSettings:
    """The settings of a run with its saved configs and tokenizer in place of the initial models' paths; unchanged if
    none are saved, and for adapters, which need their base."""
    configs = Path(settings.output_dir) / CONFIGS
    if not configs.is_dir() or settings.model.lora.used:  # an adapter needs its base
        return settings
    critic = str(configs / "critic") if settings.uses_critic_model else None
    own = {"path": str(configs / "actor"), "critic_path": critic, "tokenizer": None, "config": {}}
    model, data = attrs.evolve(settings.model, **own), attrs.evolve(settings.data, chat_template=None)
    return attrs.evolve(settings, model=model, data=data)


def params(model: Model, role: Role, path: Path, *, mesh: Mesh = LOCAL, device: torch.device = CPU) -> Params:
    """The parameters of actor or critic in the checkpoint at `path`, on `device`; on a mesh this rank's parts."""
    shaped = {name: torch.empty(shape, device="meta") for name, shape in model.shapes.items()}
    shapes = {f"[{name!r}]": extent for name, extent in model.extents.items()}
    return checkpoint.load(
        fsdp.shard(shaped, mesh, model.cuts),
        path.parent,
        checkpoint.step_of(path),
        mesh=mesh,
        shapes=shapes,
        part=f".{role}.params",
        device=device,
    )


def policy(model: Model, path: Path, *, mesh: Mesh = LOCAL, device: torch.device = CPU) -> RunState:
    """A run's state in the checkpoint at `path`, reduced to the policy for sampling: no optimizer, no critic."""
    directory, step = path.parent, checkpoint.step_of(path)
    actor = TrainState(
        params=params(model, "actor", path, mesh=mesh, device=device),
        opt=None,
        step=checkpoint.load(0, directory, step, part=".actor.step"),
    )
    return RunState(actor=actor, key=checkpoint.load(Key(0), directory, step, part=".key"), step=step)


def export(settings: TrainSettings, target: Path, step: int, role: Role, *, merge: bool = False) -> None:
    """Write the policy or the critic of a checkpoint as a Hugging Face directory; the policy's adapter in PEFT's files
    or, with `merge`, merged into its base as whole weights in float32.

    Raises ValueError for the critic of a run without one, for a critic's adapter without `merge`, and for `merge`
    without an adapter.
    """
    import_modules(settings.model.import_, settings.module_dirs)
    if role == "critic" and not settings.algorithm.uses_critic:
        raise ValueError(
            f"the run has no critic: algorithm.advantage = {settings.algorithm.advantage.name!r} trains none"
        )
    if role == "critic" and not settings.uses_critic_model:
        reads = f"with critic.reads = {settings.critic.reads!r} it reads the results of the policy's pass"
        raise ValueError(f"the run's critic is not a model: {reads}")
    path = checkpoint.place_of(Path(settings.output_dir) / CHECKPOINTS, step)
    if settings.model.lora.used if role == "actor" else settings.model.lora.of_critic:
        _export_adapted(settings, target, path, role, merge=merge)
        return
    if merge:
        raise ValueError(f"the run's {role} has no adapter: leave --merge out")
    inputs = Inputs(settings=bare(settings))
    model = bare_model(inputs.settings.model, None if role == "actor" else inputs.settings.critic)
    whole = params(model, role, path, device=inputs.device)
    generation = inputs.generation if role == "actor" else None
    models.save(model, whole, target, tokenizer=inputs.texts, generation_config=generation)


def _export_adapted(settings: TrainSettings, target: Path, path: Path, role: Role, *, merge: bool) -> None:
    inputs = Inputs(settings=settings)
    begun = settings.model, settings.critic, Key(settings.seed), LOCAL, inputs.device
    model, _ = load_policy(*begun)
    if role == "critic":
        critic, _ = adapted_critic(*begun, model)
        assert critic is not None
        model = critic
    own = bases_of({role: base_of_role(settings.model, role, model)}) or {}
    check_bases(own, path)
    adapter = params(model, role, path, device=inputs.device)
    if not merge and role == "critic":
        raise ValueError("the critic's adapter has a value head, which PEFT's files cannot hold: give --merge")
    if not merge:
        lora_files.save(model, adapter, target, base=own[role].source, tokenizer=inputs.texts)
        return
    generation = inputs.generation if role == "actor" else None
    models.save(widened(model), adapter, target, tokenizer=inputs.texts, generation_config=generation)
