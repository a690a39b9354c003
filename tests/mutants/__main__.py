"""Plant mistakes, and print which tests catch them: `python -m tests.mutants --help`."""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.measure import measure
from tests.mutants.plant import Bounds, Verdict, verdicts
from tests.mutants.records import ROOT, Mutant, read, selected


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to plant (default: all)")
    parser.add_argument("--room", action="append", default=[], metavar="R", help="only this room's; may be repeated")
    parser.add_argument(
        "--changed",
        nargs="?",
        const="",
        metavar="BASE",
        help="only those of files that differ from a commit (default: where the branch left main)",
    )
    parser.add_argument("--draw", type=int, metavar="COUNT", help="only so many, drawn by --seed")
    parser.add_argument("--seed", default="", metavar="TEXT")
    parser.add_argument(
        "--allow", type=int, default=0, metavar="COUNT", help="end with status 0 if at most so many are not caught"
    )
    parser.add_argument("--list", action="store_true", help="print them, and plant none")
    parser.add_argument("--measure", action="store_true", help="record which fast tests execute which lines")
    parser.add_argument("-n", dest="jobs", type=int, default=os.cpu_count() or 1, metavar="JOBS")
    parser.add_argument(
        "--silence", type=float, default=Bounds().silence, metavar="S", help="seconds until a test counts as hanging"
    )
    parser.add_argument(
        "--limit", type=float, default=Bounds().mutant, metavar="S", help="seconds for the tests of one mutant"
    )
    return parser.parse_args(arguments)


def _git(*words: str) -> list[str]:
    result = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        raise ValueError(f"git {' '.join(words)}: {result.stderr.strip()}")
    return result.stdout.split("\n")[:-1]


def changed(base: str) -> set[str]:
    """The files that differ from a commit, those that git does not know yet among them."""
    if not base:
        try:
            base = _git("merge-base", "main", "HEAD")[0]
        except ValueError:  # no branch of that name
            base = "HEAD"
    return {*_git("diff", "--name-only", base), *_git("ls-files", "--others", "--exclude-standard")}


def chosen(options: argparse.Namespace) -> list[Mutant]:
    """The mutants that the options name, by name; of drawn ones as many as asked for, or all there are."""
    mutants = selected(read(), rooms=options.room, names=options.names)
    if options.changed is not None:
        files = changed(options.changed)
        mutants = [mutant for mutant in mutants if mutant.file in files]
    if options.draw is not None:
        drawn = random.Random(options.seed).sample(mutants, min(options.draw, len(mutants)))
        mutants = sorted(drawn, key=lambda mutant: mutant.name)
    return mutants


def described(mutant: Mutant) -> str:
    """Its place, what is done to it, and the harm."""
    place = f"{mutant.file}: {mutant.function or 'outside of functions'}"
    return f"{mutant.name}  ({place})\n    - {mutant.line}\n    + {mutant.becomes}\n    {mutant.harm}"


def summary(done: Sequence[Verdict], allowed: int = 0) -> tuple[str, int]:
    """What was found in all, and the exit status, where so many may be missed."""
    by_state = {state: [x for x in done if x.state == state] for state in ("caught", "not caught", "does not apply")}
    lines = ["", f"{len(by_state['caught'])} of {len(done)} caught"]
    for state in ("not caught", "does not apply"):
        lines += ["", f"{state}:"] if by_state[state] else []
        lines += [f"{described(x.mutant)}\n    {x.why}" for x in by_state[state]]
    return "\n".join(lines), 2 if by_state["does not apply"] else int(len(by_state["not caught"]) > allowed)


def main(arguments: Sequence[str]) -> int:
    """Returns 0 if all were caught but those allowed, 1 if more were not, and 2 if one does not apply any more, or for
    wrong options."""
    options = parsed(arguments)
    try:
        return run(options)
    except ValueError as error:
        print(f"python -m tests.mutants: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace) -> int:
    """Do what the options say; returns the exit status of `main`."""
    if options.measure:
        return measure(ROOT, [], jobs=options.jobs)
    mutants = chosen(options)
    if options.list:
        print(*map(described, mutants), sep="\n\n")
        return 0
    done: list[Verdict] = []
    bounds = Bounds(silence=options.silence, mutant=options.limit)
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        for verdict in verdicts(ROOT, mutants, Path(place), jobs=options.jobs, bounds=bounds):
            print(f"{verdict.state:14} {verdict.mutant.name:48} {verdict.seconds:5.0f} s  {verdict.why}", flush=True)
            done.append(verdict)
    text, status = summary(done, options.allow)
    print(text)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
