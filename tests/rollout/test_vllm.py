"""What the vLLM engine says where vLLM is not, or is too old. With vLLM: tests/vllm."""

import importlib.metadata
import importlib.util
import subprocess
import sys

import pytest

from fppo.rollout import vllm_host
from fppo.rollout.vllm import VllmEngine, VllmOptions
from tests.models.families import make


def test_importing_the_engine_imports_no_vllm():
    code = "import sys, fppo.rollout.vllm; assert not any(m.split('.')[0] == 'vllm' for m in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_absent_and_old_ones_are_refused(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find_spec(name))
    with pytest.raises(ValueError, match=r"vLLM is not installed; fppo runs on vLLM 0\.32 and newer: pip install"):
        VllmEngine(make("qwen2")[0], pad_token_id=0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.2" if name == "vllm" else version(name))
    with pytest.raises(ValueError, match=r"vllm 0\.9\.2 is installed; fppo runs on vLLM 0\.32 and newer"):
        VllmEngine(make("qwen2")[0], pad_token_id=0)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.33.1+cpu")
    assert vllm_host.check_installed() == "0.33.1+cpu"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 0}, "max_model_len = 0: give 1 or more"),
        ({"max_rows": 0}, "max_rows = 0"),
        ({"cache_gb": 0.0}, "cache_gb = 0.0: give a number above 0"),
        ({"memory_share": 1.5}, "memory_share = 1.5: give a number above 0 and at most 1"),
        ({"restarts": -1}, "restarts = -1: give 0 or more"),
        ({"patience": 0.0}, "patience = 0.0"),
    ],
)
def test_options_that_mean_nothing_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        VllmOptions(**settings)


def test_a_dtype_that_vllm_has_not():
    with pytest.raises(ValueError, match="dtype = 'float64': vLLM computes in one of"):
        VllmEngine(make("qwen2")[0], pad_token_id=0, options=VllmOptions(dtype="float64"))
