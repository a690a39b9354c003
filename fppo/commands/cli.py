"""The command line: parse arguments, load settings, and call the commands' actions."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs

from fppo._errors import UsageError, did_you_mean
from fppo.commands import completion, options
from fppo.commands import help as helps
from fppo.commands.arguments import LAUNCH, Arguments, Asked, Command, LaunchOptions
from fppo.commands.ends import TRACEBACK, status_of, status_of_exit
from fppo.fields import Problem
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
        done = _print_usage(bool(name)) if needs_usage else _read(name, rest)()
        status = (done() if callable(done) else done) or 0
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
    lines = "\n".join(helps.listed((name, command.text) for name, command in COMMANDS.items()))
    return f"usage: fppo COMMAND ...\n\n{lines}\n\nfppo COMMAND --help shows a command's arguments."


def _read(name: str, rest: Sequence[str]) -> Callable[[], Asked]:
    """Read the arguments of a command, and return what is left to do: its work, its help, or to show an example."""
    command = COMMANDS[name]
    if (sections := helps.help_sections(rest)) is not None:
        return partial(_help, name, command, sections)
    arguments = command.read(name, rest)
    return partial(_no_file, name) if arguments is None else partial(command.act, arguments)


def _help(name: str, command: Command, sections: Sequence[str]) -> None:
    """Print the arguments of a command; of one that has no options but settings, the sections or the given ones."""
    usage = f"fppo {name} {command.usage}"
    if name != "eval" and (command.options is not None or not command.settings):
        helps.show(usage, command.options, command.more)
    elif sections:
        print(helps.section_help(usage, sections))
    elif name == "sft":
        print(helps.section_help(usage, ["sft"], "Imitate demonstrations, before reinforcement learning."))
        print("\nOther sections that it reads: model, data, eval, mesh, checkpoint, digest, log; and", end=" ")
        print("output_dir, seed, steps,\nmodule_dirs, resume, device. fppo sft --help SECTION shows one.")
    elif name == "eval":
        print(helps.section_help(usage, ["eval"], "Evaluate a run's last checkpoint on held-out prompts."))
        print("\nfrom other sections, above all:\n")
        print("\n".join(helps.chosen_help(EVAL_READS)))
        print("\nEvery setting of fppo train may be given; defaults are the settings of the run in RUN.")
    else:
        print(helps.overview(usage, command.text.partition(":")[0] + "."))


def _quickstart(given: Arguments) -> int:
    """Train a small model on an addition task, from nothing to a report, in two minutes [--model smol] [--nproc 2]"""
    from fppo.commands import actions, distributed  # here, as below: --help answers before torch is loaded

    def run(settings: TrainSettings) -> int:
        settings = attrs.evolve(settings, rollout=attrs.evolve(settings.rollout, exact=given.options.exact))
        file = Path(settings.output_dir) / "quickstart.toml"  # for other processes; the run itself writes settings.toml
        files.save(settings, file)
        return distributed.placed(actions.train, settings, ["train", str(file)], *given.processes)()

    model = given.options.model
    directory = Path(given.options.output_dir or {"tiny": "runs/quickstart", "smol": "runs/smol"}[model])
    begin = actions.quickstart if model == "tiny" else actions.smol_quickstart
    return begin(directory, given.options.seed, run)


def _train(given: Arguments) -> Callable[[], int]:
    """Train your own model: fppo train FILE.toml [--nproc 2] [--actor.optimizer.lr 1e-6 ...]"""
    settings = files.load(given.file, given.flags, look=partial(look, given.processes, exports=True))
    from fppo.commands import actions, distributed

    return distributed.placed(actions.train, settings, ["train", *given.own], *given.processes)


def _sft(given: Arguments) -> Callable[[], int]:
    """Imitate demonstrations, before reinforcement learning: fppo sft FILE.toml [--sft.optimizer.lr 1e-5 ...]"""
    settings, found = files.examined(given.file, given.flags, look=partial(_look_sft, given.processes))
    if wrong := [*filter(is_read, found), *sft_problems(settings)]:
        raise files.SettingsError(wrong, source=given.file or "the settings")
    from fppo.commands import actions, distributed

    return distributed.placed(actions.sft, settings, ["sft", *given.own], *given.processes, trains=False)


def _check(given: Arguments) -> int:
    """Look a run over without starting it: problems, memory and time, prompts, rewards: fppo check FILE.toml"""
    settings, known = files.examined(given.file, given.flags, look=partial(look, given.processes, exports=True))
    from fppo.commands import check

    where, ranks = given.file or "the settings", given.processes.nproc
    return check.check(settings, known, given.options, where=where, ranks=ranks)


def _rollout(given: Arguments) -> Callable[[], int]:
    """Sample, score and save responses without training: fppo rollout FILE.toml [--nproc 2] [--steps 10 ...]"""
    settings = files.load(given.file, given.flags, look=partial(look, given.processes))
    from fppo.commands import actions, distributed

    return distributed.placed(actions.rollout, settings, ["rollout", *given.own], *given.processes, trains=False)


def _eval(given: Arguments) -> Callable[[], int]:
    """Evaluate a run's last checkpoint on held-out prompts: fppo eval RUN [--eval.n 8 ...]"""
    run, processes = given.file, given.processes
    if run is None:
        raise UsageError("give the output_dir of a run: fppo eval RUN")
    file = Path(run) / files.SETTINGS
    if not file.exists():
        raise UsageError(f"{file}: no such file; give the output_dir of a run")
    settings = files.load(file, given.flags, run=run)
    if settings.output_dir != run:
        raise UsageError(f"--output-dir {settings.output_dir}: fppo eval reads the run {run}; leave the flag out")
    if processes.nproc is None and not any(argument.startswith("--mesh.") for argument in given.own):
        settings = attrs.evolve(settings, mesh=MeshSettings())  # any mesh reads checkpoints of any other
    from fppo.commands import actions, distributed

    evaluate = partial(actions.evaluate, json=given.options.json)
    return distributed.placed(evaluate, settings, ["eval", *given.own], *processes, trains=False)


