"""The command line: parse arguments, load settings, and call the commands' actions."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import attrs
import tyro

from fppo._errors import UsageError, did_you_mean
from fppo.commands import completion
from fppo.commands import help as helps
from fppo.commands.arguments import LaunchOptions, file_and_overrides
from fppo.commands.arguments import processes as processes_of
from fppo.commands.ends import TRACEBACK, status_of, status_of_exit
from fppo.commands.options import (
    AuditOptions,
    DiffOptions,
    Export,
    Quickstart,
    Replay,
    Report,
    ServeOptions,
    TraceOptions,
    ViewOptions,
)
from fppo.fields import Problem, flag_problems
from fppo.runtime.parent import end_with_launcher
from fppo.settings import ablate as settings_ablate
from fppo.settings import bias as settings_bias
from fppo.settings import checks, files, machine, modules, places
from fppo.settings import plan as settings_plan
from fppo.settings.ablate import AblateSettings
from fppo.settings.bias import BiasSettings
from fppo.settings.check import CheckSettings
from fppo.settings.checks_sft import sft_problems
from fppo.settings.compare import CompareSettings
from fppo.settings.component import parts
from fppo.settings.placement import MeshSettings
from fppo.settings.plan import PlanSettings
from fppo.settings.sft import is_read
from fppo.settings.train import TrainSettings

T = TypeVar("T")
EVAL_READS = ("data.eval_path", "data.eval_rows", "data.eval_split", "reward.functions", "rollout.batch_size")
PROCESSES = "[--nproc N [--max-restarts M]]"
LEAST = """[model]
path = "Qwen/Qwen2.5-0.5B-Instruct"   # a Hugging Face name or directory

[data]
path = ["train.jsonl"]                # rows as {"prompt": "1+2=", "answer": "3"}

[reward]
functions = ["exact_match"]           # or your own, as module:function
"""  # the least contents of a file of settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments (None: the process's) name, and return the exit status.

    Errors that a user can fix are one message without a traceback; `--traceback` shows it.
    """
    end_with_launcher()
    words = list(sys.argv[1:] if arguments is None else arguments)
    show = TRACEBACK in words
    words = [word for word in words if word != TRACEBACK]
    name, *rest = words or [""]
    needs_usage = not name or name in ("-h", "--help")
    if name in ("-V", "--version"):
        print(f"fppo {metadata.version('fppo')}")
        return 0
    if not needs_usage and name not in COMMANDS:
        print(f"fppo: unknown command {name!r}; {did_you_mean(name, COMMANDS)}", file=sys.stderr)
        return 2
    try:
        status = _print_usage(bool(name)) if needs_usage else COMMANDS[name](rest) or 0
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print(f"fppo {name}: interrupted", file=sys.stderr)
        return 130
    except SystemExit as error:
        return status_of_exit(error, name, show=show)
    except Exception as error:
        return status_of(error, name, show=show)


def _print_usage(wanted: bool) -> int:
    """Print the list of commands; returns 0 if help was `wanted`, 2 for a missing command."""
    print(usage())
    return 0 if wanted else 2


def usage() -> str:
    """The list of commands with one line on each."""
    lines = "\n".join(
        helps.listed((name, (command.__doc__ or "").splitlines()[0]) for name, command in COMMANDS.items())
    )
    return f"usage: fppo COMMAND ...\n\n{lines}\n\nfppo COMMAND --help shows a command's arguments."


def _options(cls: type[T], words: Sequence[str], command: str) -> T:
    """The options of a command. Raises SettingsError for values that are out of their bounds."""
    options = tyro.cli(cls, args=words, prog=f"fppo {command}")
    if wrong := flag_problems(options):
        raise files.SettingsError(wrong)
    return options


def _quickstart(rest: Sequence[str]) -> int | None:
    """Train a small model on an addition task, from nothing to a report, in two minutes [--model smol] [--nproc 2]"""
    if helps.wanted(rest):
        return helps.show(f"fppo quickstart {PROCESSES} [--OPTION VALUE ...]", Quickstart)
    processes, rest = processes_of(rest)
    options = _options(Quickstart, rest, "quickstart")
    from fppo.commands import actions, distributed  # here, as below: --help answers before torch is loaded

    def run(settings: TrainSettings) -> int:
        settings = attrs.evolve(settings, rollout=attrs.evolve(settings.rollout, exact=options.exact))
        file = Path(settings.output_dir) / "quickstart.toml"  # for other processes; the run itself writes settings.toml
        files.save(settings, file)
        return distributed.run(actions.train, settings, ["train", str(file)], *processes)

    directory = Path(options.output_dir or {"tiny": "runs/quickstart", "smol": "runs/smol"}[options.model])
    begin = actions.quickstart if options.model == "tiny" else actions.smol_quickstart
    return begin(directory, options.seed, run)


