"""Kernels on the very calls of a model: each option that it uses and a kernel ignores is named, and good ones pass."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PhiConfig

from fppo import laws, models
from fppo.commands import cli
from fppo.laws import LawViolation
from fppo.laws.calls import screen_calls
from fppo.models.model import Model
from fppo.runs.serving import served_policy
from fppo.settings import files
from fppo_kernels import table
from fppo_kernels.attention.eager import eager
from fppo_kernels.decode_attention.eager import eager as decode
from fppo_kernels.glu.eager import eager as gated
from fppo_kernels.log_probs.reference import reference
from fppo_kernels.rms_norm.eager import eager as norm
from tests import tiny, tiny_run
from tests.models import families


@cache
def model_of(name: str) -> Model:
    phi = PhiConfig(vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4)
    own = {"qwen2": tiny.config(), "phi": phi}  # phi's head has a bias
    return models.build((families.CONFIGS | families.EXPERTS | own)[name])


def ignores(fn, *names):
    """A kernel that takes keywords, and computes without some of them."""

    def mine(*args, **keywords):
        return fn(*args, **{name: x for name, x in keywords.items() if name not in names})

    return mine


def own_scale(query, key, value, *, scale, **keywords):
    return eager(query, key, value, scale=query.shape[-1] ** -0.5, **keywords)


def heads_in_turn(query, key, value, **keywords):
    """Query head h reads key head h % Hkv."""
    groups = query.shape[1] // key.shape[1]
    return eager(query, key.repeat(1, groups, 1), value.repeat(1, groups, 1), **keywords)


def one_sequence(query, key, value, *, lengths, **keywords):
    end = lengths.cu_seqlens[-1:]
    whole = lengths._replace(cu_seqlens=torch.cat([end * 0, end]), lengths=(len(query),), max_length=len(query))
    return eager(query, key, value, lengths=whole, **keywords)


def of_float32(query, key, value, **keywords):
    assert query.dtype == torch.float32, "only float32\nis supported\nhere\nby\nthis kernel"
    return eager(query, key, value, **keywords)


def without_bias(x, weight, bias=None):
    return x @ weight.T


def of_silu(gate, up, *, activation):
    return gated(gate, up, activation="silu")


def one_row(x, weight, *, eps, offset=0.0):
    return norm(x, weight, eps=eps, offset=offset)[0]


def all_columns(query, keys, values, bias=None, **keywords):
    return decode(query, keys, values, None, **keywords)


BAD: list[tuple[str, Any, str, str]] = [
    ("attention", ignores(eager, "window"), "mistral", "without window = 3: it ignores window"),
    ("attention", ignores(eager, "softcap"), "gemma2", "without softcap = 50.0: it ignores softcap"),
    ("attention", ignores(eager, "sinks"), "gpt_oss", "it ignores sinks"),
    ("attention", own_scale, "gemma2", "scale = 0.447"),
    ("attention", heads_in_turn, "qwen2", "expected"),
    ("attention", one_sequence, "qwen2", "expected"),
    ("attention", of_float32, "qwen2", "it raised AssertionError: only float32"),
    ("decode_attention", ignores(decode, "softcap"), "gemma2", "it ignores softcap"),
    ("decode_attention", ignores(decode, "sinks"), "gpt_oss", "it ignores sinks"),
    ("decode_attention", all_columns, "qwen2", "it ignores bias"),
    ("log_probs", ignores(reference, "softcap"), "gemma2", "without softcap = 30.0: it ignores softcap"),
    ("log_probs", ignores(reference, "scale"), "cohere", "without scale = 0.25: it ignores scale"),
    ("log_probs", ignores(reference, "bias"), "phi", "it ignores bias"),
    ("log_probs", ignores(reference, "temperature"), "qwen2", "without temperature = 0.5: it ignores temperature"),
    ("log_probs", ignores(reference, "entropy"), "qwen2", "entropy is NoneType, expected a Tensor"),
    ("linear", without_bias, "qwen2", "it ignores bias"),
    ("rms_norm", ignores(norm, "offset"), "gemma2", "it ignores offset"),
    ("rms_norm", one_row, "qwen2", "has the shape"),
    ("glu", of_silu, "gemma2", "it ignores activation"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("op", "kernel", "name", "words"), BAD, ids=[f"{x[0]}-{x[3]}-{i}" for i, x in enumerate(BAD)])
def test_what_a_kernel_ignores_of_what_a_model_asks_is_named(op, kernel, name, words):
    with pytest.raises(LawViolation) as caught:
        screen_calls(op, kernel, model_of(name), temperature=0.5, dtype=torch.bfloat16)
    told = str(caught.value)
    assert words in told
    assert f"breaks the law \"calls of the model\": on what a model of type '{name}' asks of it" in told
    assert len(told.splitlines()) <= 9
    assert len(told) < 1200


FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
GOOD = [("gemma2", FLOAT32), ("gemma2", BFLOAT16), ("gpt_oss", FLOAT32), ("cohere", BFLOAT16), ("qwen3", BFLOAT16)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [*GOOD, ("gpt2", torch.float16)])
def test_every_kernel_of_the_library_keeps_the_calls_of_every_kind_of_model(name, dtype):
    """Also as a user's own, under another name."""
    model = model_of(name)
    lacking = models.attention_needs(model) | {str(dtype).removeprefix("torch.")}
    for op in ("attention", "decode_attention", "log_probs", *table.INSIDE):
        for kernel in table.BUILTIN[op].values():
            if kernel.refuse() is None and not kernel.lacks & lacking and not kernel.opaque:
                screen_calls(op, kernel.load(), model, temperature=0.7, dtype=dtype)


