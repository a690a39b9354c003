"""What an environment returns is checked before it leaves its process."""

import json
import math

import pytest

from fppo.environments.calls import _packed
from fppo.environments.protocol import Step


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, "much"])
@pytest.mark.parametrize("where", ["reward", "info"])
def test_a_number_that_is_not_finite_is_refused(number, where):
    step = Step(None, [], number, False, {}) if where == "reward" else Step(None, [], 0.0, False, {"depth": number})
    fields, wrong = json.loads(_packed(step, Step)["answer"])
    assert fields is None
    assert f"{number!r}" in wrong


def test_finite_numbers_pass():
    fields, wrong = json.loads(_packed(Step(None, [], 1, False, {"depth": 2}), Step)["answer"])
    assert wrong is None
    assert fields[2:] == [1.0, False, {"depth": 2.0}]
