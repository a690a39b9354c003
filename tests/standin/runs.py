"""What runs on the stand-in, in a process of its own: `python -m tests.standin.runs TASK RESULT CASE ...`."""

import functools
import json
import sys
import traceback
from pathlib import Path

import torch

from tests.standin import device

device.register()

from fppo import devices  # noqa: E402
from fppo.commands import actions, cli  # noqa: E402
from fppo.settings import files  # noqa: E402
from tests.standin.cases import settings_of  # noqa: E402

OWN = tuple(str(Path(module.__file__).parent) for module in (sys.modules["fppo"], sys.modules["fppo_kernels"]))


def watch_cuda(calls: list[str]) -> None:
    """Note each function of torch.cuda that fppo calls, and where."""

    def noted(name, fn):
        @functools.wraps(fn)
        def call(*args, **keywords):
            caller = sys._getframe(1)
            if caller.f_code.co_filename.startswith(OWN):
                calls.append(f"torch.cuda.{name} at {caller.f_code.co_filename}:{caller.f_lineno}")
            return fn(*args, **keywords)

        return call

    for name, value in vars(torch.cuda).items():
        if callable(value) and not isinstance(value, type) and not name.startswith("_"):
            setattr(torch.cuda, name, noted(name, value))


def strays() -> list[str]:
    """Operations on tensors of two devices that the stand-in lets through."""
    own, other = torch.ones(3, 3, device=device.NAME), torch.ones(3, 3)
    number = torch.zeros(3, dtype=torch.long)
    mixed = {
        "add": lambda: own + other,
        "product": lambda: other @ own,
        "where": lambda: torch.where(own > 0, other, own),
        "cat": lambda: torch.cat([own, other]),
        "embedding": lambda: torch.nn.functional.embedding(number, own),
        "index": lambda: other[number.to(device.NAME)],
        "mask": lambda: own.masked_fill(other > 0, 0.0),
        "in place": lambda: other.add_(own),
    }
    passed = []
    for name, run in mixed.items():
        try:
            run()
            passed.append(name)
        except RuntimeError:
            pass
    return passed


def main(task: str, result: str, *cases: str) -> None:
    calls: list[str] = []
    watch_cuda(calls)
    told = {"strays": strays(), "auto": str(devices.named("auto", "device")), "cuda": calls, "codes": {}}
    told["widest"] = str(devices.widest(torch.device(device.NAME)))
    for name in cases:
        given = settings_of(name, Path(task), Path(result).parent, device.NAME)
        path = Path(result).parent / f"{name}.toml"
        files.save(given, path)
        try:
            told["codes"][name] = actions.train(given)
            for command in ("check", "plan") if name == "ppo" else ():
                told["codes"][f"{command} {name}"] = cli.main([command, str(path)])
        except Exception:
            told["codes"][name] = traceback.format_exc()
    Path(result).write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
