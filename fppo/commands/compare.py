"""The action of `fppo compare`, after its arguments are parsed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from fppo._errors import RunFailed, UsageError, printable
from fppo.assembly.idle import idle_lines
from fppo.assembly.machine import resolved
from fppo.assembly.trials import value_problems
from fppo.commands import output
from fppo.pipeline.replay import DIGESTS
from fppo.report import compare as comparing
from fppo.runs import jsonl, saved
from fppo.settings import checks, files, logged, places
from fppo.settings.compare import CompareSettings, changed, variants
from fppo.settings.component import parts
from fppo.settings.train import TrainSettings

ASKED = "compared.toml"  # in a run's directory: its settings as given, before they are resolved
PICTURE, TABLE, MARKDOWN, NUMBERS = "compare.png", "compare.txt", "compare.md", "compare.json"


def plan(settings: TrainSettings, asked: CompareSettings) -> dict[str, dict[int, TrainSettings]]:
    """Derive the settings of every run, by variant and seed. Raises SettingsError with all problems of all variants,
    and for metrics that no variant logs."""
    out = Path(asked.out or f"{settings.output_dir}-compare")
    runs: dict[str, dict[int, TrainSettings]] = {}
    problems: list[str] = []
    for variant in variants(asked.vary):
        of_seed = {}
        for number in range(asked.seeds):
            seed = settings.seed + number
            of_seed[seed] = changed(settings, variant, number, str(out / variant.directory / f"seed_{seed}"))
        first = next(iter(of_seed.values()))
        wrong = checks.problems(first)
        problems += [f"{variant.name}: {problem}" for problem in (*wrong, *value_problems(parts(first), wrong))]
        runs[variant.name] = of_seed
    problems += _metric_problems([next(iter(seeds.values())) for seeds in runs.values()], asked.metrics)
    if problems:
        raise files.SettingsError(problems, source="the variants")
    return runs


def _metric_problems(settings: Sequence[TrainSettings], metrics: Sequence[str]) -> list[str]:
    """Problems with metrics to compare that no variant will log."""
    if not metrics and not any(own.has_held_out for own in settings):
        return ["--metrics is not set, and there are no held-out prompts; give data.eval_path, or names of metrics"]
    refused = {name: [logged.missing(own, name) for own in settings] for name in metrics}
    return [f"--metrics {name}: {texts[0]}" for name, texts in refused.items() if texts[0] and all(texts)]


def compare(settings: TrainSettings, asked: CompareSettings, train: Callable[[TrainSettings, Path], int]) -> int:
    """Train the unfinished runs, seed by seed, then write and print the comparison. Returns 130 as soon as a run is
    stopped, 1 if some runs failed (`RunFailed`), else 0. `train(settings, file)` trains one run; `file` holds the same
    settings.

    Raises ValueError for a run's directory with other settings.
    """
    with output.shown(asked.json) as show:
        return _compare(settings, asked, train, show)


def _compare(
    settings: TrainSettings, asked: CompareSettings, train: Callable[[TrainSettings, Path], int], show: output.Show
) -> int:
    runs = plan(settings, asked)
    out = Path(next(iter(next(iter(runs.values())).values())).output_dir).parent.parent
    if not any(out.glob("*/seed_*")) and (others := places.foreign_files(out)):
        raise UsageError(f"--out {out} holds {places.some(others)} and no comparison; give a new directory")
    for text in _said_of_idle(runs):
        print(printable(text, 2000))
    every = [(name, seed, own) for name, seeds in runs.items() for seed, own in seeds.items()]
    every.sort(key=lambda run: run[1])  # all variants of a seed, then the next: finished runs compare at any time
    left = [run for run in every if not _done(run[2])]
    where = {name: {seed: Path(own.output_dir) for seed, own in seeds.items()} for name, seeds in runs.items()}
    if len(left) < len(every):
        print(f"{len(every) - len(left)} of {len(every)} runs are done")
        if left and all(any(run[0] == name for run in every if run not in left) for name in runs):
            write(where, asked.metrics, out)
    failed: list[str] = []
    for number, (name, seed, own) in enumerate(left, start=1):
        if number > 1 and seed != left[number - 2][1] and not failed:  # every variant has a run
            write(where, asked.metrics, out)  # a first look, and an error for metrics that no run has logged
        print(f"\nrun {number} of {len(left)}: {name}, seed {seed}", flush=True)
        directory = Path(own.output_dir)
        directory.mkdir(parents=True, exist_ok=True)
        files.save(own, directory / ASKED)
        try:
            status = train(own, directory / ASKED)
        except RunFailed as error:
            print(printable(str(error), lines=True))
            status = 1
        if status > 1:
            print(f"stopped in {name}, seed {seed}; the same command resumes there")
            return status
        failed += [f"{name}, seed {seed}"] if status else []
    if failed:
        print(f"\nfailed; the same command tries them again: {'; '.join(failed)}")
    comparison = write(where, asked.metrics, out)
    show("", {"rows": comparison.numbers(), "equal": comparison.equal(), "failed": failed})
    return 1 if failed else 0


def write(runs: Mapping[str, Mapping[int, Path]], metrics: Sequence[str], out: Path) -> comparing.Comparison:
    """Compare the runs (directories by variant and seed): print the table and which variants are equal, and write
    table, numbers and picture to the directory `out`. Returns the comparison."""
    comparison = comparing.collect(runs, metrics)
    text = comparison.table()
    (out / TABLE).write_text(text + "\n", encoding="utf-8")
    (out / MARKDOWN).write_text(comparison.markdown() + "\n", encoding="utf-8")
    output.write(str(out / NUMBERS), output.document(comparison.numbers()))
    comparing.write_png(comparison, out / PICTURE)
    print(f"\n{printable(text, len(text), lines=True)}")
    for names in comparison.equal():
        which = "" if len(names) == len(runs) else f": {'; '.join(names)}"
        states = {tuple(_last_digest(path) for path in runs[name].values()) for name in names}
        ends = "in the same state, bit by bit" if len(states) == 1 else "in other states"
        print(f"the variants are equal, number by number, and end {ends}{which}")
    print(f"\npicture: {out / PICTURE}")
    return comparison


def _last_digest(directory: Path) -> str:
    """The digests of a run's last state as text; for a run without digests its directory, which equals no other."""
    lines = jsonl.read(directory / DIGESTS, on_damage=lambda _: None)
    return str(lines[-1].get("state", directory) if lines else directory)


def _said_of_idle(runs: Mapping[str, Mapping[int, TrainSettings]]) -> Iterator[str]:
    """Yield lines on settings that change nothing, each with the names of the variants concerned if these are not
    all."""
    found: dict[str, list[str]] = {}
    for name, seeds in runs.items():
        for text in idle_lines(resolved(next(iter(seeds.values())))[0]):
            found.setdefault(text, []).append(name)
    for text, names in found.items():
        yield text if len(names) == len(runs) else f"{text} ({'; '.join(names)})"


def _done(settings: TrainSettings) -> bool:
    """Whether a run with these settings has already taken all its steps. Raises ValueError if its output_dir holds a
    run with other settings."""
    directory = Path(settings.output_dir)
    if not (directory / ASKED).exists():
        return False
    before = files.from_dict(files.read_toml(directory / ASKED))
    if differing := files.changes(files.to_dict(before), settings):
        raise UsageError(f"{directory} holds a run with other settings ({files.shown(differing)}); give another --out")
    return saved.newest(directory) == settings.steps