def _replay(given: Arguments) -> Callable[[], int]:
    """Recompute a step of a run and name the first number that differs: fppo replay RUN --step N [--nproc 2]"""
    if given.processes.max_restarts:
        raise UsageError("--max-restarts: a replay is not restarted; leave it out")
    from fppo.commands import actions, distributed

    run, step, device = Path(given.options.run), given.options.step, given.options.device

    def command(settings: TrainSettings, here: actions.CommandRank) -> int:
        if device is not None and here.device is None:
            here = attrs.evolve(here, device=distributed.device_of(settings.device, settings.placement))
        return actions.replay(run, step, here)

    settings = actions.settings_of(run, step)
    settings = attrs.evolve(settings, device=device or settings.device)
    return distributed.placed(command, settings, ["replay", *given.own], given.processes.nproc)


def _export(given: Arguments) -> int:
    """Write the policy of a run as a Hugging Face directory: fppo export RUN TARGET [--push me/my-model]"""
    asked = given.options
    run, target = Path(asked.run), Path(asked.target)
    if (target / "settings.toml").exists() and not (run / "settings.toml").exists():
        raise UsageError(f"{run} is not a run, but {target} is: give the run first: fppo export {target} {run}")
    if asked.public and asked.push is None:
        raise UsageError("--public: nothing is uploaded; give --push NAME too")
    from fppo.commands import actions
    from fppo.runs.copies import run_at

    role, how = "critic" if asked.critic else "actor", {"merge": asked.merge, "public": asked.public}
    with run_at(asked.run, asked.step) as run:
        return actions.export(run, target, asked.step, role, asked.device, push_to=asked.push, **how)


def _serve(given: Arguments) -> int:
    """Serve a run's policy, or a model, behind OpenAI's protocol, and record episodes: fppo serve RUN|MODEL"""
    from fppo.commands import actions

    return actions.serve(given.options, os.environ)


