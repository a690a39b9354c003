"""Train a run on disk: write its directory, and resume it after a stop."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from types import FrameType

import torch

from fppo import models, tree
from fppo.assembly.adapters import export_policy, exported_bytes
from fppo.assembly.machine import resolved
from fppo.assembly.placed import AHEAD
from fppo.assembly.program import ROLLOUTS
from fppo.assembly.run import Assembly
from fppo.assembly.supervised import SupervisedAssembly
from fppo.fields import only
from fppo.pipeline import replay
from fppo.pipeline.program import RunState
from fppo.pipeline.train import Evaluation, Observe, StepRecord, Watching
from fppo.runs import copies as copying
from fppo.runs import evaluations, jsonl, loggers, memory, origins, starts
from fppo.runs.alarms import Alarms
from fppo.runs.copies import Copies
from fppo.runs.first_step import FirstStep
from fppo.runs.jsonl import JsonLines
from fppo.runs.observers import TRACE, OwnObserver, Profiles, Tracer, gauged_by, traffic_since
from fppo.runs.resuming import check_bases, check_prompts, say_rates, with_saved_clocks
from fppo.runs.sample_files import SAMPLES, SampleFiles
from fppo.runs.starts import CHECKPOINTS, SETTINGS
from fppo.runs.writer import Checkpoints, Digests
from fppo.runtime import checkpoint, digests
from fppo.runtime.checkpoint import UnlikeError
from fppo.runtime.mesh import AXES, LOCAL, Mesh, is_first, place_on, ranks_on
from fppo.runtime.remote import Remote
from fppo.runtime.watch import Watch
from fppo.settings import files, places
from fppo.settings.train import LogSettings, TrainSettings
from fppo.steps.train_state import OPTIONAL

AnyAssembly = Assembly | SupervisedAssembly
MODEL, CONFIGS = places.MODEL, "configs"
STOPPING = "finishing this step; ctrl-C again abandons it, and all since the last checkpoint"


def check_output(settings: TrainSettings) -> None:
    """Raise ValueError if output_dir cannot be a directory to write to. It is not created."""
    for text in places.output_problems(settings):
        raise ValueError(text)


def check_target(settings: TrainSettings, target: Path) -> None:
    """Raise ValueError if an export to `target` would replace anything but an export, or files that the run reads."""
    if (text := places.target_problem(settings, target)) is not None:
        raise ValueError(text)


@contextlib.contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Lock an existing directory for this run. Raises ValueError if another process holds the lock.

    The kernel releases the lock when the process ends; a file system without locks protects nothing.
    """
    place = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(place)
        raise ValueError(
            f"output_dir: another process is writing to {directory}; wait for it, end it, or give another directory"
        ) from None
    except OSError:
        pass
    try:
        yield
    finally:
        os.close(place)


def check_alone(settings: TrainSettings) -> None:
    """Raise ValueError if another process is writing to output_dir, before anything is loaded."""
    directory = Path(settings.output_dir)
    if directory.is_dir():
        with alone_in(directory):
            pass


def fetch(settings: TrainSettings, mesh: Mesh, device: torch.device) -> None:
    """Fetch the run from checkpoint.remote, if it is set and output_dir has no checkpoint, by `copies.fetch_newest`.
    Every rank of the mesh calls."""
    if settings.checkpoint.remote is None:
        return
    directory, remote = Path(settings.output_dir), Remote.at(settings.checkpoint.remote)
    directory.mkdir(parents=True, exist_ok=True)

    def work() -> None:
        if is_first(mesh):
            with alone_in(directory):
                copying.fetch_newest(directory, remote, resume=settings.resume)

    copying.meanwhile(work, mesh, device)


def say_misnamed(checkpoints: Path, mesh: Mesh = LOCAL) -> None:
    """Print, on the first rank, the checkpoints whose names do not match their steps."""
    for text in checkpoint.misnamed(checkpoints) if is_first(mesh) else []:
        print(text, file=sys.stderr)


