"""The state of a run whose roles are in groups: saved, loaded, digested and exported where it is, by its own ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase, ProcessorMixin

from fppo import tree
from fppo.assembly.adapters import export_policy
from fppo.assembly.roles import Roles
from fppo.fleet import HERE, Group, Here, Stays, at_once
from fppo.models.model import Model
from fppo.pipeline.program import RunState
from fppo.runtime import checkpoint, digests
from fppo.runtime.checkpoint import Contents, Pending, RemoteParts
from fppo.runtime.digests import Kind
from fppo.runtime.layout import Extent
from fppo.steps.train_state import OPTIONAL, Params, TrainState, whole_shapes

AHEAD = "ahead"  # the field of a run's state with waiting batches, in any number and of any width


class _Part(NamedTuple):
    """The group that holds a field of a run's state, with a handle of its model; None if it has no model."""

    group: Group
    model: Any


@attrs.frozen(kw_only=True)
class Placed:
    """The fields of a run's state that groups of ranks hold. All others, and all plain values, are the controller's."""

    parts: Mapping[str, _Part]
    kind: Kind  # of digests
    known: set[Path] = attrs.field(factory=set)  # checkpoints that this process has saved or loaded

    @staticmethod
    def of(roles: Roles, device: torch.device) -> Placed | None:
        """The fields of a run's state whose roles are on groups; None without any. Their ranks work on `device`."""
        parts: dict[str, _Part] = {}
        for field, name in (("actor", "actor"), ("critic", "critic"), ("ref", "reference"), ("teacher", "actor")):
            role: Any = getattr(roles, name)
            if role is not None and isinstance((group := roles.at[name]), Group):
                parts[field] = _Part(group, role.model)
        alone = all(part.group.ranks == 1 for part in parts.values())
        return Placed(parts=parts, kind="blake2b" if alone and device.type == "cpu" else "sums") if parts else None

    def save(
        self, run: RunState, directory: Path, *, keep: int | None, notes: Mapping[str, str] = MappingProxyType({})
    ) -> Pending:
        """Write the checkpoint of the run's step with `notes`, complete on return, and drop all but the newest `keep`.

        A checkpoint that this process saved or loaded before is left as it is. Raises CheckpointError.
        """
        path = checkpoint.path_of(directory, run.step)
        if path.absolute() in self.known:
            return Pending.written(path)
        remote = dict(self._remote_parts(run))
        own = tree.replace(run, **dict.fromkeys(remote))
        count = sum(part.group.ranks for part in remote.values())
        parts = RemoteParts(count, lambda draft: _written(run, remote, draft))
        pending = checkpoint.begin_save(own, directory, run.step, free=AHEAD, keep=keep, notes=notes, parts=parts)
        pending.wait()
        self.known.add(path.absolute())
        return pending

    def load(self, run: RunState, directory: Path, step: int, *, device: torch.device) -> RunState:
        """Load a checkpoint, written under any placement, to the groups and devices that hold the state of `run`. The
        memory of `run` is given up."""
        rest = checkpoint.load(run, directory, step, free=AHEAD, device=device, optional=OPTIONAL)
        self.known.add(checkpoint.path_of(directory, step).absolute())
        return tree.replace(rest, **self._on_each(run, _load, directory.absolute(), step, label="load", stays=True))

    def digest(self, run: RunState, kind: Kind, *, device: torch.device) -> dict[str, str]:
        """`digests.digest` of the whole state, by path; each group computes the digests of its fields."""
        found = self._on_each(run, _digest, kind, label="digest")
        there = {f".{field}{path}": x for field, each in found.items() for path, x in each.items()}
        own = tree.replace(run, **{field: None for field, _ in self._remote_parts(run)})
        every = there | digests.digest(own, kind, device=device)
        paths = [path for path, _ in tree.leaves_with_paths(run)]
        ordered = (name for path in paths for name in ([path] if path in every else checkpoint.inside(path, every)))
        return {name: every[name] for name in ordered}

    def like(self, run: RunState) -> list[Tensor]:
        """Meta tensors with the shapes and dtypes of the state's tensors that are in groups."""
        found = self._on_each(run, _kinds, label="look at")
        return [torch.empty(shape, dtype=x, device="meta") for each in found.values() for shape, x in each]

    def export(
        self,
        run: RunState,
        target: Path,
        texts: PreTrainedTokenizerBase | ProcessorMixin,
        generation: GenerationConfig,
    ) -> None:
        """Write the policy as a Hugging Face directory, from the ranks of the actor's group (`export_policy`)."""
        (group, model), base = self.parts["actor"], (run.bases or {}).get("actor")
        args = (model, run.actor.params, target.absolute(), texts, generation, base and base.source)
        group.call(_export, HERE, *args, label="export")

    def _remote_parts(self, run: RunState) -> Iterator[tuple[str, _Part]]:
        return ((field, part) for field, part in self.parts.items() if getattr(run, field) is not None)

    def _on_each(
        self, run: RunState, fn: Callable[..., Any], *args: Any, label: str, stays: Stays = ()
    ) -> dict[str, Any]:
        """Call `fn` for each field of the run that a group holds, in all groups at once; returns results by field.

        The ranks of a group call `fn(here, value, model, field, *args)`: `here` is the rank's own `Here` (its mesh and
        device), `value` the field's value, and `model` the group's. Results selected by `stays` are kept on the ranks,
        and returned as handles (`Group.call`). `label` names the call.
        """
        return at_once(
            {
                field: partial(
                    part.group.call,
                    *(fn, HERE, getattr(run, field), part.model, field, *args),
                    stays=stays,
                    label=f"{label} {field}",
                )
                for field, part in self._remote_parts(run)
            }
        )


