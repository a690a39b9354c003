"""The work of `fppo ablate`, after its arguments are read."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch

from fppo import devices
from fppo._errors import UsageError
from fppo.assembly.parts import kernel_table, make_tools, with_own
from fppo.assembly.run import assemble
from fppo.commands import output
from fppo.commands.actions import beginning, match_ground, restored, settings_of
from fppo.fleet import Here
from fppo.pipeline import replay, swap
from fppo.pipeline.program import RunState
from fppo.pipeline.swap import StageDifference, Trace
from fppo.pipeline.train import iterate
from fppo.runs import session, starts
from fppo.settings import files
from fppo.settings.ablate import AblateSettings
from fppo.settings.modules import kernels_named
from fppo.settings.train import TrainSettings
from fppo.studies.ablate import ablate as run_all
from fppo.studies.ablate import operations, text
from fppo_kernels import table as tables
from fppo_kernels.table import Implementation, Kernels, Table

RAISED = "it raised"  # the beginning of a reason why a kernel did not run


def ablate(settings: AblateSettings) -> int:
    """Measure kernels and print the table or, with --replay, print where a run's step differs under each kernel; write
    the files that the settings name. Returns 130 if interrupted, else 1 if a kernel breaks a law or raises, else 0."""
    with output.shown(settings.json) as show:
        return _ablate(settings, show)


def _ablate(settings: AblateSettings, show: output.Show) -> int:
    ops = list(operations.NAMES) if settings.ops == ("all",) else [operations.case_of(op).name for op in settings.ops]
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if settings.replay is not None:
        assert settings.step is not None
        return _replay(Path(settings.replay), settings.step, settings, ops, show)
    device = devices.named(settings.device, f"--device {settings.device!r}")
    if "float64" in settings.dtype_names and devices.widest(device) != torch.float64:
        raise ValueError(f"--dtypes float64: device {device} has no float64; leave it out")
    table = _with_own(settings, ops, tables.BUILTIN)
    with _progress() as say:
        ablation = run_all(
            ops,
            shapes=_shapes(settings, ops),
            dtypes=settings.dtype_names,
            repeats=settings.repeats,
            device=device,
            law_seconds=settings.law_seconds,
            table={op: {name: table[op][name] for name in _chosen(settings, op, table)} for op in ops},
            progress=say,
        )
    show(text.table(ablation, width=shutil.get_terminal_size((120, 24)).columns), attrs.asdict(ablation))
    if settings.png is not None and ablation.rows:
        Path(settings.png).parent.mkdir(parents=True, exist_ok=True)
        from fppo.studies.ablate import chart  # here: it loads matplotlib

        chart.save(ablation, Path(settings.png))
    if ablation.interrupted:
        return 130
    return int(any(row.status in ("failed", "error") for row in ablation.rows))


def _shapes(settings: AblateSettings, ops: list[str]) -> list[dict[str, int]]:
    names = {name for op in ops for name in operations.case_of(op).shape}
    sizes = {} if settings.model is None else operations.sizes_of(settings.model)
    default = {name: size for name, size in sizes.items() if name in names}
    return [default | shape for shape in settings.sizes or [{}]]


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show the work under way on one line of a terminal; show nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return

    def say(text: str) -> None:
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    try:
        yield say
    finally:
        say("")


def _with_own(settings: AblateSettings, ops: list[str], table: Table) -> Table:
    """Add the user's own implementations (--with) to the table of kernels. Raises UsageError for one whose operation is
    unclear or not among `ops`, those to ablate, and if the table then lacks a name in --implementations."""
    for own in settings.with_:
        op, _, place = own.rpartition("=")
        if not op and len(ops) > 1:
            raise UsageError(f"--with {own}: say which operation it is for, as {ops[0]}={own}")
        op = op or ops[0]
        if op not in ops:
            raise UsageError(f"--with {own}: {op!r} is not among the operations to ablate, {', '.join(ops)}")
        name = place.rpartition(":")[2]
        name = place if name in table[op] else name
        table = with_own(table, op, name, place, "--with")
    names = {op: list(table[op]) for op in ops}
    for name in settings.names:
        if not any(name in choices for choices in names.values()):
            there = "; ".join(f"{op}: {', '.join(choices)}" for op, choices in names.items())
            raise UsageError(f"--implementations {name!r}: there is no such kernel; there are {there}")
    return table


def _chosen(settings: AblateSettings, op: str, table: Table) -> list[str]:
    """Names of the implementations of an operation to run: those in --implementations and the user's own; all in the
    table if --implementations names none of this operation."""
    own = [name for name in table[op] if name not in tables.BUILTIN[op]]
    named = [name for name in settings.names if name in table[op]]
    return list(dict.fromkeys([*named, *own])) if named else list(table[op])


# replay


@attrs.frozen(kw_only=True)
class _Reference:
    """A step of a run, recomputed under the run's own kernels: settings, kernels, the state before the step, and a
    trace of the step."""

    settings: TrainSettings
    kernels: Kernels
    run: RunState
    trace: Trace


def _replay(directory: Path, step: int, asked: AblateSettings, ops: list[str], show: output.Show) -> int:
    """Recompute one step of a run under each implementation of `ops`, with the run's own kernels for all other
    operations."""
    settings = settings_of(directory, step)
    recorded = session.recorded(directory)
    if step not in recorded:
        steps = sorted(recorded)
        there = f"the recorded steps are {steps[0]} to {steps[-1]}" if steps else "no step is recorded"
        raise UsageError(f"{directory} has no record of step {step}; {there}")
    names = kernels_named(settings)
    tools = make_tools(Here(), names, settings.module_dirs)
    table = _with_own(asked, ops, kernel_table(names))
    print(f"step {step} of {directory}: recomputing it under the run's own kernels", flush=True)
    ground = partial(_stand, directory, asked)
    reference, before = _reference(settings, tools.kernels, directory, step, recorded, ground)
    print(before)
    choices: list[dict[str, Any]] = []
    interrupted = False
    try:
        for op in ops:
            default = operations.default_of(op, table, reference.kernels)
            for name in _chosen(asked, op, table):
                choice = {"op": op, "implementation": name, "own": name == default, "reason": None, "stages": []}
                choice |= _compared(reference, op, table[op][name])
                print("\n" + choice_text(choice), flush=True)
                choices.append(choice)
    except KeyboardInterrupt:
        interrupted = True
        print("\ninterrupted: what is above was computed before")
    show("", {"run": str(directory), "step": step, "own": before, "choices": choices, "interrupted": interrupted})
    if interrupted:
        return 130
    return int(any((choice["reason"] or "").startswith(RAISED) for choice in choices))


def _stand(directory: Path, asked: AblateSettings, step: int) -> None:
    """Set the number of threads to that with which the run computed `step`, unless --threads gives one, and print how
    this process differs otherwise."""
    for line in match_ground(directory, step, threads=asked.threads is None):
        print(line, flush=True)


def _reference(
    settings: TrainSettings,
    kernels: Kernels,
    directory: Path,
    step: int,
    recorded: Mapping[int, dict],
    ground: Callable[[int], None],
) -> tuple[_Reference, str]:
    """Recompute a step under the run's own kernels; returns it, and a text on whether it equals the recorded digests.
    `ground(step)` sets up this process as it was for the steps up to `step`."""
    watched, ahead = swap.watch(kernels), settings.rollout.ahead
    run, begin = None, beginning(directory, step)
    for earlier, until in starts.spans(directory, begin + 1, step - 1) if begin < step - 1 else ():
        ground(until)
        with assemble(files.replace(earlier, {"rollout.save": False})) as assembly:
            run = run or restored(assembly, directory, begin)
            steps = iterate(run, program=assembly.program, draw=assembly.draw, ahead=earlier.rollout.ahead, donate=True)
            run = next(after for after, _, _ in steps if after.step == until)
    ground(step)
    with assemble(settings, kernels=watched.kernels) as assembly:
        run = run or restored(assembly, directory, begin)
        trace = swap.trace(run, program=assembly.program, draw=assembly.draw, watched=watched, ahead=ahead)
    reference = _Reference(settings=settings, kernels=kernels, run=run, trace=trace)
    old = dict(recorded[step])
    new = replay.digests_of(trace.after, trace.experience, kind=replay.kind_recorded(old))
    new |= {replay.SIZES: replay.sizes_of(trace.after, trace.experience)}
    difference = replay.first_difference(step, old, new)
    if difference is None:
        return reference, "the run's own kernels: as recorded, bit for bit"
    text = f"the run's own kernels: not as recorded, {difference}; "
    return reference, text + "the comparison below is with what they give here"


def _compared(reference: _Reference, op: str, implementation: Implementation) -> dict[str, Any]:
    """Recompute the step with another implementation of one operation. Returns the differences by stage ("stages"), or
    why there are none ("reason")."""
    if (refusal := implementation.refuse()) is not None:
        return {"reason": f"cannot run here: {refusal}"}
    try:
        watched = swap.watch(attrs.evolve(reference.kernels, **{op: implementation.load()}))
        with assemble(reference.settings, kernels=watched.kernels) as assembly:
            step = swap.trace(
                reference.run,
                program=assembly.program,
                draw=assembly.draw,
                watched=watched,
                reference=reference.trace,
            )
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return {"reason": f"{RAISED} {type(error).__name__}: {first}"}
    return {"stages": [attrs.asdict(stage) for stage in swap.stage_differences(reference.trace, step)]}


def choice_text(choice: Mapping[str, Any]) -> str:
    """An implementation, and how its step differs from that of the run's own kernels, stage by stage, as text."""
    title = f"{choice['op']} = {choice['implementation']}{' (the run has it)' if choice['own'] else ''}"
    if choice["reason"] is not None:
        return f"{title}: {choice['reason']}"
    stages = [StageDifference(**stage) for stage in choice["stages"]]
    first = next((stage for stage in stages if stage.leaf is not None), None)
    if first is None:
        return f"{title}: bit-equal in every stage"
    width = max(len(stage.stage) for stage in stages)
    lines = [f"{title}: parts first in {first.stage}, leaf {first.leaf}"]
    lines += [f"  {'stage':<{width}}  {'max abs':>8}  {'relative':>8}  {'differ':>8}  first leaf to differ"]
    return "\n".join([*lines, *(f"  {stage.stage:<{width}}  {_difference_words(stage)}" for stage in stages)])


def _difference_words(stage: StageDifference) -> str:
    if stage.leaf is None:
        return "bit-equal"
    if stage.max_abs == float("inf"):
        return f"{'not comparable':>18}  {f'{stage.differing} of {stage.leaves}':>8}  {stage.leaf}"
    apart = f"{stage.max_abs:>8.1e}  {stage.relative:>8.1e}"
    return f"{apart}  {f'{stage.differing} of {stage.leaves}':>8}  {stage.leaf}"
