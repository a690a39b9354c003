"""Print a table of the cookbook's recipes of docs/guides/tinker-recipes.md: `python -m tests.cookbook`.

Names of recipes as arguments run these alone.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.cookbook import runner
from tests.cookbook.recipes import RUN


def main(names: list[str]) -> int:
    """Run the recipes, and print a row for each: returns the number of those that failed."""
    if (why := runner.missing()) is not None:
        print(f"{why}: see docs/guides/tinker-recipes.md", file=sys.stderr)
        return 2
    failed = 0
    print(f"tinker-cookbook {runner.version()}\n")
    print("| recipe | runs | steps | processor s | stands in for the hub | what it shows |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place, runner.serving(Path(place)) as at:
        for recipe in RUN:
            if names and recipe.name not in names:
                continue
            runs, seconds = "yes", ""
            if (why := runner.missing(recipe)) is not None:
                runs = f"not tried: {why}"
            else:
                try:
                    seconds = f"{runner.run(recipe, at).seconds:.0f}"
                except (runner.RecipeError, AssertionError) as error:
                    print(f"{recipe.name}: {error}", file=sys.stderr)
                    runs, failed = "no", failed + 1
            print(
                f"| {recipe.name} | {runs} | {recipe.steps} | {seconds} | {recipe.needs} | {recipe.shows} |", flush=True
            )
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
