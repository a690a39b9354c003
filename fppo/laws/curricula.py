"""Laws of curricula, a user's own included: draws and states depend on the arguments alone."""

from __future__ import annotations

from typing import Any

import torch

from fppo import tree
from fppo.data import Course, Curriculum, DataCursor, PromptSet, chosen_indices, prompt_set
from fppo.key import Key
from fppo.laws._search import LawViolation
from fppo.laws.states import check_purity

KEY = Key(0)


def _small() -> PromptSet:
    """A small set of twelve prompts from three sources."""
    return prompt_set([[i + 1] for i in range(12)], pad_token_id=0, sources=["a"] * 7 + ["b"] * 4 + ["c"])


def check_curriculum(curriculum: Curriculum, prompts: PromptSet | None = None, *, size: int = 4) -> None:
    """Check a curriculum by its laws on prompts, by default twelve from three sources, drawn `size` at a time.

    `laws.check_curriculum(data.learnability(explore=0.2))` raises LawViolation for the first law that fails:

    - choose gives `size` indices of prompts; all functions give equal bits for equal arguments, and change no argument;
    - states are trees of tensors, numbers and texts, which a checkpoint can hold;
    - the order of a batch's responses does not matter, but for the rounding of sums;
    - a state learned from nothing, and from missing scores (nan), still chooses;
    - the draws of a step depend on the key.
    """
    prompts = _small() if prompts is None else prompts
    known = curriculum.init(prompts)
    for step in range(6):
        key = KEY.fold(step)
        _check_tree(known)
        check_purity(curriculum.choose, known, key, step, size)
        indices = _chosen(curriculum, prompts, known, key, step, size)
        again = torch.cat([indices, indices])
        draws = key.fold("scores").uniform(torch.arange(len(again)), 1)[:, 0]
        scores = (draws < 0.5).double().where(draws < 0.9, torch.nan)
        check_purity(curriculum.update, known, again, scores)
        check_purity(curriculum.report, known, step)
        after = curriculum.update(known, again, scores)
        flipped = curriculum.update(known, again.flip(0), scores.flip(0))
        if not _near(after, flipped):
            raise _broken("order", "the order of a batch's responses changes the state that update gives")
        nothing = curriculum.update(known, again[:0], scores[:0])
        unscored = curriculum.update(known, again, torch.full_like(scores, torch.nan))
        for state in (nothing, unscored):
            _chosen(curriculum, prompts, state, key, step, size)
        known = after
    if len({tuple(_chosen(curriculum, prompts, known, KEY.fold("draw", i), 6, size).tolist()) for i in range(16)}) == 1:
        raise _broken("key", "16 keys gave the same draw: the key is not read")


def _chosen(curriculum: Curriculum, prompts: PromptSet, known: Any, key: Key, step: int, size: int) -> torch.Tensor:
    """The indices of the prompts that a curriculum chooses at a step, given its state `known`. Raises LawViolation
    unless they are `size` indices of prompts."""
    cursor = DataCursor(course=Course(known=known, step=step))
    try:
        indices, _ = chosen_indices(curriculum, len(prompts), cursor, size=size, key=key)
    except ValueError as error:
        raise _broken("indices", str(error)) from error
    return torch.tensor(indices)


def _check_tree(known: Any) -> None:
    for path, leaf in tree.leaves_with_paths(known):
        if not isinstance(leaf, torch.Tensor | int | float | str | bool):
            text = f"the state holds a {type(leaf).__name__} at {path or 'its root'}, which no checkpoint holds"
            raise _broken("state", f"{text}; use tensors, numbers, texts, and records made by fppo.tree.state")


def _near(one: Any, other: Any) -> bool:
    left, right = tree.leaves_with_paths(one), tree.leaves_with_paths(other)
    if [path for path, _ in left] != [path for path, _ in right]:
        return False
    return all(_alike(a, b) for (_, a), (_, b) in zip(left, right, strict=True))


def _alike(a: Any, b: Any) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return bool(a == b)
    same = a.shape == b.shape and a.dtype == b.dtype
    return same and (torch.allclose(a, b, rtol=1e-9, equal_nan=True) if a.is_floating_point() else torch.equal(a, b))


def _broken(law: str, reason: str) -> LawViolation:
    return LawViolation(f'the curriculum breaks the law "{law}": {reason}', law, {})
