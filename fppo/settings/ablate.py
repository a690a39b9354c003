"""The settings of `fppo ablate`; no torch, so that its help answers at once."""

from __future__ import annotations

from typing import Annotated

import attrs
import tyro

from fppo.devices import wrong_name
from fppo.fields import above, at_least, flag_problems, nonempty, output_file, place, setting

SHAPE = "write sizes as N=256,H=512"


def _shapes(values: tuple[str, ...]) -> str | None:
    for text in values:
        for part in text.split(","):
            name, _, size = part.partition("=")
            if not name or not size.replace("_", "").isdecimal():
                return f"{part!r} is not a size; {SHAPE}"
    return None


def _functions(values: tuple[str, ...]) -> str | None:
    wrong = next((text for text in values if not all(text.rpartition("=")[2].partition(":")[::2])), None)
    return None if wrong is None else f"{wrong!r} is not of the form module:function or op=module:function"


@attrs.frozen(kw_only=True)
class AblateSettings:
    """Runs every implementation of operations side by side: laws, errors, time, memory; or a run's step under each."""

    op: tuple[str, ...] = setting(("log_probs",), nonempty("give operations, as log_probs,attention; or all"))
    """Operations, by commas or spaces, as log_probs, attention, linear, rms_norm, gae, adamw, unpad; or all."""
    dtypes: tuple[str, ...] = setting(("float32", "bfloat16"), nonempty("give dtypes, as float32,bfloat16"))
    """What to compute in: float32, bfloat16, float64; an operation leaves out what it is not made for."""
    shapes: tuple[str, ...] = setting((), _shapes)
    """Sizes, as N=256,H=512,V=32000; what is left out has its default, and more shapes go behind spaces."""
    model: str | None = setting(None, place)
    """Take the sizes of a model: a directory with its config.json, a GGUF file, or a name, as qwen2.5-0.5b."""
    implementations: tuple[str, ...] = setting(())
    """Only these of the table, by commas or spaces; none: all."""
    with_: Annotated[tuple[str, ...], tyro.conf.arg(name="with")] = setting((), _functions, name="with")
    """Functions of your own beside them: module:function, or op=module:function."""
    repeats: int = setting(5, at_least(1))
    """Rounds of timing, of which the median is shown."""
    law_seconds: float = setting(5.0, at_least(0))
    """How long an implementation's laws may take to check, in each dtype; 0: they are not checked."""
    threads: int | None = setting(None, at_least(1))
    """Threads of the CPU; None: torch's choice."""
    device: str = setting("auto", wrong_name)
    """Where it runs: auto (an accelerator if there is one), cpu, cuda or cuda:N (ROCm too), xpu, npu or mps."""
    json: str | None = setting(None, place, output_file)
    """Write everything to this JSON file; -, or nothing behind it: print it in place of the table."""
    png: str | None = setting(None, place, output_file)
    """Draw time and error to this PNG file."""
    replay: str | None = setting(None, place)
    """The output_dir of a run: compute one step of it again under each implementation of --op, others as in the run."""
    step: int | None = setting(None, above(0))
    """The step to replay."""

    @property
    def ops(self) -> tuple[str, ...]:
        """The operations of `op`, split at commas."""
        return _split(self.op)

    @property
    def names(self) -> tuple[str, ...]:
        """The implementations to run, split at commas."""
        return _split(self.implementations)

    @property
    def dtype_names(self) -> tuple[str, ...]:
        """The dtypes to run, split at commas."""
        return _split(self.dtypes)

    @property
    def sizes(self) -> list[dict[str, int]]:
        """The shapes to run, each as a mapping of sizes by name."""
        return [{n: int(size) for n, size in (p.split("=") for p in text.split(","))} for text in self.shapes]


def _split(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part for text in values for part in text.split(",") if part))


def problems(settings: AblateSettings) -> list[str]:
    """List the problems of the settings, one line each."""
    lines = flag_problems(settings)
    if (settings.replay is None) != (settings.step is None):
        lines.append("--replay RUN and --step N go together: the run, and which of its steps")
    if settings.replay is not None:
        unread = {"shapes": (), "model": None, "png": None, "dtypes": ("float32", "bfloat16"), "device": "auto"}
        lines += [
            f"--{name}: a replayed step has the shapes, dtypes and device of its run, and no chart; leave it out"
            for name, default in unread.items()
            if getattr(settings, name) != default
        ]
    if settings.model is not None and settings.shapes and {"H", "V"} & {n for s in _try(settings) for n in s}:
        lines.append("--shapes gives H or V, which --model gives too; give one of them")
    return lines


def _try(settings: AblateSettings) -> list[dict[str, int]]:
    return [] if _shapes(settings.shapes) else settings.sizes