def _train(rest: Sequence[str]) -> int | None:
    """Train your own model: fppo train FILE.toml [--nproc 2] [--actor.optimizer.lr 1e-6 ...]"""
    usage = f"fppo train FILE.toml {PROCESSES} [--SECTION.SETTING VALUE ...]"
    if (sections := helps.help_sections(rest)) is not None:
        return _settings_help(usage, _train, sections)
    processes, own = processes_of(rest)
    if not own:
        return _no_file("train")
    look = partial(_look, processes, exports=True)
    settings = files.load(*file_and_overrides(own, "train"), look=look)
    from fppo.commands import actions, distributed

    return distributed.run(actions.train, settings, ["train", *own], *processes)


def _sft(rest: Sequence[str]) -> int | None:
    """Imitate demonstrations, before reinforcement learning: fppo sft FILE.toml [--sft.optimizer.lr 1e-5 ...]"""
    usage = f"fppo sft FILE.toml {PROCESSES} [--SECTION.SETTING VALUE ...]"
    if (sections := helps.help_sections(rest)) is not None:
        return _settings_help(usage, _sft, sections) if sections else _sft_help(usage)
    processes, own = processes_of(rest)
    if not own:
        return _no_file("sft")
    file, overrides = file_and_overrides(own, "sft")
    settings, found = files.examined(file, overrides, look=partial(_look_sft, processes))
    if wrong := [*filter(is_read, found), *sft_problems(settings)]:
        raise files.SettingsError(wrong, where=file or "the settings")
    from fppo.commands import actions, distributed

    return distributed.run(actions.sft, settings, ["sft", *own], *processes, trains=False)


def _check(rest: Sequence[str]) -> int | None:
    """Look a run over without starting it: problems, memory and time, prompts, rewards: fppo check FILE.toml"""
    prog = "fppo check FILE.toml [--nproc N] [--SECTION.SETTING VALUE ...]"
    if helps.wanted(rest):
        return helps.show(prog, CheckSettings, "Every setting of fppo train may be given, too: fppo train --help.")
    processes, own = processes_of(rest)
    if not own:
        return _no_file("check")
    file, own = file_and_overrides(own, "check")
    options, own = tyro.cli(CheckSettings, args=own, prog=prog, return_unknown_args=True)
    if wrong := flag_problems(options):
        raise files.SettingsError(wrong)
    settings, known = files.examined(file, own, look=partial(_look, processes, exports=True))
    from fppo.commands import check

    return check.check(settings, known, options, where=file or "the settings", ranks=processes.nproc)


def _rollout(rest: Sequence[str]) -> int | None:
    """Sample, score and save responses without training: fppo rollout FILE.toml [--nproc 2] [--steps 10 ...]"""
    usage = f"fppo rollout FILE.toml {PROCESSES} [--SECTION.SETTING VALUE ...]"
    if (sections := helps.help_sections(rest)) is not None:
        return _settings_help(usage, _rollout, sections)
    processes, own = processes_of(rest)
    if not own:
        return _no_file("rollout")
    settings = files.load(*file_and_overrides(own, "rollout"), look=partial(_look, processes))
    from fppo.commands import actions, distributed

    return distributed.run(actions.rollout, settings, ["rollout", *own], *processes, trains=False)


