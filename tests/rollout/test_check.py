"""The embedded engine's cache is held against transformers' plain forward before a run."""

import pytest
from transformers import DiffLlamaConfig

from fppo import models
from fppo.rollout import cache as caches
from fppo.rollout.check import check_engine
from tests.models.families import COMMON, CONFIGS, DYNAMIC, LONGROPE

# DiffLlama's layers ask for attention twice
OTHERS = {
    "longrope": LONGROPE,
    "dynamic": DYNAMIC,
    "diffllama": DiffLlamaConfig(**COMMON),
}


@pytest.mark.parametrize("name", [*CONFIGS, *OTHERS])
def test_what_decodes_as_transformers_computes_is_accepted(name):
    check_engine(models.build({**CONFIGS, **OTHERS}[name]))


def test_a_cache_that_mixes_up_columns_is_refused(monkeypatch):
    plain = caches.decode_attention
    monkeypatch.setattr(
        caches, "decode_attention", lambda layers, column, first, bias: plain(layers, column, first + 5, bias)
    )
    with pytest.raises(ValueError, match="model type 'llama': the log-probs of the embedded engine"):
        check_engine(models.build(CONFIGS["llama"]))
