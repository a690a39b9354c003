"""Training from Python: `fppo.train`, the command `fppo train` as a function."""

from __future__ import annotations

import json
import operator
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import attrs

from fppo._errors import UsageError, printable, shown
from fppo.commands.arguments import LaunchOptions
from fppo.commands.cli import look
from fppo.fields import Problem, Problems
from fppo.rewards.functions import Reward, WeightedSum
from fppo.rewards.resolve import GIVEN
from fppo.runtime.barriers import wait_asleep
from fppo.runtime.exports import write_whole
from fppo.settings import files, places
from fppo.settings.component import requires
from fppo.settings.learning import AdvantageSettings
from fppo.settings.tables import ESTIMATORS
from fppo.settings.train import TrainSettings
from fppo.workers.sample import name_of

if TYPE_CHECKING:
    from fppo.runs.recorded import RecordedRun

PathLike = str | os.PathLike[str]
Rows = Iterable[Mapping[str, Any]]
RESPONSES = 8  # to each prompt, for an estimator that compares them
TRUTHS = ("ground_truth", "answer")  # fields of rows that rewards compare with: the first that is there


@attrs.frozen
class _GivenPrompts:
    """Prompts as a caller gives them: the path of a file or data set, or rows, which are kept as the text of a file."""

    path: str
    text: str | None = None
    usual: Mapping[str, Any] = MappingProxyType({})  # settings that suit the rows
    problems: Sequence[Problem] = ()


