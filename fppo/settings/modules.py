"""Functions that settings name: their modules are found and read, but not run, so this takes no time."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import attrs

from fppo._errors import did_you_mean, nearest
from fppo.fields import Problem
from fppo.rewards.builtin import builtins
from fppo.rewards.resolve import GIVEN
from fppo.settings.component import parts, spec_of
from fppo.settings.learning import AlgorithmSettings
from fppo.settings.model import ModelSettings
from fppo.settings.resolve import AUTO
from fppo.settings.train import TrainSettings
from fppo.workers.imports import search
from fppo_kernels.table import BUILTIN

_SECTIONS = {"model": ModelSettings, "algorithm": AlgorithmSettings}
KERNELS = {  # the allowed names of each setting for a kernel
    f"{section}.{field.name}": (*([AUTO] if field.default == AUTO else []), *BUILTIN[field.name])
    for section, cls in _SECTIONS.items()
    for field in attrs.fields(cls)
    if field.name in BUILTIN
}
# words by which a file may define names that it does not spell
_INDIRECT = {"globals", "locals", "vars", "setattr", "exec", "eval", "__dict__", "__getattr__"}


def kernels_named(settings: TrainSettings) -> dict[str, str]:
    """The name of the kernel that each setting in `KERNELS` gives, by setting."""
    paths = [path.split(".") for path in KERNELS]
    return {f"{section}.{op}": getattr(getattr(settings, section), op) for section, op in paths}


def own_functions(settings: TrainSettings) -> list[tuple[str, str]]:
    """Pairs (setting, name) for all settings that name a function of the user's, as module:function."""
    data, turns, environment = settings.data, settings.rollout.turns, settings.rollout.environment
    named = [
        *((f"{path}.name", part.name) for path, part, _ in parts(settings)),
        *kernels_named(settings).items(),
        *(("reward.functions", name) for name in settings.reward.functions),
        *(("log.loggers", name) for name in settings.log.loggers),
        *(("log.observers", name) for name in settings.log.observers),
        ("rollout.turns.respond", turns.respond),
        ("rollout.environment.play", environment.keywords.get("play") if environment.is_agent else None),
        *((f"data.{name}", getattr(data, name)) for name in ("rows", "eval_rows", "sampler")),
    ]
    return [(setting, name) for setting, name in named if name and ":" in name]


def module_problems(settings: TrainSettings) -> list[Problem]:
    """List the problems of functions that settings name: modules that are missing, are no Python or lack the function,
    and unknown names of kernels and rewards."""
    lines = []
    for setting, name in kernels_named(settings).items():
        if name and ":" not in name and name not in (known := KERNELS[setting]):
            text = f"there is no such kernel; {did_you_mean(name, known)} and module:function"
            lines.append(Problem(setting, name, text))
    known = builtins()
    for name in settings.reward.functions:
        if ":" not in name and name not in known:
            text = f"there is no such reward; {did_you_mean(name, sorted(known))} and module:function"
            lines.append(Problem("reward.functions", name, text))
    if settings.rollout.environment.is_agent and (lacking := lacking_of_server()):
        lines.append(Problem("rollout.environment.name", settings.rollout.environment.name, lacking))
    search([*settings.module_dirs, os.getcwd()])
    absent = ((name, _wrong(name)) for name in settings.model.import_)
    lines += [Problem("model.import", name, text) for name, text in absent if text is not None]
    imported = [(setting, name) for setting, name in own_functions(settings) if name.partition(":")[0] != GIVEN]
    wrong = ((setting, name, _wrong(*name.split(":", 1))) for setting, name in imported)
    return [*lines, *(Problem(setting, name, text) for setting, name, text in wrong if text is not None)]


def lacking_of_server() -> str | None:
    """A message on the packages that serving needs and that are missing, with the command that installs them; None if
    all are installed."""
    lacking = [each for each in ("fastapi", "uvicorn") if importlib.util.find_spec(each) is None]
    return f"{' and '.join(lacking)} cannot be imported: pip install 'fppo[serve]'" if lacking else None


def lacking_of_tinker() -> str | None:
    """A message with the command that installs the package of the tinker protocol; None if it is installed."""
    if importlib.util.find_spec("tinker") is not None:
        return None
    return "--tinker: the package tinker, whose protocol it is, cannot be imported: pip install 'fppo[tinker]'"


def _wrong(module: str, path: str = "") -> str | None:
    """The problem of the function "module:path", or of the module alone, as far as the module's source tells; None if
    it tells of none."""
    try:
        spec = spec_of(module)
    except (ImportError, ValueError):  # of a finder of the user's, or a module without a spec: importing it will tell
        return None
    if spec is None:
        return f"the module {module!r} does not import: there is none beside the settings file, here, or installed"
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        source = importlib.util.decode_source(Path(spec.origin).read_bytes())  # by its mark, or what it declares
        code = compile(source, spec.origin, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, OSError) as error:
        return f"the module {module!r} does not import: {type(error).__name__}: {error}"
    name, words = path.split(".")[0], set(re.findall(r"\w+", source))
    hidden = words & _INDIRECT or re.search(r"import\s*\(?\s*\*", source) or spec.submodule_search_locations
    if not name or name in words or hidden:
        return None
    near = nearest(name, code.co_names)
    return f"{module!r} has no {name!r}{f'; did you mean {near!r}?' if near else ''}"