def restore(settings: TrainSettings, assembly: AnyAssembly) -> RunState:
    """The state to train from: the run's newest checkpoint, the checkpoint that `resume` names, or the initial state.
    The result takes over the memory of the assembly's state, which is donated: a device cannot hold two.

    Raises ValueError if training from it would mix this run with another one, or delete the run's record.
    """
    directory, resume = Path(settings.output_dir), settings.resume
    say_misnamed(directory / CHECKPOINTS, assembly.mesh)
    own, asked = checkpoint.steps(directory / CHECKPOINTS), _named(settings)
    if not own:
        if resume == "auto":
            _check_beginning(directory)
        return _loaded(settings, assembly, asked, donate=True)
    newest = checkpoint.place_of(directory / CHECKPOINTS, own[-1])
    if (
        asked is not None
        and os.path.realpath(asked) != os.path.realpath(newest)
        and starts.source(directory) != os.path.abspath(asked)
    ):
        raise ValueError(
            f"resume = {resume!r}, but {directory / CHECKPOINTS} holds the checkpoint of step {own[-1]} already: give "
            f"another output_dir to start from {asked.name}, or leave resume out to go on from step {own[-1]}"
        )
    return _loaded(settings, assembly, newest, donate=True)


def resumed_ground(settings: TrainSettings) -> Mapping[str, str]:
    """The `bits.ground` that was recorded for the run that `restore` would resume; {} if there is none."""
    directory = Path(settings.output_dir)
    own = checkpoint.steps(directory / CHECKPOINTS)
    if not own and settings.resume not in files.RESUMES:
        place = Path(settings.resume)
        with contextlib.suppress(ValueError):  # `restore` reports it
            directory, own = place.parent.parent, [checkpoint.step_of(place)]
    origin = origins.load(directory, own[-1]) if own else None
    return {} if origin is None else origin.ground


def at(settings: TrainSettings, assembly: AnyAssembly) -> RunState:
    """The state that `settings.resume` names: that of a given checkpoint, of the run's newest one, or the initial
    one."""
    return _loaded(settings, assembly, _named(settings))


def _loaded(settings: TrainSettings, assembly: AnyAssembly, path: Path | None, *, donate: bool = False) -> RunState:
    """The state of the checkpoint at `path`, or the initial state for None. Raises ValueError for a checkpoint of
    another seed, and UnlikeError, with the settings that have changed, for one of another model or other settings."""
    if path is None:
        return assembly.run
    try:
        run = load(assembly, path.parent, checkpoint.step_of(path), donate=donate)
    except UnlikeError as error:
        before = starts.before(settings)
        if before is None or not (changes := files.changes(files.to_dict(before), settings)):
            raise
        remedy = "give the earlier values, or another output_dir to start anew"
        told = f"{files.shown(changes)}: the checkpoint does not fit; {remedy}"
        raise UnlikeError(f"{told}: {error}") from error
    if run.key != assembly.run.key:
        raise ValueError(
            f"seed = {settings.seed}, but the checkpoint in {path.parent} is of a run with another seed: "
            "give that seed to go on with it, or another output_dir to start anew"
        )
    return run


def load(assembly: AnyAssembly, directory: Path, step: int, *, donate: bool = False) -> RunState:
    """The state of a checkpoint, laid out on the run's mesh; with `donate` in the memory of the assembly's state."""
    run, mesh, shapes, device = assembly.run, assembly.mesh, assembly.shapes, assembly.device
    check_bases(run.bases, checkpoint.place_of(directory, step))
    check_prompts(assembly.drawn, checkpoint.place_of(directory, step), speaks=is_first(mesh))
    run = with_saved_clocks(run, directory, step)
    if assembly.placed is not None:
        return assembly.placed.load(run, directory, step, device=device)
    how = {"mesh": mesh, "shapes": shapes, "free": AHEAD, "device": device, "donate": donate}
    return checkpoint.load(run, directory, step, optional=OPTIONAL, **how)


