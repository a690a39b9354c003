"""The cookbook's recipes run, as they are, against the server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cookbook import runner
from tests.cookbook.recipes import RUN, Recipe
from tests.cookbook.runner import Served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(runner.missing() is not None, reason=str(runner.missing())),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with runner.serving(tmp_path_factory.mktemp("cookbook")) as at:
        yield at


@pytest.mark.parametrize("recipe", RUN, ids=lambda recipe: recipe.name.replace(", ", "-").replace(" ", "-"))
def test_a_recipe_runs_unchanged(recipe: Recipe, served: Served):
    if (why := runner.missing(recipe)) is not None:
        pytest.skip(why)
    runner.run(recipe, served)