def _eval(rest: Sequence[str]) -> int | None:
    """Evaluate a run's last checkpoint on held-out prompts: fppo eval RUN [--eval.n 8 ...]"""
    usage = f"fppo eval RUN {PROCESSES} [--eval.n N ...]"
    if (sections := helps.help_sections(rest)) is not None:
        return _settings_help(usage, _eval, sections) if sections else _eval_help(usage)
    processes, own = processes_of(rest)
    run, overrides = file_and_overrides(own, "eval")
    if run is None:
        raise UsageError("give the output_dir of a run: fppo eval RUN")
    file = Path(run) / files.SETTINGS
    if not file.exists():
        raise UsageError(f"{file}: no such file; give the output_dir of a run")
    settings = files.load(file, overrides, run=run)
    if settings.output_dir != run:
        raise UsageError(f"--output-dir {settings.output_dir}: fppo eval reads the run {run}; leave the flag out")
    if processes.nproc is None and not any(argument.startswith("--mesh.") for argument in own):
        settings = attrs.evolve(settings, mesh=MeshSettings())  # any mesh reads checkpoints of any other
    from fppo.commands import actions, distributed

    return distributed.run(actions.evaluate, settings, ["eval", *own], *processes, trains=False)


def _replay(rest: Sequence[str]) -> int | None:
    """Recompute a step of a run and name the first number that differs: fppo replay RUN --step N [--nproc 2]"""
    if helps.wanted(rest):
        return helps.show("fppo replay RUN --step N [--nproc N] [--device DEVICE]", Replay)
    processes, rest = processes_of(rest)
    if processes.max_restarts:
        raise UsageError("--max-restarts: a replay is not restarted; leave it out")
    options = _options(Replay, rest, "replay")
    from fppo.commands import actions, distributed

    def command(settings: TrainSettings, here: actions.CommandRank) -> int:
        if options.device is not None and here.device is None:
            here = attrs.evolve(here, device=distributed.device_of(settings.device, settings.placement))
        return actions.replay(Path(options.run), options.step, here)

    settings = actions.settings_of(Path(options.run), options.step)
    settings = attrs.evolve(settings, device=options.device or settings.device)
    return distributed.run(command, settings, ["replay", *rest], processes.nproc)


def _export(rest: Sequence[str]) -> int | None:
    """Write the policy of a run as a Hugging Face directory: fppo export RUN TARGET [--push me/my-model]"""
    if helps.wanted(rest):
        return helps.show("fppo export RUN TARGET [--OPTION VALUE ...]", Export)
    options = _options(Export, rest, "export")
    run, target = Path(options.run), Path(options.target)
    if (target / "settings.toml").exists() and not (run / "settings.toml").exists():
        raise UsageError(f"{run} is not a run, but {target} is: give the run first: fppo export {target} {run}")
    if options.public and options.push is None:
        raise UsageError("--public: nothing is uploaded; give --push NAME too")
    from fppo.commands import actions

    role = "critic" if options.critic else "actor"
    return actions.export(
        run,
        target,
        options.step,
        role,
        options.device,
        merge=options.merge,
        push_to=options.push,
        public=options.public,
    )


def _serve(rest: Sequence[str]) -> int | None:
    """Serve a run's policy, or a model, behind OpenAI's protocol, and record episodes: fppo serve RUN|MODEL"""
    if helps.wanted(rest):
        return helps.show("fppo serve RUN|MODEL [MODEL ...] [--OPTION VALUE ...]", ServeOptions)
    options = _options(ServeOptions, rest, "serve")
    from fppo.commands import actions

    return actions.serve(options, os.environ)


def _report(rest: Sequence[str]) -> int | None:
    """Draw the curves of a run and write its report.html: fppo report RUN"""
    if helps.wanted(rest):
        return helps.show("fppo report RUN", Report)
    options = _options(Report, rest, "report")
    from fppo.report import write as report

    print(report.write_report(options.run))


def _view(rest: Sequence[str]) -> int | None:
    """Look into runs in a browser, live while they train, or in one file: fppo view RUN [RUN ...] [--export FILE]"""
    if helps.wanted(rest):
        return helps.show("fppo view RUN [RUN ...] [--export FILE.html] [--OPTION VALUE ...]", ViewOptions)
    options = _options(ViewOptions, rest, "view")
    from fppo.commands import view

    return view.view(options)


def _trace(rest: Sequence[str]) -> int | None:
    """Write a timeline of the last steps, for viewers of Chrome traces: fppo trace RUN"""
    if helps.wanted(rest):
        return helps.show("fppo trace RUN [--out FILE]", TraceOptions)
    options = _options(TraceOptions, rest, "trace")
    from fppo.report import timeline

    print(timeline.write(options.run, options.out))