def _named(settings: TrainSettings) -> Path | None:
    """The checkpoint that `settings.resume` names, or None. Raises ValueError if "never" or "must" is violated."""
    directory, resume = Path(settings.output_dir) / CHECKPOINTS, settings.resume
    own = checkpoint.steps(directory)
    if resume == "never" and own:
        raise ValueError(
            f"resume = 'never', but {directory} holds the checkpoint of step {own[-1]}: "
            "give another output_dir, or resume = 'auto' to go on from there"
        )
    if resume == "must" and not own:
        raise ValueError(f"resume = 'must', but there is no checkpoint in {directory}")
    if resume in files.RESUMES:
        return checkpoint.place_of(directory, own[-1]) if own else None
    checkpoint.step_of(Path(resume))
    return Path(resume)


def _check_beginning(directory: Path) -> None:
    """Raise ValueError if the directory holds the record of a run that has ended, or should have written checkpoints,
    but no checkpoint: a new start would delete the record."""
    last, every = max(recorded(directory), default=0), starts.last(directory).get("checkpoint.every", 0)
    if last and ((directory / MODEL).exists() or 0 < 2 * every < last):
        raise ValueError(
            f"{directory} holds the record of {last} steps, but no checkpoint to go on from: give another output_dir, "
            "or resume = 'never' to begin anew and delete the record"
        )


@contextlib.contextmanager
def stop_requests(*, announce: str = "") -> Iterator[list[float]]:
    """A context with a list that is non-empty once ctrl-C or SIGTERM has requested a stop; the first prints `announce`.

    A second request interrupts at once. Signals within a second count as one request: a terminal and a launcher may
    both send it.
    """
    requests: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        del number, frame
        if requests and time.monotonic() - requests[0] > 1.0:
            raise KeyboardInterrupt
        if not requests and announce:
            print(f"\n{announce}", file=sys.stderr, flush=True)
        requests.append(time.monotonic())

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requests
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def run_training(
    settings: TrainSettings,
    assembly: AnyAssembly,
    watch: Watch | None = None,
    *,
    at_end: Callable[[RunState], None] = lambda run: None,
) -> RunState:
    """Train from the run's current step to its last one, or until a stop is requested, and write its files.

    On a mesh every rank must call; the first one logs. `watch` counts the mesh's traffic. `at_end` gets the state after
    the last step. It is called before the loggers are closed, since closing them may take long or fail. A run that has
    ended before takes no step and logs nothing; `at_end` is called unless the run has gone past `settings.steps`.
    """
    settings, _ = resolved(settings, assembly.inputs.device)
    directory, first = Path(settings.output_dir), is_first(assembly.mesh)
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as opened:
        copies = None
        if first:
            opened.enter_context(alone_in(directory))  # before its checkpoints are read
            copies = _copies(settings, opened)
        run = restore(settings, assembly)
        if settings.rollout.save and (directory / ROLLOUTS / SETTINGS).exists():
            text = f"{directory / ROLLOUTS} holds files of fppo rollout; give another output_dir, or remove it"
            raise ValueError(f"rollout.save = True: {text}")
        if run.step < settings.steps:
            if first:
                _check_room(directory, assembly, run)
            observers, digested, saved = _writing(settings, assembly, run, opened, watch, copies)
            with stop_requests(announce=STOPPING if first else "") as asked, _left_on_errors(saved, watch):
                watching = _watching(settings, assembly, observers, stop=lambda: bool(asked))
                for after, _, _ in assembly.steps(run, donate=True, watching=watching):
                    run = after
                digested.end()
                saved.end(run)
        elif first and run.step > settings.steps:
            print(f"steps = {settings.steps}: step {run.step} is done, and nothing is changed", file=sys.stderr)
        if run.step == settings.steps:
            at_end(run)
        if settings.checkpoint.remote is not None:
            copying.meanwhile(_nothing if copies is None else copies.finish, assembly.mesh, assembly.device)
    if first and run.step < settings.steps:
        command = "sft" if isinstance(assembly, SupervisedAssembly) else "train"
        print(f"stopped after step {run.step}; to go on: fppo {command} {directory / SETTINGS}", file=sys.stderr)
    return run


