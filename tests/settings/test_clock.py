"""Which numbers of a run the clock decides, and who reads them."""

from __future__ import annotations

from typing import Any

from fppo.settings.clock import said_of_clock
from tests import tiny_run


def test_a_run_whose_turns_others_answer_says_whose_numbers_the_clock_decides(tmp_path):
    """At which rounding, and by which settings updates read it."""

    def said(**changes: Any) -> str:
        return " ".join(said_of_clock(tiny_run.settings(tmp_path, **changes)))

    turns = {"rollout__turns__respond": "mine:respond", "rollout__turns__max_turns": 2}
    assert said() == ""
    assert said(**turns, rollout__exact=True) == ""
    varies = "turns are decoded as answers come, so the last digits of sampled log-probs vary from run to run: "
    keeps = "; rollout.exact = true keeps all bits"
    passed = {**turns, "algorithm__old_log_probs": "pass"}
    assert said(**passed) == f"{varies}metrics alone read them"
    engine = said(**turns, algorithm__old_log_probs="engine")
    assert engine == f"{varies}algorithm.old_log_probs = 'engine' reads them, so updates vary{keeps}"
    corrected = said(**passed, algorithm__correction="rollout")
    assert corrected == f"{varies}algorithm.correction = 'rollout' reads them, so updates vary"
