"""One Hypothesis profile, and jaxtyping's checks of every annotated shape in the rooms of tensor functions."""

import gc
import importlib.util
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.costs import Costs, SlowTests
from tests.distributed.preloaded import preload_more

# what is imported stays, and to look through it again and again takes a sixth of the time of the imports
gc.disable()

# no deadline (the first call imports and warms up), the same examples in every run; `--hypothesis-profile thorough`
# draws more of them, and others in each run, `--hypothesis-profile ci` does so for loss math alone
settings.register_profile("fppo", deadline=None, derandomize=True, max_examples=12)
settings.register_profile("thorough", deadline=None, max_examples=100)
settings.register_profile("ci", settings.get_profile("fppo"))
settings.load_profile("fppo")
LOSS_MATH = ("advantages", "losses")
torch.set_num_threads(1)
preload_more()

# not what torch.compile or Triton compiles, as log_probs/compiled, linear/onednn, rms_norm/functional
CHECKED = (
    "fppo.advantages",
    "fppo.losses",
    "fppo.steps.actor",
    "fppo.steps.adamw_8bit",
    "fppo.steps.forward",
    "fppo.steps.loop",
    "fppo.steps.muon",
    "fppo.steps.ranks",
    "fppo_kernels.adamw",
    "fppo_kernels.attention.eager",
    "fppo_kernels.attention.sdpa",
    "fppo_kernels.context",
    "fppo_kernels.decode_attention.eager",
    "fppo_kernels.decode_attention.sdpa",
    "fppo_kernels.gae",
    "fppo_kernels.glu.eager",
    "fppo_kernels.layer_norm",
    "fppo_kernels.linear.plain",
    "fppo_kernels.log_probs.chunked",
    "fppo_kernels.log_probs.reference",
    "fppo_kernels.padding",
    "fppo_kernels.ring",
    "fppo_kernels.rms_norm.eager",
    "fppo_kernels.ulysses",
)
if importlib.util.find_spec("jaxtyping") and importlib.util.find_spec("beartype"):
    import jaxtyping

    from tests.hook import checked, once

    jaxtyping.jaxtyped = once(jaxtyping.jaxtyped)
    jaxtyping.install_import_hook(CHECKED, f"{checked.__module__}.{checked.__name__}")
else:
    jaxtyping = None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options for those who change the tests; `.ci/run` gives them all."""
    parser.addoption("--budgets", action="store_true", help="fail if a folder exceeds tests/budgets.toml")
    parser.addoption("--order", default="files", help="of the tests: files, reversed, or a text that shuffles them")
    parser.addoption("--slow-minutes", type=float, help="begin no slow test after this many minutes: skip the rest")


def pytest_configure(config: pytest.Config) -> None:
    """The tests' costs are measured and printed, and slow tests end in time."""
    config.pluginmanager.register(Costs(config), "costs")
    if config.getoption("--slow-minutes") is not None:
        config.pluginmanager.register(SlowTests(config.getoption("--slow-minutes")), "slow tests")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Reverse or shuffle the modules, and the tests in each. A module's tests stay together: they share fixtures."""
    order = config.getoption("--order")
    if order == "files":
        return
    modules: dict[Path, list[pytest.Item]] = defaultdict(list)
    for item in items:
        modules[item.path].append(item)
    drawn = random.Random(order)
    parts = list(modules.values())
    for part in (parts, *parts):
        part.reverse() if order == "reversed" else drawn.shuffle(part)
    items[:] = [item for part in parts for item in part]


def pytest_collectstart(collector: pytest.Collector) -> None:
    """In CI loss math is drawn for thoroughly: a test keeps the profile under which its module was imported."""
    if isinstance(collector, pytest.Module) and collector.config.getoption("--hypothesis-profile") == "ci":
        settings.load_profile("thorough" if collector.path.parent.name in LOSS_MATH else "fppo")


def pytest_collection_finish() -> None:
    """What the tests have imported is looked through by no later collection of garbage."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a module of tests leaves, as caches of what it called, is looked through by no later collection either: a
    seventh of all processor seconds went into that, most of it where tests and ablations collect garbage themselves."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_sessionfinish() -> None:
    """Some libraries complain of what was not collected."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def own_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget what a test imported from a temporary directory: the next test has a `mine.py` of its own."""
    before, path = {*sys.modules}, [*sys.path]
    yield
    place = str(tmp_path_factory.getbasetemp())
    for name in {*sys.modules} - before:
        own = getattr(sys.modules[name], "__dict__", {})  # a stub may have any attribute that is asked for
        places = [own.get("__file__"), *own.get("__path__", ())]
        if any(isinstance(x, str) and x.startswith(place) for x in places):
            del sys.modules[name]
    sys.path[:] = path


@pytest.fixture
def unhooked() -> Iterator[None]:
    """Without the checks of annotations, for what the functions themselves refuse."""
    for disabled in (True, False):
        if jaxtyping is not None:
            jaxtyping.config.update("jaxtyping_disable", disabled)
        if disabled:
            yield


@pytest.fixture(autouse=True, scope="module")
def first_curves(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of the curves of a module's runs those of the first chart are drawn, once, but in the tests of reports: all of
    them take as long as a tiny run."""
    charts = sys.modules.get("fppo.report.charts")
    with pytest.MonkeyPatch.context() as patch:
        if charts is not None and request.path.parent.name != "report":
            whole, left = charts.write_png, [1]
            patch.setattr(
                charts,
                "write_png",
                lambda drawn, path, *, title: whole(drawn[: left.pop() if left else 0], path, title=title),
            )
        yield


_HELD: set[tuple[str, str, bool]] = set()  # checks that have passed in this process, with the models' configs


def _once(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """A check of models that is made of each config once."""

    def checked(model: Any) -> None:
        own = check.__name__, model.whole_config.to_json_string(use_diff=False), model.trust_remote_code
        if model.frozen is not None or own not in _HELD:
            check(model)
            _HELD.add(own)

    return checked


@pytest.fixture(autouse=True, scope="module")
def held_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Models are held against transformers once for each config, but in the tests of models: a run loads three, and
    the checks took a twelfth of its time."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (("fppo.models.load", "check_model"), ("fppo.assembly.engines", "check_engine")):
            if module in sys.modules and request.path.parent.name != "models":
                patch.setattr(sys.modules[module], name, _once(getattr(sys.modules[module], name)))
        yield