def _copies(settings: TrainSettings, opened: contextlib.ExitStack) -> Copies | None:
    """The writer of the run's remote copies, closed with `opened`; None without an address."""
    section = settings.checkpoint
    if section.remote is None:
        return None
    return opened.enter_context(Copies(Path(settings.output_dir), Remote.at(section.remote), section.keep))


def _check_room(directory: Path, assembly: AnyAssembly, run: RunState) -> None:
    """Raise ValueError if the disk has no room for the checkpoint and the model of the last step, beside what is
    there."""
    state = tree.tensors([run.actor, run.critic, [] if assembly.placed is None else assembly.placed.like(run)])
    narrowest = min((x.itemsize for x in state if x.is_floating_point()), default=0)
    written = sum(x.nbytes for x in state)  # at least, if a mesh cuts it
    needed, free = written + exported_bytes(assembly.model, narrowest), places.free_bytes(directory)
    if needed > free:
        raise ValueError(
            f"output_dir: the run ends with a checkpoint and a model of {needed / 1e6:,.1f} MB, and the disk of "
            f"{directory} has {free / 1e6:,.1f} MB left; free space, or give a directory on another disk"
        )


@contextlib.contextmanager
def _left_on_errors(saved: Checkpoints, watch: Watch | None) -> Iterator[None]:
    """On an error, wait for checkpoints that are being written, unless the other ranks are gone."""
    try:
        yield
    except (Exception, SystemExit):
        saved.leave(alone=watch is not None and watch.error is not None)
        raise


def _watching(
    settings: TrainSettings, assembly: AnyAssembly, observers: Sequence[Observe], stop: Callable[[], bool]
) -> Watching:
    """The observers, evaluations and end of a run's steps."""
    if not isinstance(assembly, SupervisedAssembly):
        evaluation = evaluations.in_training(settings, assembly)
    else:
        when = only(settings.eval, "every", "before")
        evaluation = None if assembly.evaluate is None else Evaluation(assembly.evaluate, **when)
    return Watching(steps=settings.steps, observers=observers, evaluation=evaluation, stop=stop)


def _writing(
    settings: TrainSettings,
    assembly: AnyAssembly,
    run: RunState,
    opened: contextlib.ExitStack,
    watch: Watch | None,
    copies: Copies | None,
) -> tuple[list[Observe], Digests, Checkpoints]:
    """The observers of a run that starts from `run`, the writer of digests and the writer of checkpoints; all are
    closed with `opened`. A checkpoint is written after the lines of its step in every file."""
    directory, mesh, shapes = Path(settings.output_dir), assembly.mesh, assembly.shapes
    first_step, first = run.step + 1 if run.step else 0, is_first(mesh)
    device, every = assembly.device, digest_spacing(settings, assembly, run)
    keep = settings.checkpoint.keep if settings.checkpoint.remote is None else None  # else `copies` removes old ones
    logged, sampled, lines, own = list[Observe](), list[SampleFiles](), None, list[OwnObserver]()

    def begin(run: RunState) -> checkpoint.Pending:
        for each in sampled:
            each.wait()
        return _begin_save(assembly, directory / CHECKPOINTS, keep, run)

    if run.step and not checkpoint.steps(directory / CHECKPOINTS):  # another run's state: save it as this run's first
        begin(run).wait()
    if first:
        before = starts.before(settings)
        _record_start(settings, assembly, run.step, every)
        say_rates(before, settings, run, supervised=isinstance(assembly, SupervisedAssembly))
        sampled = [] if isinstance(assembly, SupervisedAssembly) else [_sample_files(settings, assembly, first_step)]
        for each in sampled:
            opened.callback(each.close)
        logged = [FirstStep(settings), _logging(settings, assembly, first_step, opened)]
        own = [OwnObserver(name, fn) for name, fn in assembly.inputs.observers.items()]
        opened.callback(_close_each, own)
        lines = opened.enter_context(_closing(directory / replay.DIGESTS, first_step))

    kept = partial(_is_kept, settings.checkpoint.every, settings.steps)
    kind = None if assembly.placed is None else assembly.placed.kind
    line = partial(replay.record_line, mesh=mesh, shapes=shapes, device=device, kind=kind, of_state=of_state(assembly))
    digested = Digests(directory=directory, lines=lines, every=every, is_saved=kept, line=line)
    written = _nothing if copies is None else copies.written
    saved = Checkpoints(is_saved=kept, begin=begin, ranks=ranks_on(mesh, AXES), written=written)

    profiles = _profiles(settings.log, directory, assembly)
    opened.callback(profiles.stop)
    profiles.begin(run.step + 1)

    traced = Tracer(directory / TRACE / f"rank_{place_on(mesh, AXES):05d}.jsonl", assembly.calls, first_step=first_step)
    opened.callback(traced.close)

    def end(record: StepRecord) -> Mapping[str, float]:
        for log in (*logged, traced):
            log(record)
        return {**saved(record), **({} if copies is None else copies.numbers())}

    gauged = gauged_by(mesh, device, traffic_since(watch, run.step))
    return [digested, gauged, *own, *sampled, profiles, end], digested, saved