def _diff(rest: Sequence[str]) -> int | None:
    """Print the first difference of two runs: fppo diff RUN RUN"""
    if helps.wanted(rest):
        return helps.show("fppo diff RUN RUN", DiffOptions)
    options = _options(DiffOptions, rest, "diff")
    from fppo.commands import actions

    first, second = map(Path, options.runs)
    return actions.diff(first, second)


def _ablate(rest: Sequence[str]) -> int | None:
    """Compare the implementations of an operation: fppo ablate --op log_probs [--replay RUN --step N]"""
    if helps.wanted(rest):
        return helps.show("fppo ablate --op OPERATION [--OPTION VALUE ...]", AblateSettings)
    options = tyro.cli(AblateSettings, args=rest, prog="fppo ablate")
    if wrong := settings_ablate.problems(options):
        raise files.SettingsError(wrong)
    from fppo.commands import ablate

    return ablate.ablate(options)


def _audit(rest: Sequence[str]) -> int | None:
    """Put another trainer's losses through the laws: fppo audit trl|verl|openrlhf|module:adapters [--dump FILE ...]"""
    if helps.wanted(rest):
        return helps.show("fppo audit trl|verl|openrlhf|module:adapters [--OPTION VALUE ...]", AuditOptions)
    options = _options(AuditOptions, rest, "audit")
    from fppo.commands import audit

    return audit.audit(options)


def _compare(rest: Sequence[str]) -> int | None:
    """Train and compare variants over several seeds: fppo compare FILE.toml --vary critic.loss=mse,hl_gauss"""
    prog = f"fppo compare FILE.toml --vary SECTION.SETTING=A,B {PROCESSES} [--SECTION.SETTING VALUE ...]"
    if helps.wanted(rest):
        return helps.show(prog, CompareSettings, "Every setting of fppo train may be given, too: fppo train --help.")
    processes, own = processes_of(rest)
    file, own = file_and_overrides(own, "compare")
    options, own = tyro.cli(CompareSettings, args=own, prog=prog, return_unknown_args=True)
    if wrong := flag_problems(options):
        raise files.SettingsError(wrong)
    settings = files.load(file, own, look=partial(_look, processes))
    from fppo.commands import actions, compare, distributed

    def train(settings: TrainSettings, file: Path) -> int:
        return distributed.run(actions.train, settings, ["train", str(file)], *processes)

    return compare.compare(settings, options, train)


def _completion(rest: Sequence[str]) -> int | None:
    """Print a script that completes commands and settings in a shell: fppo completion bash|zsh|fish"""
    if helps.wanted(rest):
        return helps.show("fppo completion bash|zsh|fish", None, completion.ADVICE)
    if len(rest) != 1:
        raise UsageError("give the name of a shell: fppo completion bash|zsh|fish")
    print(completion.script(rest[0], list(COMMANDS)))


def _plan(rest: Sequence[str]) -> int | None:
    """Estimate a run's memory and time in advance: fppo plan FILE.toml --gpu h200, or --model.path qwen2.5-7b ..."""
    if helps.wanted(rest):
        more = "Every setting of fppo train may be given too: fppo train --help."
        return helps.show("fppo plan [FILE.toml] [--OPTION VALUE ...]", PlanSettings, more)
    of, options = settings_plan.load(*file_and_overrides(rest, "plan"))
    from fppo.commands import plan

    return plan.run(of, options)


def _bias(rest: Sequence[str]) -> int | None:
    """Measure the bias and noise of estimators, losses and KL kinds, or of a run's: fppo bias [FILE.toml]"""
    if helps.wanted(rest):
        more = "With a file, or settings of fppo train, three lines say what that run optimises: fppo train --help."
        return helps.show("fppo bias [FILE.toml] [--OPTION VALUE ...]", BiasSettings, more)
    of, options = settings_bias.load(*file_and_overrides(rest, "bias"))
    from fppo.commands import bias

    return bias.run(of, options)


def _no_file(command: str) -> int:
    """Print an example of a file of settings, and return the exit status."""
    least = textwrap.indent(LEAST.rstrip(), "  ")
    lines = [
        f"fppo {command}: give a file of settings: fppo {command} FILE.toml; the least is:",
        *("", least, ""),
        "fppo quickstart writes one that trains at once, runs/quickstart/settings.toml;",
        f"fppo {command} --help lists all settings.",
    ]
    print("\n".join(lines), file=sys.stderr)
    return 2


