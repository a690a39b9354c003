"""Models in GGUF files: weights, tokenizer and config against gguf's own reading, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from fppo import models
from fppo.models.load import find_directory
from tests import gguf_world
from tests.gguf_world import WORDS, llama, rotated, stored_name, write
from tests.models.test_families import MASK, TOKENS, packed_logits, plain_logits

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
SIMPLE = {"F32": 1e-9, "F16": 1e-3, "BF16": 1e-2, "Q4_0": 0.2, "Q4_1": 0.2, "Q5_0": 0.1, "Q5_1": 0.1, "Q8_0": 0.01}
HEADS = {"heads": 4, "kv_heads": 2}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fppo" / "gguf"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*SIMPLE, *gguf_world.FACTORS])
def test_weights_are_those_that_gguf_dequantises(tmp_path, kind):
    wide = kind in gguf_world.FACTORS  # in blocks of 256
    model, params = llama(256 if wide else 64, layers=1 if wide else 2)
    written = write(tmp_path / "a.gguf", model, params, kind=kind)
    read, own = models.load(tmp_path / "a.gguf")
    assert read.whole_shapes == model.whole_shapes
    for name, x in own.items():
        expected = gguf.dequantize(written[stored_name(name)], gguf.GGMLQuantizationType[kind if x.ndim > 1 else "F32"])
        assert x.dtype == torch.float32
        np.testing.assert_array_equal(x.numpy(), rotated(name, expected.reshape(x.shape), **HEADS), err_msg=name)
        assert kind not in SIMPLE or x.sub(params[name]).abs().max() < SIMPLE[kind]


@pytest.mark.parametrize(("kind", "tied"), [("Q4_1", True), ("Q6_K", True), ("Q8_0", False)])
def test_log_probs_are_those_of_transformers(tmp_path, kind, tied):
    write(tmp_path / "a.gguf", *llama(256, layers=1, tied=tied), kind=kind)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf", dtype=torch.float64)
    model, params = models.load(tmp_path / "a.gguf", dtype=torch.float64)
    assert model.config.tie_word_embeddings == tied
    got = packed_logits(model, params).log_softmax(-1)
    expected = plain_logits(theirs.eval()).detach().log_softmax(-1)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    assert expected.std() > 0.1
    assert MASK.any()
    assert TOKENS.max() < model.config.vocab_size


def test_the_tokenizer_is_the_one_that_was_written(tmp_path):
    write(tmp_path / "a.gguf", *llama())
    words = AutoTokenizer.from_pretrained(find_directory(tmp_path / "a.gguf", weights=False))
    for text in ("Lin has 12 apples", "  30   more\n\n 7", "What's 123+4?<eos>", "ünknöwn"):
        assert words.encode(text) == WORDS.encode(text)
        assert words.decode(words.encode(text)) == text
    assert (words.eos_token_id, words.pad_token_id, words.bos_token) == (1, 0, None)
    shown = words.apply_chat_template([{"role": "user", "content": "7"}], tokenize=False, add_generation_prompt=True)
    assert shown == "<user>7<eos><assistant>"


@pytest.mark.slow
def test_what_is_unpacked_is_an_ordinary_directory_made_once(tmp_path):
    model, params = llama()
    write(tmp_path / "a.gguf", model, params, kind="Q8_0")
    config = find_directory(tmp_path / "a.gguf", weights=False)
    assert sorted(path.name for path in config.glob("*.safetensors")) == []
    whole = find_directory(tmp_path / "a.gguf")
    theirs = LlamaForCausalLM.from_pretrained(whole)
    assert getattr(theirs.config, "quantization_config", None) is None
    assert theirs.config.architectures == ["LlamaForCausalLM"]
    time = (whole / "model.safetensors").stat().st_mtime_ns
    assert find_directory(tmp_path / "a.gguf", weights=False) == find_directory(tmp_path / "a.gguf") == whole
    assert (whole / "model.safetensors").stat().st_mtime_ns == time
    write(tmp_path / "a.gguf", *llama(32))
    assert models.load(tmp_path / "a.gguf")[0].config.hidden_size == 32


@pytest.mark.slow
def test_files_beside_it_are_not_read(tmp_path):
    write(tmp_path / "a.gguf", *llama())
    models.save_config(llama(32)[0], tmp_path / "other")
    for file in (tmp_path / "other").iterdir():
        file.rename(tmp_path / file.name)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "other"}')
    words = AutoTokenizer.from_pretrained(find_directory(tmp_path / "a.gguf", weights=False))
    assert words.chat_template == gguf_world.TEMPLATE
    assert models.load(tmp_path / "a.gguf")[0].config.hidden_size == 64


def test_a_file_without_a_tokenizer_has_none(tmp_path):
    write(tmp_path / "a.gguf", *llama(), tokenizer=False)
    assert not list(find_directory(tmp_path / "a.gguf", weights=False).glob("tokenizer*"))


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_positions_scaled_as_llama_3_does(tmp_path, factor):
    """llama.cpp stores the divisors of frequencies, and transformers reads none of them."""
    scaled = {"rope_type": "llama3", "rope_theta": 5e5, "factor": factor, "low_freq_factor": 1.0}
    scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    model, params = llama(rope_parameters=scaled, max_position_embeddings=131_072)
    theirs = LlamaRotaryEmbedding(model.whole_config).inv_freq.numpy()
    divisors = 5e5 ** (-np.arange(8) / 8) / theirs
    write(tmp_path / "a.gguf", model, params, tensors={"rope_freqs.weight": divisors.astype(np.float32)})
    read, got = models.load(tmp_path / "a.gguf")
    assert read.config.rope_parameters == scaled
    assert all(torch.equal(x, params[name]) for name, x in got.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "clip"}, "cannot read a GGUF model of the architecture 'clip'"),
        ({"tensors": {"rope_freqs.weight": np.float32([1, 2, 3, 1, 2, 3, 1, 9])}}, "in a way that is not Llama 3's"),
        ({"more": {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}}, "are scaled (yarn by 4.0)"),
        ({"tensors": {"blk.0.attn_q.bias": np.zeros(64, np.float32)}}, "some of its tensors would go unread"),
        ({"left_out": "model.norm.weight"}, "does not hold a whole 'llama' model: missing ['model.norm.weight']"),
        ({"more": {"llama.embedding_length": 96}}, "cannot read its weights, of kinds F32"),
        ({"more": {"tokenizer.ggml.model": "rwkv"}}, "cannot read its tokenizer"),
    ],
)
def test_what_transformers_cannot_read_is_refused_by_name(tmp_path, cache, changes, message):
    write(tmp_path / "a.gguf", *llama(), **changes)
    with pytest.raises(ValueError) as caught:
        models.load(tmp_path / "a.gguf")
    assert str(caught.value).startswith(f"{tmp_path / 'a.gguf'}: ") or "does not hold" in str(caught.value)
    assert message in str(caught.value)
    assert str(caught.value).endswith("give the model's own directory, or its name on the hub")
    assert not list(cache.glob("*/model"))


def test_a_cache_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    write(tmp_path / "a.gguf", *llama())
    (tmp_path / "full").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "full"))
    with pytest.raises(ValueError, match=r"XDG_CACHE_HOME names another place"):
        models.load(tmp_path / "a.gguf")


def test_drafts_of_a_killed_process_are_removed(tmp_path, cache):
    write(tmp_path / "a.gguf", *llama())
    place = find_directory(tmp_path / "a.gguf", weights=False).parent
    os.makedirs(place / ".model.1.partial")
    find_directory(tmp_path / "a.gguf")
    assert sorted(path.name for path in place.iterdir()) == ["config", "lock", "model"]