def _nothing(*_: object) -> None:
    pass


def _profiles(log: LogSettings, directory: Path, assembly: AnyAssembly) -> Profiles:
    """The observer that profiles steps. Raises ValueError for a device whose memory cannot be traced."""
    if log.memory_steps:
        memory.check_device(assembly.device)
    both = [each for each in (assembly.model, assembly.critic_model) if each is not None]
    frozen = [each.frozen.params for each in both if each.frozen is not None]
    how = {"steps": log.profile_steps, "memory_steps": log.memory_steps, "frozen": frozen}
    return Profiles(directory=directory, mesh=assembly.mesh, device=assembly.device, **how)


def _is_kept(every: int, last: int, step: int) -> bool:
    """Whether the state after `step` is saved: every `every` steps (0: never), and after the `last` step."""
    return step == last or (every > 0 and step % every == 0)


def _close_each(observers: Sequence[OwnObserver]) -> None:
    for observer in observers:
        observer.close()


def digest_spacing(settings: TrainSettings, assembly: AnyAssembly, run: RunState) -> int:
    """The number of steps from one digested step to the next; 0 if only steps with a checkpoint are digested."""
    if settings.digest.every != "auto":
        return settings.digest.every
    if isinstance(assembly, SupervisedAssembly):
        lengths = [len(row.prompt) + len(row.response) for row in assembly.inputs.demonstrations.rows]
        tokens = settings.sft.batch_size * fmean(lengths)
    else:  # responses that are half as long as they may be
        rollout, given = settings.rollout, assembly.inputs.prompts.tokens
        prompt = settings.data.max_prompt_tokens / 2 if rollout.environment.used else fmean(map(len, given))
        tokens = rollout.batch_size * (prompt + rollout.max_tokens / 2)
    return digests.spacing(
        run if assembly.placed is None else [run, assembly.placed.like(run)],
        tokens=round(tokens),
        numbers=sum(shape.numel() for shape in assembly.model.whole_shapes.values()),
        device=assembly.device,
        mesh=assembly.mesh,
        shapes=assembly.shapes,
    )


def _begin_save(assembly: AnyAssembly, directory: Path, keep: int | None, run: RunState) -> checkpoint.Pending:
    if assembly.placed is not None:
        return assembly.placed.save(run, directory, keep=keep, notes=assembly.drawn.notes())
    mesh, shapes, notes = assembly.mesh, assembly.shapes, assembly.drawn.notes()
    return checkpoint.begin_save(run, directory, run.step, mesh=mesh, shapes=shapes, free=AHEAD, keep=keep, notes=notes)


def of_state(assembly: AnyAssembly) -> replay.OfState | None:
    """The digest function of a state held by other processes; None for a state in this process."""
    placed, device = assembly.placed, assembly.device
    return None if placed is None else lambda run, kind: placed.digest(run, kind, device=device)


