"""The settings of `fppo check` beside those of the run; no torch, so that its help answers at once."""

from __future__ import annotations

import attrs

from fppo.fields import at_least, at_most, output_file, place, setting


@attrs.frozen(kw_only=True)
class CheckSettings:
    """Looks a run over without starting it: all problems, what it will need, prompts as the model sees them, rewards.

    Nothing is written, no weights are loaded and no step is taken. Exits with 0 if nothing is wrong, with 1 if the run
    would not fit, or a reward fails on a ground truth, and with 2 if it would not start.
    """

    prompts: int = setting(3, at_least(0), at_most(100))
    """Prompts to show and to score: the first, the shortest, the longest, then the next ones."""
    gpu: str | None = setting(None)
    """What a rank runs on, as fppo plan has it: a100-80, h100, h200, b200 or cpu; None: what is here."""
    json: str | None = setting(None, place, output_file)
    """Write everything to this JSON file; -, or nothing behind it: print it in place of the text."""
