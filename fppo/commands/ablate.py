"""What `fppo ablate` does, once its arguments are read."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from transformers.utils import logging as transformers_logging

from fppo.ablate import ablate as run_all
from fppo.ablate import operations
from fppo.ablate.presets import sizes_of
from fppo.ablate.result import plain
from fppo.assembly.parts import kernels_of
from fppo.assembly.run import assembled
from fppo.commands.actions import nearest_checkpoint, settings_of
from fppo.pipeline import replay, swap
from fppo.pipeline.step import RunState
from fppo.pipeline.swap import Parting, Trace
from fppo.pipeline.train import iterate
from fppo.runs import session
from fppo.settings.ablate import AblateSettings
from fppo.settings.train import TrainSettings
from fppo.tree import replace
from fppo_kernels import table as tables
from fppo_kernels.record import Kernels
from fppo_kernels.table import Implementation, Table


def ablate(given: AblateSettings) -> int:
    """Prints the table, or where a replayed step parts, and writes what was asked for; 130 if it was interrupted."""
    ops = list(operations.CASES) if given.ops == ("all",) else [operations.case_of(op).op for op in given.ops]
    table = _with_own(given, ops)
    _check_names(given, ops, table)
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    if given.replay is not None:
        assert given.step is not None
        return _replay(Path(given.replay), given.step, given, ops, table)
    with _progress() as say:
        found = run_all(
            ops,
            shapes=_shapes(given, ops),
            dtypes=given.dtype_names,
            repeats=given.repeats,
            device=_device(given.device),
            law_seconds=given.law_seconds,
            table={op: {name: table[op][name] for name in _chosen(given, op, table)} for op in ops},
            progress=say,
        )
    print(found.table(width=shutil.get_terminal_size((120, 24)).columns))
    if given.json is not None:
        _write(given.json, found.to_json())
    if given.png is not None and found.rows:
        Path(given.png).parent.mkdir(parents=True, exist_ok=True)
        found.save_png(given.png)
    return 130 if found.interrupted else 0


def _write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text + "\n", encoding="utf-8")


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"--device {name!r}: torch sees no GPU here; give cpu")
    return torch.device(name)


def _shapes(given: AblateSettings, ops: list[str]) -> list[dict[str, int]]:
    known = {name for op in ops for name in operations.CASES[op].shape}
    sizes = {} if given.model is None else sizes_of(given.model)
    return [{name: size for name, size in sizes.items() if name in known} | shape for shape in given.sizes or [{}]]


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Says what is under way on one line of a terminal; says nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return

    def say(text: str) -> None:
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    try:
        yield say
    finally:
        say("")


def _with_own(given: AblateSettings, ops: list[str]) -> Table:
    """The built-in implementations with the user's own."""
    table = tables.BUILTIN
    for text in given.with_:
        op, _, place = text.rpartition("=")
        if not op and len(ops) > 1:
            raise ValueError(f"--with {text}: say which operation it is for, as {ops[0]}={text}")
        op = op or ops[0]
        if op not in ops:
            raise ValueError(f"--with {text}: {op!r} is not among the operations to ablate, {', '.join(ops)}")
        name = place.rpartition(":")[2]
        name = place if name in table[op] else name
        table = tables.register(op, name, Implementation(_imported(place)), table=table)
    return table


def _imported(place: str) -> Callable:
    """The function of "module:function"; the working directory is searched too. Raises ValueError if there is none."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # a console script's path lacks it
    module, _, name = place.partition(":")
    try:
        fn = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--with {place} does not import: {error}") from error
    if not callable(fn):
        raise ValueError(f"--with {place}: that is a {type(fn).__name__}, not a function")
    return fn


def _check_names(given: AblateSettings, ops: list[str], table: Table) -> None:
    for name in given.names:
        there = {op: list(table[op]) for op in ops}
        if not any(name in known for known in there.values()):
            known = "; ".join(f"{op}: {', '.join(names)}" for op, names in there.items())
            raise ValueError(f"--implementations {name!r}: there is no such kernel; there are {known}")


def _chosen(given: AblateSettings, op: str, table: Table) -> list[str]:
    """Those of --implementations that the operation has (all, if none is its), and the user's own."""
    own = [name for name in table[op] if name not in tables.BUILTIN[op]]
    named = [name for name in given.names if name in table[op]]
    return list(dict.fromkeys([*named, *own])) if named else list(table[op])


# replay