@contextlib.contextmanager
def _closing(path: Path, first_step: int) -> Iterator[JsonLines]:
    lines = JsonLines(path, first_step=first_step)
    try:
        yield lines
    finally:
        loggers.close([lines])


def _sample_files(settings: TrainSettings, assembly: Assembly, first_step: int) -> SampleFiles:
    """The observer that writes sampled rows."""
    log, directory = settings.log, Path(settings.output_dir) / SAMPLES
    count = None if log.samples == "all" else log.samples
    return SampleFiles(
        directory, assembly.inputs.tokenizer, count=count, most_bytes=1e9 * log.samples_gb, first_step=first_step
    )


def _logging(settings: TrainSettings, assembly: AnyAssembly, first_step: int, opened: contextlib.ExitStack) -> Observe:
    """The observer that logs metrics and alarms; closed with `opened`."""
    sinks = loggers.open_loggers(
        settings.log.loggers,
        Path(settings.output_dir),
        steps=settings.steps,
        first_step=first_step,
        project=settings.log.project,
        entity=settings.log.entity,
        group=settings.log.group,
        settings=files.to_dict(settings),
        own=assembly.inputs.loggers,
    )
    opened.callback(loggers.close, sinks)
    log = settings.log
    tables = loggers.Tables(rows=log.table_rows, every=log.table_every, tokenizer=assembly.inputs.tokenizer)
    earlier = jsonl.read(Path(settings.output_dir) / loggers.METRICS, on_damage=_nothing) if log.alarms else ()
    alarms = Alarms(line for line in earlier if line.get("step", 0) < first_step) if log.alarms else None
    return loggers.observer(sinks, tables, alarms)


def _record_start(settings: TrainSettings, assembly: AnyAssembly, step: int, digest_every: int) -> None:
    """Record the settings, code and configs of the steps after `step`, and print changes and missing lines."""
    directory = Path(settings.output_dir)
    if changes := starts.record(settings, step):
        print(f"going on from step {step} with other settings: {files.shown(changes)}", file=sys.stderr)
    if step:
        ranks = ranks_on(assembly.mesh, AXES)
        print(f"going on from step {step} on {'1 process' if ranks == 1 else f'{ranks} processes'}", file=sys.stderr)
    for news in origins.record(settings, step, assembly.inputs.own_rewards):
        print(f"going on from step {step} {news}", file=sys.stderr)
    texts = assembly.inputs.texts
    for role, model in (("actor", assembly.model), ("critic", assembly.critic_model)):
        if model is not None:
            generation, place = assembly.inputs.generation if role == "actor" else None, directory / CONFIGS / role
            models.save_config(model, place, tokenizer=texts, generation_config=generation)
    if digest_every != 1:
        which = f"every {digest_every} steps and at" if digest_every else "only at"
        print(f"digests of the state: {which} checkpoints (digest.every = {settings.digest.every!r})", file=sys.stderr)
    for name, every in {loggers.METRICS: 1, replay.DIGESTS: digest_every or settings.checkpoint.every}.items():
        for text in jsonl.gone(directory / name, starts.first(directory) + 1, step, every=every):
            print(text, file=sys.stderr)


def export(assembly: AnyAssembly, run: RunState, target: Path) -> None:
    """Write the policy as `export_policy` does."""
    texts, generation = assembly.inputs.texts, assembly.inputs.generation
    if assembly.placed is not None and "actor" in assembly.placed.parts:
        return assembly.placed.export(run, target, texts, generation)
    how = {"texts": texts, "generation": generation, "mesh": assembly.mesh}
    base = None if run.bases is None else run.bases["actor"].source
    export_policy(assembly.model, run.actor.params, target, base=base, **how)


def recorded(directory: Path) -> dict[int, dict]:
    """The lines of a run's digests by step, without damaged ones."""
    lines = jsonl.read(directory / replay.DIGESTS, on_damage=lambda _: None)
    return {line["step"]: line for line in lines if "step" in line}
