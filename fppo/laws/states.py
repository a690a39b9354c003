"""Laws of functions from state to state: resuming, donation, purity."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from fppo import tree
from fppo.laws._search import LawViolation, fn_name

S = TypeVar("S")
H = TypeVar("H")


def _first_difference(expected: dict[str, str], actual: dict[str, str]) -> str | None:
    """Describe the first leaf, in the tree's order, in which two digests of trees differ; None if they are equal."""
    for path in (*expected, *(path for path in actual if path not in expected)):
        name = path or "the result"
        if path not in actual:
            return f"{name} is missing"
        if path not in expected:
            return f"{name} is new"
        if expected[path] != actual[path]:
            return f"{name} has other bits"
    return None


def _violation(fn: Callable[..., Any], law: str, statement: str, reason: str, **example: int) -> LawViolation:
    where = "".join(f"\n    {name} = {value}" for name, value in example.items())
    shown = f"\n  The smallest counter-example:{where}" if example else ""
    message = f'{fn_name(fn)} breaks the law "{law}": {statement}.\n  {reason}.{shown}'
    return LawViolation(message, law, {name: torch.tensor(value) for name, value in example.items()})


def check_resume(
    step: Callable[[S], S], state: S, *, save: Callable[[S], H], load: Callable[[H], S], steps: int = 3
) -> None:
    """Check that run(n + m) equals run(m) after load(save(run(n))), bit for bit, for all n and m with n + m <= `steps`.

    `step` takes a state (any tree) and returns the next one; `save(state)` returns a handle, such as a path, and
    `load(handle)` the state. The LawViolation names the smallest n and m, and the first leaf that differs. Both kinds
    of gaps are found: in the state (a counter in a closure, a global generator) and in the file.
    """
    statement = "run(n + m) equals run(m) after save and load of run(n)"
    digests, handles = [tree.digest(state)], [save(state)]
    for _ in range(steps):
        state = step(state)
        digests.append(tree.digest(state))
        handles.append(save(state))
    for total in range(steps + 1):
        for n in range(total, -1, -1):
            resumed = load(handles[n])
            for _ in range(total - n):
                resumed = step(resumed)
            if reason := _first_difference(digests[total], tree.digest(resumed)):
                fn = load if total == n else step
                raise _violation(fn, "resume", statement, f"after the resume {reason}", n=n, m=total - n)


def check_donation(step: Callable[..., Any], state: Any) -> None:
    """Check that `step(state, donate=True)` gives the bits of `step(state, donate=False)`, and leaves no old leaf
    overwritten.

    `step` takes a state (any tree) and the keyword `donate`, and returns any tree. Without donation the old state keeps
    every bit. With it each of its tensors is either emptied, so that a later use fails loudly, or still as it was.
    """
    law, statement = "donation", "donation changes no bit of the result, and leaves no old state that looks alive"
    before = tree.digest(state)
    kept, donated = tree.copy(state), tree.copy(state)
    expected = tree.digest(step(kept, donate=False))
    if reason := _first_difference(before, tree.digest(kept)):
        raise _violation(step, law, statement, f"without donation it changed its argument: {reason}")
    if reason := _first_difference(expected, tree.digest(step(donated, donate=True))):
        raise _violation(step, law, statement, f"with donation {reason}")
    for path, leaf in tree.leaves_with_paths(donated):
        if isinstance(leaf, Tensor) and leaf.numel() and tree.digest(leaf)[""] != before[path]:
            raise _violation(step, law, statement, f"the donated {path or 'state'} was overwritten, not emptied")


def check_purity(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Check that `fn(*args, **kwargs)` gives equal bits when called again, changes no argument, and draws from no
    global generator (torch's, Python's). Arguments and result are any trees."""
    law, statement = "purity", "arguments stay as they are, and equal arguments give equal bits"
    before, states = tree.digest((args, kwargs)), (torch.get_rng_state(), random.getstate())
    first = tree.digest(fn(*args, **kwargs))
    if not torch.equal(states[0], torch.get_rng_state()):
        raise _violation(fn, law, statement, "it drew from torch's global generator")
    if states[1] != random.getstate():
        raise _violation(fn, law, statement, "it drew from Python's global generator")
    if reason := _first_difference(before, tree.digest((args, kwargs))):
        raise _violation(fn, law, statement, f"it changed its argument: {reason}")
    if reason := _first_difference(first, tree.digest(fn(*args, **kwargs))):
        raise _violation(fn, law, statement, f"a second call gave another result: {reason}")
