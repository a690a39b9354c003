"""The embedded engine's cache is held against transformers' plain forward before a run."""

import attrs
import pytest
import torch
from transformers import DiffLlamaConfig

from fppo import models
from fppo.models import bases, lora
from fppo.rollout import cache as caches
from fppo.rollout.check import check_engine
from tests.models.families import COMMON, CONFIGS, DYNAMIC, LONGROPE

# DiffLlama's layers ask for attention twice
OTHERS = {
    "longrope": LONGROPE,
    "dynamic": DYNAMIC,
    "diffllama": DiffLlamaConfig(**COMMON),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CONFIGS, *OTHERS])
def test_what_decodes_as_transformers_computes_is_accepted(name):
    check_engine(models.build({**CONFIGS, **OTHERS}[name]))


def test_a_cache_that_mixes_up_columns_is_refused(monkeypatch):
    plain = caches.decode_attention
    monkeypatch.setattr(
        caches,
        "decode_attention",
        lambda kernel, layers, column, first, bias: plain(kernel, layers, column, first + 5, bias),
    )
    with pytest.raises(ValueError, match="model type 'llama': the log-probs of the embedded engine"):
        check_engine(models.build(CONFIGS["llama"]))


def adapted(name, kind=None, targets=("all-linear",)):
    """The model as it is before its base is read, in 16 bits: it decodes with factors."""
    model = attrs.evolve(models.build(CONFIGS[name]), compute_dtype=torch.bfloat16)
    model = model if kind is None else bases.in_codes(model, kind, torch.float32)
    return lora.without_base(model, models.Lora(3, 6.0, targets))


@pytest.mark.parametrize(
    ("name", "targets"),
    [("llama", ("all-linear", "lm_head")), ("gpt2", ("all-linear",)), ("qwen3_moe", ("all-linear",))],
)
@pytest.mark.parametrize("kind", [None, "nf4"])
def test_factors_and_codes_are_decoded_before_a_run_and_a_lost_factor_is_refused(name, targets, kind, monkeypatch):
    if kind is not None:
        pytest.importorskip("bitsandbytes", reason="pip install 'fppo[quantised]'")
    model, decoded = adapted(name, kind, targets), lora.decoded
    check_engine(model)
    lost = "layers.1.self_attn.v_proj.weight.lora_B" if name != "gpt2" else "h.1.attn.c_attn.weight.lora_B"

    def losing(model, params, **others):
        model, params = decoded(model, params, **others)
        return model, {path: torch.zeros_like(x) if path.endswith(lost) else x for path, x in params.items()}

    monkeypatch.setattr(lora, "decoded", losing)
    words = f"model type '{name}': the log-probs of the embedded engine's tokens with an adapter differ"
    with pytest.raises(ValueError, match=words):
        check_engine(model)
