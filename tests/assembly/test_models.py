"""What the command line loads: models that run as in transformers, each read once."""

import pytest

from fppo import models
from fppo.assembly import parts
from fppo.assembly.run import assemble
from tests import tiny_run
from tests.models.families import LONGROPE


def test_rows_that_may_outgrow_the_rope_are_refused_before_any_work(tmp_path):
    settings = tiny_run.settings(tmp_path, data__max_prompt_tokens=9, rollout__max_tokens=4)
    with pytest.raises(ValueError, match=r"max_prompt_tokens = 9 and rollout\.max_tokens = 4 allow rows of 13.*'phi3'"):
        parts.check_length(settings, models.build(LONGROPE))
    parts.check_length(tiny_run.settings(tmp_path, data__max_prompt_tokens=8), models.build(LONGROPE))


def test_the_embedded_engine_is_held_against_transformers_before_a_run(tmp_path, monkeypatch):
    tiny_run.write_task(tmp_path)
    checked = []
    monkeypatch.setattr(parts, "check_engine", lambda model: checked.append(model.config.model_type))
    with assemble(tiny_run.settings(tmp_path)):
        assert checked == ["qwen2"]