def _shapes(value: TrainState | Params, model: Model | None) -> dict[str, torch.Size | Extent]:
    """Whole shapes of the leaves of `value` that a mesh may cut, by path."""
    if model is None:
        return {}
    if isinstance(value, TrainState):
        return whole_shapes(value, model.extents)
    return {f"[{name!r}]": extent for name, extent in model.extents.items()}


def _written(run: RunState, remote: Mapping[str, _Part], draft: Path) -> list[Contents]:
    """Write the fields of a run that are in groups, each by its own group; returns the contents of their files."""
    work, first = dict[str, Callable[[], Contents]](), 0
    for field, part in remote.items():
        args = (HERE, getattr(run, field), part.model, field, draft, first)
        work[field] = partial(part.group.call, _write, *args, label=f"save {field}")
        first += part.group.ranks
    return list(at_once(work).values())


def _write(here: Here, value: Any, model: Model | None, field: str, draft: Path, first: int) -> Contents:
    return checkpoint.write_part(value, f".{field}", draft, first, mesh=here.mesh, shapes=_shapes(value, model))


def _load(here: Here, value: Any, model: Model | None, field: str, directory: Path, step: int) -> Any:
    shapes, part = _shapes(value, model), f".{field}"
    how = {"mesh": here.mesh, "shapes": shapes, "optional": OPTIONAL}
    return checkpoint.load(value, directory, step, part=part, donate=True, **how)


def _digest(here: Here, value: Any, model: Model | None, field: str, kind: Kind) -> dict[str, str]:
    del field
    return digests.digest(value, kind, device=here.device, mesh=here.mesh, shapes=_shapes(value, model))


def _kinds(here: Here, value: Any, *_: object) -> list[tuple[list[int], torch.dtype]]:
    del here
    return [(list(x.shape), x.dtype) for x in tree.tensors(value)]


def _export(
    here: Here,
    model: Model,
    params: Params,
    target: Path,
    texts: PreTrainedTokenizerBase | ProcessorMixin,
    generation: GenerationConfig,
    base: str | None,
) -> None:
    export_policy(model, params, target, base=base, texts=texts, generation=generation, mesh=here.mesh)
