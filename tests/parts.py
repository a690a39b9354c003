"""The library's own parts by the names that settings have for them."""

import importlib
from functools import partial

from fppo import advantages
from fppo.advantages.columns import reads
from fppo.settings.tables import ESTIMATORS


def _function(path):
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


EVERY_ESTIMATOR = {name: _function(path) for name, (path,) in ESTIMATORS.items()}
EVERY_ESTIMATOR["td"] = partial(advantages.td, steps=1)
GROUPED = [name for name, fn in EVERY_ESTIMATOR.items() if reads(fn, "groups")]
WHITENED = [name for name, fn in EVERY_ESTIMATOR.items() if fn in advantages.WHITENED]