def train(
    *,
    model: PathLike,
    output_dir: PathLike,
    prompts: Rows | PathLike | None = None,
    eval_prompts: Rows | PathLike | None = None,
    reward: Reward | str | Sequence[Reward | str] | None = None,
    algorithm: str = "grpo",
    steps: int = 100,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> RecordedRun:
    """Train a model as the command `fppo train` does, in this process, and return the record of the run.

    Called again, it resumes from the last checkpoint. It prints what the command prints; a notebook shows the curves.

    Args:
        model: a Hugging Face name or directory, or smol, for SmolLM2-135M-Instruct.
        output_dir: the directory for everything that the run writes.
        prompts: rows with a "prompt", a text or a list of messages, and maybe a "ground_truth"; other fields are
            `extras` of a sample. They are written to prompts.jsonl in output_dir, so their values are JSON's. Or the
            name of a file or a data set.
        eval_prompts: held-out rows, likewise.
        reward: a function of a `rewards.Sample` that returns its score, the name of a built-in one, or several, which
            are added up. Functions run in worker processes, closures and those of a notebook too. A run with such a
            one cannot be resumed by the command, which says so.
        algorithm: the estimator of advantages, `algorithm.advantage`.
        steps: the steps of the run.
        settings: all other settings of a run, in tables or by their paths, as {"actor.optimizer.lr": 1e-5}. Without
            "rollout.n", an estimator that compares responses gets 8 to each prompt. Without "data.chat", prompts that
            are lists of messages go through the chat template.

    Raises SettingsError with every problem of settings and rows, before any work; KeyboardInterrupt once a run that was
    stopped has saved its state; and what `fppo train` prints as errors.
    """
    _check_alone()
    if "torch" not in sys.modules:
        wait_asleep()  # as the command does
    names, own = _rewards(reward)
    sources = {"data.path": _given_prompts("prompts", prompts, output_dir)}
    sources["data.eval_path"] = _given_prompts("eval_prompts", eval_prompts, output_dir)
    given = {
        "model.path": os.fspath(model),
        "output_dir": os.fspath(output_dir),
        "steps": steps,
        "algorithm.advantage": algorithm,
        **({"reward.functions": names} if names else {}),
        **{setting: [x.path] for setting, x in sources.items() if x is not None},
    }
    found = [x for x in sources.values() if x is not None]
    chosen = [*files.by_path(settings)]
    usual = {path: value for each in found[::-1] for path, value in each.usual.items()}
    usual |= _usual(algorithm, [x for x in names if isinstance(x, str) and x not in own])
    usual = {path: value for path, value in usual.items() if path not in dict(chosen)}
    tables, twice = files.nested([*given.items(), *chosen, *usual.items()])
    known = [*(problem for each in found for problem in each.problems), *twice]
    texts = {Path(x.path): x.text for x in found if x.text is not None}
    made, problems = files.examined(tables=tables, look=partial(_look, texts, bool(known)))
    if known or problems:
        raise files.SettingsError([*known, *problems])
    return _trained(made, own)


def _check_alone() -> None:
    """Raise UsageError in a rank that a launcher has started."""
    if "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        advice = "start several by fppo train FILE.toml --nproc N, or by torchrun -m fppo train FILE.toml"
        raise UsageError(f"fppo.train trains in one process, and this is one of several ranks; {advice}")


def _trained(settings: TrainSettings, own: Mapping[str, Reward]) -> RecordedRun:
    """Train, and return the record of the run; a notebook shows its curves."""
    from fppo.commands import actions, distributed  # here, since they load torch
    from fppo.report.write import CURVES
    from fppo.runs.loggers import in_notebook
    from fppo.runs.recorded import open_run

    if distributed.placed(partial(actions.train, rewards=own), settings, [], nproc=1)():
        raise KeyboardInterrupt("the state is saved, and the same call goes on from there")
    run = open_run(settings.output_dir)
    if in_notebook():
        from IPython.display import Image, display

        display(Image(run.directory / CURVES))
    return run


def _given_prompts(name: str, prompts: Rows | PathLike | None, directory: PathLike) -> _GivenPrompts | None:
    """The prompts that the argument `name` gives; None without any."""
    if prompts is None or isinstance(prompts, str | os.PathLike):
        return None if prompts is None else _GivenPrompts(os.fspath(prompts))
    lines: list[str] = []
    problems: list[Problem] = []
    for number, row in enumerate(rows := [*prompts], start=1):
        try:
            if not isinstance(row, Mapping):
                raise TypeError("it is no dict with fields, as {'prompt': '1+2=', 'ground_truth': '3'}")
            lines.append(json.dumps(dict(row), allow_nan=False) + "\n")
        except (TypeError, ValueError, RecursionError) as error:
            problems.append(Problem(f"{name}[{number - 1}]", attrs.NOTHING, f"{printable(str(error))}: {shown(row)}"))
    rows = [row for row in rows if isinstance(row, Mapping)]
    usual: dict[str, Any] = {}
    if rows:
        usual["data.ground_truth"] = next((x for x in TRUTHS if any(x in row for row in rows)), "")
    if any(isinstance(row.get("prompt"), list | tuple) for row in rows):
        usual["data.chat"] = True
    return _GivenPrompts(str(Path(directory) / f"{name}.jsonl"), "".join(lines), usual, problems)


def _rewards(reward: Reward | str | Sequence[Reward | str] | None) -> tuple[list[Any], dict[str, Reward]]:
    """The names of rewards in settings, with what is no reward as it is; and, by name, those that cannot be imported
    by it."""
    several = isinstance(reward, Sequence) and not isinstance(reward, str | WeightedSum)
    rewards: list[Any] = [*cast(Any, reward)] if several else [] if reward is None else [reward]
    names: list[Any] = []
    own: dict[str, Reward] = {}
    for each in rewards:
        if isinstance(each, str) or not (callable(each) or isinstance(each, WeightedSum)):
            names.append(each)
        elif (name := _importable(each)) is not None:
            names.append(name)
        else:
            word = re.sub(r"\W", "", name_of(cast(Any, each)))
            name = f"{GIVEN}:{word}" if f"{GIVEN}:{word}" not in own else f"{GIVEN}:{word}_{len(own) + 1}"
            names.append(name)
            own[name] = each
    return names, own


def _importable(fn: Any) -> str | None:
    """The name of a function as module:function, by which other processes can import it; None if they cannot."""
    module, path = str(getattr(fn, "__module__", "")), str(getattr(fn, "__qualname__", ""))
    try:
        found = operator.attrgetter(path)(sys.modules[module])
    except (KeyError, AttributeError):
        return None
    return f"{module}:{path}" if found is fn and module != "__main__" else None


def _usual(algorithm: str, imported: Sequence[str]) -> dict[str, Any]:
    """Settings that suit an algorithm, and reward functions that are imported: where a later command finds these."""
    usual: dict[str, Any] = {}
    if requires(AdvantageSettings(name=str(algorithm)), ESTIMATORS, "groups"):
        usual["rollout.n"] = RESPONSES
    specs = [getattr(sys.modules.get(name.partition(":")[0]), "__spec__", None) for name in imported]
    files_of = [(x.origin, x.name, x.submodule_search_locations) for x in specs if x is not None and x.has_location]
    homes = [Path(file).parents[name.count(".") + (inside is not None)] for file, name, inside in files_of]
    if homes:
        usual["module_dirs"] = [*dict.fromkeys(map(str, [*homes, Path.cwd()]))]
    return usual


def _look(texts: Mapping[Path, str], wrong: bool, settings: TrainSettings, known: Sequence[Problem]) -> list[Problem]:
    """The problems that `fppo train` would see before the run; rows are first written where it reads them, unless
    something is `wrong` with these, or with their directory."""
    if wrong or any(problem.path == "output_dir" for problem in known):
        return []
    wrong_place = [*places.output_problems(settings)] or [*_write(texts, settings)]
    return wrong_place or look(LaunchOptions(nproc=1), settings, known, exports=True)


def _write(texts: Mapping[Path, str], settings: TrainSettings) -> Problems:
    """Write the rows of a run; yields a problem, and leaves those that are there, if a run reads others from there."""
    for file, text in texts.items():
        has_run = (file.parent / files.STARTS).is_dir() and not settings.data.may_change
        if has_run and file.is_file() and file.read_text(encoding="utf-8") != text:
            text = f"it holds a run with other rows in {file.name}; give another directory, or data.may_change = true"
            yield Problem("output_dir", settings.output_dir, text)
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, text.encode())