def _look(
    processes: LaunchOptions, settings: TrainSettings, known: Sequence[Problem], *, exports: bool = False
) -> list[Problem]:
    """All problems with files, rows, modules, devices and other things that settings name, as far as visible before the
    run and without torch; with none of these, those of the values of parts.

    With `exports`, the target of the policy's export is checked too.
    """
    wrong = _seen(processes, settings, exports=exports)
    wrong += places.token_problems(settings)
    wrong += _of_rows([*known, *wrong], partial(places.row_problems, settings))
    return wrong or _of_values(parts(settings), known)


def _look_sft(processes: LaunchOptions, settings: TrainSettings, known: Sequence[Problem]) -> list[Problem]:
    """Problems with what a supervised run reads, as far as visible before it."""
    wrong = _seen(processes, settings, exports=True)
    wrong += _of_rows([*filter(is_read, known), *wrong], partial(places.row_problems, settings, imitates=True))
    return wrong or _of_values([x for x in parts(settings) if x[0] == "sft.optimizer"], known)


def _seen(processes: LaunchOptions, settings: TrainSettings, *, exports: bool) -> list[Problem]:
    """Problems with files and directories, modules, the machine and its processes."""
    world = int(os.environ.get("WORLD_SIZE") or processes.nproc or settings.mesh.least_ranks)
    local, visible = int(os.environ.get("LOCAL_WORLD_SIZE") or world), os.environ.get("CUDA_VISIBLE_DEVICES")
    target = places.target_problem(settings, Path(settings.output_dir) / places.MODEL) if exports else None
    wrong = [*places.place_problems(settings)]
    wrong += [] if target is None else [Problem("output_dir", settings.output_dir, target)]
    wrong += [*modules.module_problems(settings), *machine.machine_problems(settings, local, visible=visible)]
    return [*wrong, *checks.mesh_problems(settings, world)]


def _of_rows(known: Sequence[Problem], look: Callable[[], list[Problem]]) -> list[Problem]:
    """Problems with rows, which are read only if nothing is wrong with the settings that say how."""
    return [] if any(problem.path.startswith(("data.", "[data")) for problem in known) else look()


def _of_values(named: Iterable[tuple[str, Any, Any]], known: Sequence[Problem]) -> list[Problem]:
    """Problems with the values of parts, which are called once; nothing more is loaded if there are problems already,
    since that takes torch."""
    tried = [x for x in named if x[1].keywords]
    if known or not tried:
        return []
    from fppo.assembly import trials

    return trials.value_problems(tried, known)


def _sft_help(usage: str) -> None:
    """Print the settings of a supervised run."""
    print(helps.section_help(usage, ["sft"], "Imitate demonstrations, before reinforcement learning."))
    print(
        "\nOther sections that it reads: model, data, eval, mesh, checkpoint, digest, log; and output_dir, seed, steps,"
    )
    print("module_dirs, resume, device. fppo sft --help SECTION shows one.")


def _settings_help(usage: str, command: Callable[[Sequence[str]], int | None], sections: Sequence[str]) -> None:
    """Print the sections, or the settings of the given ones."""
    first = (command.__doc__ or "").splitlines()[0].partition(":")[0] + "."
    print(helps.section_help(usage, sections) if sections else helps.overview(usage, first))


def _eval_help(usage: str) -> None:
    """Print the settings of an evaluation."""
    print(helps.section_help(usage, ["eval"], "Evaluate a run's last checkpoint on held-out prompts."))
    print("\nfrom other sections, above all:\n")
    print("\n".join(helps.chosen_help(EVAL_READS)))
    print("\nEvery setting of fppo train may be given; defaults are the settings of the run in RUN.")


COMMANDS: dict[str, Callable[[Sequence[str]], int | None]] = {
    "quickstart": _quickstart,
    "train": _train,
    "sft": _sft,
    "check": _check,
    "rollout": _rollout,
    "eval": _eval,
    "replay": _replay,
    "export": _export,
    "serve": _serve,
    "report": _report,
    "view": _view,
    "trace": _trace,
    "diff": _diff,
    "ablate": _ablate,
    "audit": _audit,
    "compare": _compare,
    "plan": _plan,
    "bias": _bias,
    "completion": _completion,
}