def _report(given: Arguments) -> None:
    """Draw the curves of a run and write its report.html, or print its alarms: fppo report RUN [--alarms]"""
    from fppo.commands import output
    from fppo.report import write as report

    with output.shown(given.options.json) as show:
        if given.options.alarms:
            found = report.alarms_of(given.options.run)
            show("\n".join(map(str, found)) or "no alarm", {"alarms": [attrs.asdict(each) for each in found]})
            return
        page = report.write_report(given.options.run)
        show(str(page), {"report": str(page), "curves": str(page.with_name(report.CURVES))})


def _view(given: Arguments) -> int:
    """Look into runs in a browser, live while they train, or in one file: fppo view RUN [RUN ...] [--export FILE]"""
    from fppo.commands import view

    return view.view(given.options)


def _trace(given: Arguments) -> None:
    """Write a timeline of the last steps, for viewers of Chrome traces: fppo trace RUN"""
    from fppo.report import timeline

    print(timeline.write(given.options.run, given.options.out))


def _diff(given: Arguments) -> int:
    """Print the first difference of two runs: fppo diff RUN RUN"""
    from fppo.commands import actions

    first, second = map(Path, given.options.runs)
    return actions.diff(first, second, given.options.json)


def _ablate(given: Arguments) -> int:
    """Compare the implementations of an operation: fppo ablate --op log_probs [--replay RUN --step N]"""
    from fppo.commands import ablate

    return ablate.ablate(given.options)


def _audit(given: Arguments) -> int:
    """Put another trainer's losses through the laws: fppo audit TRAINER|module:adapters [--dump FILE ...]"""
    from fppo.commands import audit

    return audit.audit(given.options)


def _compare(given: Arguments) -> int:
    """Train and compare variants over several seeds: fppo compare FILE.toml --vary critic.loss=mse,hl_gauss"""
    settings = files.load(given.file, given.flags, look=partial(look, given.processes))
    from fppo.commands import actions, compare, distributed

    def train(settings: TrainSettings, file: Path) -> int:
        return distributed.placed(actions.train, settings, ["train", str(file)], *given.processes)()

    return compare.compare(settings, given.options, train)


def _env(given: Arguments) -> None:
    """Print versions, machine, kernels and extras, for a report of a problem: fppo env [--json]"""
    from fppo.commands import env

    env.show(given.options)


def _guide(given: Arguments) -> None:
    """Print a guide for agents: rewards, runs, comparisons, failures and losses, with programs that run: fppo guide"""
    if given.own:
        raise UsageError("fppo guide takes no arguments")
    from fppo.commands import guide

    guide.show()


def _completion(given: Arguments) -> None:
    """Print a script that completes commands and settings in a shell: fppo completion bash|zsh|fish"""
    if len(given.own) != 1:
        raise UsageError("give the name of a shell: fppo completion bash|zsh|fish")
    print(completion.script(given.own[0], COMMANDS))


def _plan(given: Arguments) -> int:
    """Estimate a run's memory and time in advance: fppo plan FILE.toml --gpu h200, or --model.path qwen2.5-7b ..."""
    of, options = settings_plan.load(given.file, given.flags)
    from fppo.commands import plan

    return plan.run(of, options)


def _bias(given: Arguments) -> int:
    """Measure the bias and noise of estimators, losses and KL kinds, or of a run's: fppo bias [FILE.toml]"""
    of, options = settings_bias.load(given.file, given.flags)
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


