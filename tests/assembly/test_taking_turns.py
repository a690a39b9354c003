"""Roles in one process whose parameters wait on the host: none comes to the device before the one before has left."""

from __future__ import annotations

import weakref
from collections import Counter
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fppo import models
from fppo.assembly.run import assemble
from fppo.key import Key
from fppo.pipeline.step import ppo_step
from fppo.quickstart import CHARACTERS, character_tokenizer, small_model
from tests import tiny_run

LAYERS = 4
# each has a width of its own, by which its tensors are known
WIDTHS = {"policy": 16, "critic": 40, "reference": 56, "teacher": 72, "reward model": 88, "judge": 104}
OF_MODEL = {"critic": "critic", "ref": "reference", "teacher": "teacher"}


class Fetched(TorchDispatchMode):
    """Counts the bytes of each role's parameters and moments that are copies of tensors from before: the most of each,
    and the pairs of roles of which some were there at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most: Counter[str] = Counter()
        self.met: set[tuple[str, str]] = set()
        self._old: dict[int, Any] = {}  # storages that were there before
        self._new: dict[int, Any] = {}
        self._roles: dict[int, tuple[str, int]] = {}  # of the new ones, with their bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in storages((args, kwargs)):
            if storage._cdata not in self._new:
                self._keep(storage, self._old)
        out = func(*args, **(kwargs or {}))
        for storage in storages(out):
            if storage._cdata not in self._old:
                self._keep(storage, self._new)
        if func is torch.ops.aten.copy_.default and (role := role_of(args[1])) is not None:
            target, source = (x.untyped_storage() for x in args[:2])
            if target._cdata in self._new and source._cdata in self._old:
                self._roles[target._cdata] = role, target.nbytes()
                here: Counter[str] = Counter()
                for name, size in self._roles.values():
                    here[name] += size
                self.most |= here
                self.met |= {*combinations(sorted(here), 2)}
        return out

    def _keep(self, storage: Any, among: dict[int, Any]) -> None:
        place = storage._cdata
        if place not in among:

            def freed(_: Any) -> None:
                del among[place]
                self._roles.pop(place, None)

            among[place] = weakref.ref(storage, freed)


def storages(values: Any) -> list[Any]:
    return [x.untyped_storage() for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]


def role_of(x: Tensor) -> str | None:
    names = [name for name, width in WIDTHS.items() if x.is_floating_point() and width in x.shape]
    return names[0] if len(names) == 1 else None


def size_of(role: str, layers: int = LAYERS) -> int:
    """Bytes of a role's parameters with so many of its layers that are known by their width."""
    head = "value" if role in ("critic", "reward model") else "lm"
    shapes = model_of(role, head).shapes.items()
    kept = {name: shape for name, shape in shapes if not any(f"layers.{x}." in name for x in range(layers, LAYERS))}
    return sum(4 * shape.numel() for shape in kept.values() if WIDTHS[role] in shape)


def model_of(role: str, head: str):
    config = small_model(len(character_tokenizer(CHARACTERS)), width=WIDTHS[role], layers=LAYERS).config
    return models.build(config, head)


def settings_of(directory):
    tiny_run.write_task(directory)
    tokenizer = character_tokenizer(CHARACTERS)
    for role in WIDTHS:
        model = model_of(role, "value" if role == "reward model" else "lm")
        models.save(model, models.init_params(model, Key(1)), directory / role, tokenizer=tokenizer)
    places = {f"model__{name}_path": role for name, role in OF_MODEL.items()}
    places |= {"model__path": "policy", "reward__model__path": "reward model", "reward__judge__path": "judge"}
    given = {name: str(directory / role) for name, role in places.items()}
    judge = {"template": "{response}", "pattern": r"(\d)", "chat": False, "max_tokens": 3, "max_rows": 4}
    given |= {f"reward__judge__{name}": value for name, value in judge.items()}
    return tiny_run.settings(
        directory, model__offload="all", actor__distill="reverse_kl", data__eval_path=[], check=False, **given
    )


@pytest.mark.slow
def test_no_two_roles_are_on_the_device_at_once_and_each_takes_what_is_promised(tmp_path):
    with assemble(settings_of(tmp_path)) as made, Fetched() as fetched:
        ppo_step(made.run, program=made.program, draw=made.draw, donate=True)
    assert fetched.most.keys() == WIDTHS.keys()
    assert not fetched.met
    for role in ("reference", "teacher", "reward model"):
        assert fetched.most[role] == size_of(role, layers=2), "two layers and what is outside of them"
    assert fetched.most["judge"] == size_of("judge")
    for role in ("policy", "critic"):
        assert fetched.most[role] == 3 * size_of(role), "an update has its parameters and moments, in one part here"
