"""The committed page of settings is what its script writes from the classes."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

from fppo.settings import files

from .pages import ROOT


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("settings_page", ROOT / "docs" / "settings_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = _script()
ROWS = re.findall(
    r"^\| `([\w.]+)` \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", SCRIPT.PAGE.read_text(), flags=re.MULTILINE
)


def test_the_committed_page_is_current():
    assert SCRIPT.PAGE.read_text() == SCRIPT.page(), "run python docs/settings_page.py"


def test_the_page_has_each_setting_once_with_its_words():
    names = [path for path, *_ in ROWS if not path.startswith("placement.pools.NAME")]
    paths = [path for path, kind in files.paths().items() if not path.startswith("placement.pools.")]
    assert sorted(names) == sorted(paths)
    assert all(kind and text and readers for _, _, kind, text, readers in ROWS)


def test_the_page_says_default_bounds_and_readers():
    rows = {path: rest for path, *rest in ROWS}
    assert rows["rollout.n"][:2] == ["`1`", "a whole number; 1 or more"]
    assert rows["algorithm.kl.controller"][1] == "one of fixed, adaptive"
    assert rows["data.path"][3] == "train, sft"
    assert rows["data.shuffle"][3] == "train"
    assert rows["sft.epochs"][3] == "sft"
