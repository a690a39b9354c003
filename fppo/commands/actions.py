"""The actions of the commands, after their arguments are parsed."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

import attrs
import torch
from huggingface_hub import HfApi
from transformers.utils import logging as transformers_logging

from fppo import quickstart as task
from fppo._errors import UsageError, printable
from fppo.assembly.pools import groups_of
from fppo.assembly.program import ROLLOUTS
from fppo.assembly.run import Assembly, assemble, assemble_evaluation
from fppo.assembly.supervised import COMMAND as SFT
from fppo.assembly.supervised import assemble_supervised
from fppo.commands import output, push
from fppo.commands.needs import lines_at_end
from fppo.commands.options import ServeOptions
from fppo.fleet import GroupDied, cluster
from fppo.fleet.clusters import OpenCluster
from fppo.pipeline import replay as replays
from fppo.pipeline.program import RunState
from fppo.pipeline.train import StepsOf
from fppo.quickstart import word_problems
from fppo.report import write as report
from fppo.report.card import Exported, Form, add_card
from fppo.report.diff import diff as compare_runs
from fppo.rewards.functions import Reward
from fppo.runs import bits, evaluations, jsonl, origins, sampling, saved, session, starts
from fppo.runs.loggers import METRICS
from fppo.runs.resuming import check_bases
from fppo.runtime import checkpoint
from fppo.runtime.gguf_files import gguf_of, read_header
from fppo.runtime.mesh import AXES, LOCAL, Mesh, is_first, ranks_on
from fppo.runtime.restarts import Restarts
from fppo.runtime.watch import Watch
from fppo.settings import files, places
from fppo.settings.modules import lacking_of_server, lacking_of_tinker
from fppo.settings.train import TrainSettings


@attrs.frozen
class CommandRank:
    """The process that runs a command: its mesh and its device (None: the one that settings name)."""

    mesh: Mesh = LOCAL
    device: torch.device | None = None
    watch: Watch | None = None  # counts the mesh's traffic
    sampling: Mesh | None = None  # the same ranks in process groups of their own, for sampling during training
    open_cluster: OpenCluster = cluster  # by the name in placement.cluster


ALONE = CommandRank()


def train(
    settings: TrainSettings, here: CommandRank = ALONE, *, rewards: Mapping[str, Reward] = MappingProxyType({})
) -> int:
    """Train, export the policy and write the report; returns 130 if stopped before the last step, else 0.

    `rewards` has, by name, reward functions that only this process has.
    """
    _check_directory(settings, here)
    directory, restarts = Path(settings.output_dir), Restarts(settings.placement.restarts)
    while True:
        try:
            _on_threads_of_run(settings, here)
            with _assemble(settings, here, announce=_say(here), rewards=rewards) as assembly:
                at_end = partial(_finish, assembly, directory, here)
                run = session.run_training(settings, assembly, here.watch, at_end=at_end)
                if is_first(here.mesh) and run.step == settings.steps:
                    records = jsonl.read(directory / METRICS, on_damage=lambda _: None)
                    for line in lines_at_end(settings, assembly.inputs, records, ranks_on(here.mesh, AXES)):
                        print(line)
            return 130 if run.step < settings.steps else 0
        except GroupDied as died:
            restarts.use(died)
            settings = attrs.evolve(settings, resume="auto")  # from now on checkpoints in output_dir are its own
            steps = checkpoint.steps(directory / session.CHECKPOINTS)
            since = f"the checkpoint of step {steps[-1]}" if steps else "the start"
            again = f"starting the pools again ({restarts}), from {since}"
            print(f"fppo: {printable(str(died))}; {again}", file=sys.stderr, flush=True)


def _check_directory(settings: TrainSettings, here: CommandRank) -> None:
    """Raise ValueError if output_dir is no place for the files of a run, or if another process is writing there. A run
    that has gone on elsewhere is fetched."""
    session.check_output(settings)
    session.check_target(settings, Path(settings.output_dir) / session.MODEL)
    if is_first(here.mesh):
        session.check_alone(settings)
    session.fetch(settings, here.mesh, here.device or torch.device("cpu"))


def _finish(assembly: session.AnyAssembly, directory: Path, here: CommandRank, run: RunState) -> None:
    """Export the policy of a run's last step and write the report."""
    target = directory / session.MODEL
    try:
        session.export(assembly, run, target)
    except Exception as error:
        error.add_note(f"step {run.step} is in its checkpoint; to write the model: fppo export {directory} TARGET")
        raise
    if is_first(here.mesh):
        page = report.write_report(directory)
        print(f"model: {target}\nreport: {page}")


