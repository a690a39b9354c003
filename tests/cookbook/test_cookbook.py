"""The cookbook's recipes run, as they are, against the server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cookbook import kitchen
from tests.cookbook.kitchen import Kitchen
from tests.cookbook.recipes import RUN, Recipe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(kitchen.missing() is not None, reason=str(kitchen.missing())),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kitchen]:
    with kitchen.kitchen(tmp_path_factory.mktemp("cookbook")) as at:
        yield at


@pytest.mark.parametrize("recipe", RUN, ids=lambda recipe: recipe.name.replace(", ", "-").replace(" ", "-"))
def test_a_recipe_runs_unchanged(recipe: Recipe, served: Kitchen):
    if (why := kitchen.missing(recipe)) is not None:
        pytest.skip(why)
    kitchen.cook(recipe, served)