def look(
    processes: LaunchOptions, settings: TrainSettings, known: Sequence[Problem], *, exports: bool = False
) -> list[Problem]:
    """All problems with files, rows, modules, devices and other things that settings name, as far as visible before the
    run and without torch; with none of these, those of the values of parts.

    Rows are not read if problems with the data are `known` already, and values not tried if any are. With `exports`,
    the target of the policy's export is checked too.
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
    wrong += [] if int(os.environ.get("RANK") or 0) else places.remote_problems(settings)
    wrong += [] if target is None else [Problem("output_dir", settings.output_dir, target)]
    wrong += [*modules.module_problems(settings), *machine.machine_problems(settings, local, visible=visible)]
    return [*wrong, *checks.mesh_problems(settings, world)]


def _of_rows(known: Sequence[Problem], look: Callable[[], list[Problem]]) -> list[Problem]:
    """Problems with rows, which are read only if nothing is wrong with the settings that say how."""
    return [] if any(problem.path.startswith(("data.", "[data")) for problem in known) else look()


def _of_values(named: Iterable[tuple[str, Any, Any]], known: Sequence[Problem]) -> list[Problem]:
    """Problems with the values of parts `named` (`settings.component.parts`), which are called once. If problems are
    `known` already, nothing is called, since that loads torch."""
    tried = [x for x in named if x[1].keywords]
    if known or not tried:
        return []
    from fppo.assembly import trials

    return trials.value_problems(tried, known)


_TRAINED = "Every setting of fppo train may be given, too: fppo train --help."
_PLANNED = "Every setting of fppo train may be given too: fppo train --help."
_STUDIED = "With a file, or settings of fppo train, three lines say what that run optimises: fppo train --help."
_SETTING, _OPTION, _EVERY = "[--SECTION.SETTING VALUE ...]", "[--OPTION VALUE ...]", tuple(LAUNCH)
_of_run = partial(Command, settings=True)
_launched = partial(_of_run, launch=_EVERY)
COMMANDS: dict[str, Command] = {
    "quickstart": Command(_quickstart, f"{PROCESSES} {_OPTION}", options.Quickstart, launch=_EVERY),
    "train": _launched(_train, f"FILE.toml {PROCESSES} {_SETTING}", example=True),
    "sft": _launched(_sft, f"FILE.toml {PROCESSES} {_SETTING}", example=True),
    "check": _of_run(
        _check, f"FILE.toml [--nproc N] {_SETTING}", CheckSettings, launch=("--nproc",), example=True, more=_TRAINED
    ),
    "rollout": _launched(_rollout, f"FILE.toml {PROCESSES} {_SETTING}", example=True),
    "eval": _launched(_eval, f"RUN {PROCESSES} [--json] [--eval.n N ...]", options.EvalOptions),
    "replay": Command(_replay, "RUN --step N [--nproc N] [--device DEVICE]", options.Replay, launch=("--nproc",)),
    "export": Command(_export, f"RUN TARGET {_OPTION}", options.Export),
    "serve": Command(_serve, f"RUN|MODEL [MODEL ...] {_OPTION}", options.ServeOptions),
    "report": Command(_report, "RUN [--alarms] [--json]", options.Report),
    "view": Command(_view, f"RUN [RUN ...] [--export FILE.html] {_OPTION}", options.ViewOptions),
    "trace": Command(_trace, "RUN [--out FILE]", options.TraceOptions),
    "diff": Command(_diff, "RUN RUN [--json]", options.DiffOptions),
    "ablate": Command(_ablate, f"--op OPERATION {_OPTION}", AblateSettings, problems=settings_ablate.problems),
    "audit": Command(_audit, f"TRAINER|module:adapters {_OPTION}", options.AuditOptions),
    "compare": _launched(
        _compare, f"FILE.toml --vary SECTION.SETTING=A,B {PROCESSES} {_SETTING}", CompareSettings, more=_TRAINED
    ),
    "plan": _of_run(_plan, f"[FILE.toml] {_OPTION}", PlanSettings, more=_PLANNED, problems=None),
    "bias": _of_run(_bias, f"[FILE.toml] {_OPTION}", BiasSettings, more=_STUDIED, problems=None),
    "env": Command(_env, "[--json]", options.EnvOptions),
    "guide": Command(_guide, "[> SKILL.md]"),
    "completion": Command(_completion, "bash|zsh|fish", more=completion.ADVICE),
}