def _on_threads_of_run(settings: TrainSettings, here: CommandRank) -> None:
    """Compute with as many threads as the resumed run did, since bits depend on it; but not if OMP_NUM_THREADS is
    set."""
    if not os.environ.get("OMP_NUM_THREADS") and (said := bits.take_threads(session.resumed_ground(settings))):
        _say(here)([f"{said}; OMP_NUM_THREADS sets another"])


def sft(settings: TrainSettings, here: CommandRank = ALONE) -> int:
    """Imitate demonstrations, export the policy and write the report; returns 130 if stopped before the last step, else
    0."""
    _check_directory(settings, here)
    transformers_logging.disable_progress_bar()
    _on_threads_of_run(settings, here)
    settings, assembly = assemble_supervised(settings, mesh=here.mesh, device=here.device, announce=_say(here))
    at_end = partial(_finish, assembly, Path(settings.output_dir), here)
    run = session.run_training(settings, assembly, here.watch, at_end=at_end)
    return 130 if run.step < settings.steps else 0


def quickstart(directory: Path, seed: int, run: Callable[[TrainSettings], int] = train) -> int:
    """Warm a small model up on flawed demonstrations, then train it by PPO; a stopped run resumes.

    `run` trains with given settings, in this process or in others, and returns an exit status. Raises UsageError if the
    directory holds other files.
    """
    _check_quickstart(directory, task.settings(directory, seed))
    if not (directory / task.MODEL).exists():
        _make_quickstart(directory, (task.MODEL, task.TRAIN, task.TEST))  # an error here costs no warm-up
        print("warming up on demonstrations that forget the carry more often than not")
        task.prepare(directory, seed, on_step=lambda step, loss: print(f"  warm-up step {step}  loss {loss:.3f}"))
    status = run(task.settings(directory, seed))
    if status == 0:
        before, after = report.held_out_change(directory)
        print(f"held-out exact match: {before:.1%} before PPO, {after:.1%} after")
    return status


def smol_quickstart(directory: Path, seed: int, run: Callable[[TrainSettings], int] = train) -> int:
    """Train SmolLM2-135M-Instruct on word problems by GRPO; a stopped run resumes.

    `run` trains with given settings, in this process or in others, and returns an exit status. Raises UsageError if the
    directory holds other files, and if the model or the reader of its file is not installed.
    """
    settings = word_problems.settings(directory, seed)
    _check_quickstart(directory, settings)
    try:
        file = gguf_of(settings.model.path)
        if file is not None:  # a directory of this name may stand there
            read_header(file)
    except ValueError as error:
        raise UsageError(f"--model smol: {error}") from error
    _make_quickstart(directory, (word_problems.TRAIN, word_problems.TEST))
    word_problems.prepare(directory)
    print(word_problems.cost(directory), flush=True)
    status = run(settings)
    if status == 0:
        before, after = report.held_out_change(directory)
        print(f"held-out word problems with the right number at the end: {before:.1%} before GRPO, {after:.1%} after")
    return status


def _check_quickstart(directory: Path, settings: TrainSettings) -> None:
    """Raise UsageError for a directory that holds the other quickstart's run."""
    file = directory / files.SETTINGS
    smol = word_problems.SMOL
    if file.exists() and (files.load(file).model.path == smol) != (settings.model.path == smol):
        raise UsageError(f"--output-dir {directory} holds the quickstart of the other model; give another directory")