def test_a_window_that_no_row_of_the_run_reaches_is_no_matter():
    kernel = ignores(eager, "window")
    screen_calls("attention", kernel, model_of("mistral"), longest=3)
    with pytest.raises(LawViolation, match="it ignores window"):
        screen_calls("attention", kernel, model_of("mistral"), longest=4)


def test_operations_that_the_model_never_asks_for_are_not_tried():
    screen_calls("glu", of_silu, model_of("gpt2"))
    screen_calls("attention", ignores(eager, "window", "softcap", "sinks"), model_of("qwen2"))


@pytest.mark.slow
def test_what_an_own_kernel_says_that_it_lacks_is_left_out_by_laws_and_needed_by_models():
    def mine(query, key, value, *, lengths, scale, window=None, softcap=None, sinks=None):
        return eager(query, key, value, lengths=lengths, scale=scale, window=window)

    laws.screen_kernel("attention", mine)
    with pytest.raises(LawViolation):
        laws.check_kernel("attention", mine, dtypes=[torch.float32])
    mine.lacks = ("softcap", "sinks")  # pyright: ignore[reportFunctionMemberAccess]
    assert laws.check_kernel("attention", mine, dtypes=[torch.float32])
    known = table.register("attention", "mine", table.own("attention", mine))
    assert table.get("attention", "mine", needs=models.attention_needs(model_of("mistral")), table=known) is mine
    with pytest.raises(ValueError, match="kernel attention/mine has no softcap, which is needed"):
        table.get("attention", "mine", needs=models.attention_needs(model_of("gemma2")), table=known)
    mine.lacks = "softcap"  # pyright: ignore[reportFunctionMemberAccess]
    with pytest.raises(ValueError, match=r"mine\.lacks must be names"):
        table.own("attention", mine)


# before a run

NO_WINDOW = """
from fppo_kernels.attention.eager import eager

def no_window(query, key, value, *, lengths, scale, window=None, softcap=None, sinks=None, key_lengths=None):
    return eager(query, key, value, lengths=lengths, scale=scale, softcap=softcap, sinks=sinks, key_lengths=key_lengths)
"""


@pytest.fixture
def task(tmp_path, monkeypatch):
    """A policy with a window of three tokens, and beside it a kernel that ignores windows."""
    tiny_run.write_task(tmp_path)
    place = tmp_path / "start" / "config.json"
    config = json.loads(place.read_text())
    windows = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}
    windows["layer_types"] = ["sliding_attention"] * config["num_hidden_layers"]
    place.write_text(json.dumps(config | windows))
    (tmp_path / "calls_mine.py").write_text(NO_WINDOW)
    monkeypatch.chdir(tmp_path)
    own = {"model__attention": "calls_mine:no_window", "data__eval_path": ["test.jsonl"]}
    files.save(tiny_run.settings(tmp_path, steps=1, **own), tmp_path / "run.toml")
    return tmp_path


def _refused(said: str) -> None:
    assert "model.attention = 'calls_mine:no_window': no_window breaks the law" in said
    assert "it ignores window" in said
    assert len(said[said.index("model.attention") :].splitlines()) <= 15


@pytest.mark.parametrize("command", ["train", "eval", "sft", "check"])
def test_every_command_that_computes_by_an_own_kernel_refuses_one_that_ignores_the_models_window(task, capsys, command):
    if command == "eval":  # of a run that began without the check
        assert cli.main(["train", "run.toml", "--check", "false"]) == 0
        settings = task / "run" / "settings.toml"
        settings.write_text(settings.read_text().replace("check = false", "check = true"))
    flags = {"sft": ["--sft.response", "answer"]}.get(command, [])
    capsys.readouterr()
    assert cli.main([command, str(task / "run") if command == "eval" else "run.toml", *flags]) in (1, 2)
    _refused("".join(capsys.readouterr()))


def test_a_policy_is_not_served_by_a_kernel_that_ignores_its_window(task):
    settings = files.load(task / "run.toml")
    with pytest.raises(files.SettingsError) as caught:
        served_policy(settings, begins=True)
    _refused(str(caught.value))
    served_policy(files.replace(settings, {"check": False}), begins=True)


def test_a_script_with_an_own_kernel_is_told_at_its_program():
    from tests.pipeline.test_own import losses, program

    model = models.build(tiny.config(use_sliding_window=True, sliding_window=3, max_window_layers=0))
    with pytest.raises(LawViolation, match="it ignores window"):
        program(losses.ppo_clip, attention=ignores(eager, "window"), model=model)
    program(losses.ppo_clip, attention=ignores(eager, "window"))