def _replay(directory: Path, step: int, given: AblateSettings, ops: list[str], table: Table) -> int:
    """One step of a run under each implementation; each other operation as the run has it."""
    settings = settings_of(directory)
    recorded = session.recorded(directory)
    if step not in recorded:
        steps = sorted(recorded)
        there = f"the recorded steps are {steps[0]} to {steps[-1]}" if steps else "no step is recorded"
        raise ValueError(f"{directory} has no record of step {step}; {there}")
    rollout = settings.rollout
    if rollout.ahead or rollout.filter.groups or rollout.from_ is not None:
        raise ValueError(
            f"{directory} was trained with rollout.ahead, rollout.filter.groups or rollout.from: only a step that "
            "samples one draw of prompts itself can be computed under other kernels; fppo replay takes any"
        )
    transformers_logging.disable_progress_bar()
    own = kernels_of(settings)
    print(f"step {step} of {directory}: recomputing it under the run's own kernels", flush=True)
    run, prompts, base, before = _base(settings, directory, step, own, recorded)
    print(before)
    choices: list[dict[str, Any]] = []
    interrupted = False
    try:
        for op in ops:
            default = operations.default_of(op, table, own)
            for name in _chosen(given, op, table):
                choice = _choice(settings, run, prompts, base, own, op, name, table[op][name], name == default)
                print("\n" + choice_text(choice), flush=True)
                choices.append(choice)
    except KeyboardInterrupt:
        interrupted = True
        print("\ninterrupted: what is above was computed before")
    if given.json is not None:
        line = {"run": str(directory), "step": step, "own": before, "choices": choices, "interrupted": interrupted}
        _write(given.json, json.dumps(plain(line), indent=1))
    return 130 if interrupted else 0


def _base(
    settings: TrainSettings, directory: Path, step: int, own: Kernels, recorded: Mapping[int, dict]
) -> tuple[RunState, Any, Trace, str]:
    """The state before the step, its prompts, the step under the run's own kernels, and whether it is as recorded."""
    watched = swap.watch(own)
    with assembled(settings, kernels=watched.kernels) as parts:
        found = nearest_checkpoint(directory, step - 1)
        run = parts.run if found is None else session.load(parts, directory / session.CHECKPOINTS, found)
        if run.step < step - 1:
            steps = iterate(run, program=parts.program, draw=parts.draw)
            run = next(after for after, _, _ in steps if after.step == step - 1)
        prompts, cursor = parts.draw(run.cursor)
        base = swap.trace(run, prompts, program=parts.program, watched=watched)
    digests = replay.digests_of(replace(base.after, cursor=cursor), base.experience)
    difference = replay.first_difference(step, dict(recorded[step]), digests)
    if difference is None:
        return run, prompts, base, "the run's own kernels: as recorded, bit for bit"
    text = f"the run's own kernels: not as recorded, {difference.part} differs first in {difference.leaf}; "
    return run, prompts, base, text + "the comparison below is with what they give here"


def _choice(
    settings: TrainSettings,
    run: RunState,
    prompts: Any,
    base: Trace,
    own: Kernels,
    op: str,
    name: str,
    implementation: Implementation,
    default: bool,
) -> dict[str, Any]:
    """What is reported of one choice: its stages, or why there are none."""
    choice: dict[str, Any] = {"op": op, "implementation": name, "own": default, "reason": None, "stages": []}
    reason = implementation.refuse()
    if reason is not None:
        return choice | {"reason": f"cannot run here: {reason}"}
    try:
        watched = swap.watch(attrs.evolve(own, **{op: implementation.load()}))
        with assembled(settings, kernels=watched.kernels) as parts:
            other = swap.trace(run, prompts, program=parts.program, watched=watched, given=base)
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return choice | {"reason": f"it raised {type(error).__name__}: {first}"}
    return choice | {"stages": [attrs.asdict(parting) for parting in swap.partings(base, other)]}


def choice_text(choice: Mapping[str, Any]) -> str:
    """A choice and where it parts from the run's own kernels, stage by stage."""
    title = f"{choice['op']} = {choice['implementation']}{' (the run has it)' if choice['own'] else ''}"
    if choice["reason"] is not None:
        return f"{title}: {choice['reason']}"
    stages = [Parting(**stage) for stage in choice["stages"]]
    first = next((stage for stage in stages if stage.leaf is not None), None)
    if first is None:
        return f"{title}: bit-equal in every stage"
    width = max(len(stage.stage) for stage in stages)
    lines = [f"{title}: parts first in {first.stage}, leaf {first.leaf}"]
    lines += [f"  {'stage':<{width}}  {'max abs':>8}  {'relative':>8}  {'differ':>8}  first leaf to differ"]
    return "\n".join([*lines, *(f"  {stage.stage:<{width}}  {_parting(stage)}" for stage in stages)])


def _parting(stage: Parting) -> str:
    if stage.leaf is None:
        return "bit-equal"
    if stage.max_abs == float("inf"):
        return f"{'not comparable':>18}  {f'{stage.differing} of {stage.leaves}':>8}  {stage.leaf}"
    apart = f"{stage.max_abs:>8.1e}  {stage.relative:>8.1e}"
    return f"{apart}  {f'{stage.differing} of {stage.leaves}':>8}  {stage.leaf}"