def _make_quickstart(directory: Path, own: Sequence[str]) -> None:
    """Make the directory of a quickstart. Raises UsageError if it cannot be made, and if it exists and holds files that
    belong neither to a run nor to the quickstart, whose own inputs have the names in `own`."""
    if others := places.foreign_files(directory, inputs=[directory / name for name in own]):
        raise UsageError(f"--output-dir {directory} holds {places.some(others)} and no run; give a new directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"{(error.strerror or str(error)).lower()}; give a directory that can be made"
        raise UsageError(f"--output-dir {printable(str(directory))}: {text}") from error


def evaluate(settings: TrainSettings, here: CommandRank = ALONE, *, json: str | None = None) -> int:
    """Evaluate a checkpoint of the run in output_dir, the newest or that of `resume`, on held-out prompts.

    Prints a table, as `output.shown` does; all metrics and responses are written to files in output_dir, named on
    standard error. Returns the exit status, 0. Raises ValueError without a checkpoint.
    """
    with output.shown(json) as show:
        return _evaluate(settings, here, show)


def _evaluate(settings: TrainSettings, here: CommandRank, show: output.Show) -> int:
    session.check_output(settings)
    checkpoints = Path(settings.output_dir) / session.CHECKPOINTS
    path = Path(settings.resume)
    session.say_misnamed(checkpoints, here.mesh)
    if settings.resume in files.RESUMES:
        step = saved.newest(checkpoints.parent)
        if step is None:
            raise UsageError(f"there is no checkpoint in {checkpoints}; give the output_dir of a run with one")
        path = checkpoint.place_of(checkpoints, step)
    transformers_logging.disable_progress_bar()
    with assemble_evaluation(saved.bare(settings), mesh=here.mesh, device=here.device) as evaluator:
        check_bases(evaluator.bases, path)
        run = saved.policy(evaluator.model, path, mesh=here.mesh, device=evaluator.device)
        place = evaluations.new_place(Path(settings.output_dir), run.step)
        report = evaluations.kept(evaluator.evaluate, lambda step: place, evaluator.tokenizer, here.mesh)(run)
        if is_first(here.mesh):
            numbers = place.with_suffix(".json")
            metrics = evaluations.write_numbers(report, numbers)
            record = {"step": run.step, "responses": str(place), "metrics": metrics}
            show("\n".join([f"step {run.step}", *evaluations.table(report)]), record)
            print(f"responses: {place}\nall metrics: {numbers}", file=sys.stderr)
    return 0


def rollout(settings: TrainSettings, here: CommandRank = ALONE) -> int:
    """Sample and score without training, and write the rollouts; returns 130 if stopped before the last batch, else
    0."""
    if settings.rollout.from_ is not None or settings.rollout.save:
        raise UsageError("rollout.from and rollout.save are for training; fppo rollout always samples and saves")
    session.check_output(settings)
    with _assemble(settings, here, announce=_say(here)) as assembly:
        done = sampling.run_sampling(settings, assembly)
    if is_first(here.mesh):
        directory = Path(settings.output_dir) / ROLLOUTS
        print(f"to train on them: fppo train FILE.toml --rollout.from {directory} --steps {done}")
    return 0 if done == settings.steps else 130


def settings_of(directory: Path, step: int | None = None) -> TrainSettings:
    """Load the settings that made a step of the run in a directory (`step` None: the run's last settings), changed so
    that recomputing the step saves no rollouts.

    Raises ValueError if the directory holds no settings.
    """
    return files.replace(starts.load(directory, step), {"rollout.save": False})


def beginning(directory: Path, step: int) -> int:
    """The step from which `step` of a run can be recomputed: that of the newest checkpoint before it, or 0.

    Raises ValueError if the run began from another run's checkpoint that is gone, and for steps with interrupted
    rollouts, whose batches cannot be recomputed.
    """
    at = saved.newest(directory, step - 1)
    if at is None and (first := starts.first(directory)):
        raise UsageError(
            f"{directory} began from the checkpoint of step {first}, and has none before step {step} any more "
            f"(checkpoint.keep); there are those of {checkpoint.steps(directory / session.CHECKPOINTS)}"
        )
    if any(settings.rollout.interrupt for settings, _ in starts.spans(directory, (at or 0) + 1, step)):
        raise UsageError(
            f"{directory}: with rollout.interrupt the clock decided which weights sampled its batches; to train on "
            f"them again, give --rollout.from {directory / ROLLOUTS} --rollout.ahead 0 --rollout.interrupt 0 "
            "--rollout.save false to fppo train (a run with rollout.save has them)"
        )
    return at or 0


def restored(assembly: session.AnyAssembly, directory: Path, step: int) -> RunState:
    """Load the state of a run from its newest checkpoint at or before `step`; without one, the initial state."""
    at = saved.newest(directory, step)
    return assembly.run if at is None else session.load(assembly, directory / session.CHECKPOINTS, at)


def export(
    directory: Path,
    target: Path,
    step: int | None,
    role: saved.Role = "actor",
    device: str = "cpu",
    *,
    merge: bool = False,
    push_to: str | None = None,
    public: bool = False,
) -> int:
    """Write the policy, or the critic, of a run's checkpoint as a Hugging Face directory with a model card; an adapter
    in PEFT's files or, with `merge`, merged into its base. Notes on a quantised base go to stderr.

    With `push_to` the directory is uploaded to the hub under that name, private unless `public`. Returns 0.
    """
    settings, hub = attrs.evolve(settings_of(directory), device=device), HfApi()
    if push_to is not None:
        push.check(push_to, hub, public=public)
    session.say_misnamed(directory / session.CHECKPOINTS)
    at = saved.newest(directory, step)
    if at is None or (step is not None and at != step):
        steps = checkpoint.steps(directory / session.CHECKPOINTS)
        raise UsageError(f"{directory} holds no checkpoint of step {step}; there are those of {steps}")
    session.check_target(settings, target)
    made = starts.load(directory, at)
    transformers_logging.disable_progress_bar()
    saved.export(settings, target, at, role, merge=merge)
    adapted = settings.model.lora.used if role == "actor" else settings.model.lora.of_critic
    form: Form = "merged" if merge else "adapter" if adapted else "whole"
    name = push_to or Path(os.path.realpath(target)).name
    add_card(Exported(run_dir=directory, settings=made, step=at, role=role, form=form, name=name), target)
    if (base := settings.model.lora.base) != "float":
        begun = settings.model.path if role == "actor" else settings.model.critic_path or settings.model.path
        means = (
            f"the weights are those of {begun} rounded to {base}, on which the adapter was trained, with the adapter "
            "added in float32; quantised again they are rounded again"
            if merge
            else f"the adapter was trained on {begun} in {base}: load it onto that, quantised by bitsandbytes, or give "
            "--merge; on the unquantised weights it is another policy"
        )
        print(f"model.lora.base = {base!r}: {means}", file=sys.stderr)
    print(target)
    if push_to is not None:
        print(push.push(target, push_to, hub, public=public))
    return 0


def replay(directory: Path, step: int, here: CommandRank = ALONE) -> int:
    """Recompute the steps from the nearest checkpoint to `step`; returns 1 if a number differs from the record, else 0.

    Each step is computed with the settings and the number of threads that made it. On another mesh than the run's, bits
    differ. Differences of the size of rounding in columns that only metrics read are printed, but do not count.
    """
    recorded = session.recorded(directory)
    say = print if is_first(here.mesh) else _nothing
    run = None
    session.say_misnamed(directory / session.CHECKPOINTS, here.mesh)
    begin = beginning(directory, step)
    say(f"from {f'the checkpoint of step {begin}' if begin else 'the start'}")
    for settings, until in starts.spans(directory, begin + 1, step):
        for line in match_ground(directory, until):
            say(line)
        with _steps_again(settings, starts.made_by(directory), here) as (assembly, steps_of):
            steps = replays.replay(
                run or restored(assembly, directory, begin),
                begin=steps_of,
                recorded=recorded,
                until=until,
                mesh=here.mesh,
                shapes=assembly.shapes,
                device=assembly.device,
                of_state=session.of_state(assembly),
            )
            for run, difference in steps:
                if difference is None:
                    equal = "equal, bit for bit" if run.step in recorded else "no digests were recorded"
                    say(f"step {run.step}: {equal}")
                elif difference.is_of_metrics(settings.model.compute_dtype):
                    alone = "a rounding that metrics alone read, for the state after the step is equal, bit for bit"
                    say(f"step {run.step}: {difference}: {alone}")
                else:
                    say(f"step {run.step}: {difference}")
                    return 1
    return 0


def match_ground(directory: Path, step: int, *, threads: bool = True) -> list[str]:
    """Set the number of threads to that of the process that made a step of a run, unless `threads` is False. Returns
    lines on the remaining differences between the two processes on which bits depend."""
    origin = origins.load(directory, step)
    recorded = {} if origin is None else origin.ground
    taken = bits.take_threads(recorded) if threads else None
    others = bits.unlike(recorded, bits.ground())
    lines = [] if taken is None else [taken]
    if not recorded:
        lines.append("the run did not record its threads, processor and builds: if these were others, bits differ")
    if others:
        lines.append(f"bits may differ, for these are others than the run's: {'; '.join(others)}")
    return [printable(line) for line in lines]


def serve(options: ServeOptions, environment: Mapping[str, str]) -> int:
    """Serve a policy until ctrl-C; returns its exit status. Raises UsageError if the packages for it are missing."""
    if lacking := lacking_of_server():
        raise UsageError(lacking)
    if options.tinker:
        if lacking := lacking_of_tinker():
            raise UsageError(lacking)
        from fppo.commands import serve_tinker  # here: other commands do without

        return serve_tinker.serve(options, environment)
    from fppo.commands import serve as command  # here likewise

    return command.serve(options, environment)


@contextlib.contextmanager
def _steps_again(
    settings: TrainSettings, made_by: str | None, here: CommandRank
) -> Iterator[tuple[session.AnyAssembly, Callable[[RunState], StepsOf]]]:
    """Assemble a run anew by the command that made it (`made_by`). Yields the assembly, and a function that iterates
    over the steps from a state; each step reuses the memory of the state before it."""
    if made_by == SFT:
        _, supervised = assemble_supervised(settings, mesh=here.mesh, device=here.device)
        yield supervised, partial(supervised.steps, donate=True)
        return
    with _assemble(files.replace(settings, {"rollout.save": False}), here) as assembly:
        yield assembly, partial(assembly.steps, donate=True)


def diff(first: Path, second: Path, json: str | None = None) -> int:
    """Print the first difference of two runs, as `output.shown` does; returns 1 if they differ, else 0."""
    with output.shown(json) as show:
        found = compare_runs(first, second)
        show("\n".join(printable(line) for line in found.lines), attrs.asdict(found))
    return int(found.differs)


@contextlib.contextmanager
def _assemble(
    settings: TrainSettings,
    here: CommandRank,
    announce: Callable[[Sequence[str]], None] = lambda lines: None,
    rewards: Mapping[str, Reward] = MappingProxyType({}),
) -> Iterator[Assembly]:
    """Assemble a run without transformers' progress bars; packages of untested versions are named on stderr."""
    transformers_logging.disable_progress_bar()
    if is_first(here.mesh) and (lines := origins.untested_here()):
        print("; ".join(lines), file=sys.stderr)
    placed = settings.placement, settings.mesh, settings.device
    with (
        groups_of(
            *placed,
            settings.model_roles,
            modules=settings.model.import_,
            module_dirs=settings.module_dirs,
            open_cluster=here.open_cluster,
        ) as places,
        assemble(
            settings,
            mesh=here.mesh,
            sampling_mesh=here.sampling,
            device=here.device,
            places=places,
            announce=announce,
            rewards=rewards,
        ) as assembly,
    ):
        yield assembly


def _say(here: CommandRank) -> Callable[[Sequence[str]], None]:
    """A function that prints lines if this is the first rank, and does nothing on others."""
    return (
        (lambda lines: print(printable("\n".join(lines), lines=True), flush=True)) if is_first(here.mesh) else _nothing
    )


def _nothing(*_: object) -> None:
    pass
