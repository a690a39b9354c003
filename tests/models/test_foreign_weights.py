"""Checkpoints that other programs left: which files are read, quantised weights, and what transformers ignores."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen3NextConfig,
)

from fppo import models, tree
from fppo.key import Key
from fppo.runtime import fsdp
from fppo.runtime.mesh import Mesh, Sharding
from fppo.runtime.weights import weight_files
from fppo_kernels.collectives import Axis
from tests.models.families import COMMON, make

INDEX = "model.safetensors.index.json"
WIDE = {**COMMON, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}


def saved(directory, *, shards=False, scale=1.0):
    model, params = make("llama", dtype=torch.float32)
    params = {name: x * scale for name, x in params.items()}
    models.save(model, params, directory, max_shard_bytes=4000 if shards else 1 << 30)
    return params


def rewrite(directory, change):
    """The single file with its tensors changed."""
    stored = change(load_file(directory / "model.safetensors"))
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})


def configure(directory, **changes):
    config = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))


def theirs(directory):
    return dict(AutoModelForCausalLM.from_pretrained(directory).named_parameters())


def test_a_single_file_is_read_beside_an_index_as_transformers_reads_it(tmp_path):
    saved(tmp_path / "m", shards=True, scale=2.0)
    params = saved(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "m" / "model.safetensors")
    assert [file.name for file in weight_files(tmp_path / "m")] == ["model.safetensors"]
    loaded = models.load(tmp_path / "m")[1]
    assert tree.digest(loaded) == tree.digest(params)
    assert all(torch.equal(loaded[name], x) for name, x in theirs(tmp_path / "m").items())


@pytest.mark.parametrize("left", ["no shards", "no index"])
def test_an_index_that_is_left_over_does_not_refuse_a_whole_file(tmp_path, left):
    params = saved(tmp_path)
    gone = json.dumps({"weight_map": {"a": "gone.safetensors"}})
    (tmp_path / INDEX).write_text(gone if left == "no shards" else "{")
    assert tree.digest(models.load(tmp_path)[1]) == tree.digest(params)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks files that its index|is not an index of weights"):
        models.load(tmp_path)


def test_a_file_that_the_config_names_is_read(tmp_path):
    saved(tmp_path, scale=2.0)
    params = saved(tmp_path / "other", shards=True)
    for file in (tmp_path / "other").glob("model*"):
        file.rename(tmp_path / file.name)
    configure(tmp_path, transformers_weights=INDEX)
    assert tree.digest(models.load(tmp_path)[1]) == tree.digest(params)
    configure(tmp_path, transformers_weights="../other/model.safetensors")
    with pytest.raises(ValueError, match=r"names '\.\./other/model\.safetensors' as transformers_weights"):
        models.load(tmp_path)


@pytest.mark.parametrize("where", ["two files", "two names"])
def test_a_parameter_that_stands_twice_is_refused(tmp_path, where):
    saved(tmp_path, shards=where == "two files")
    name = "model.norm.weight"
    if where == "two files":
        files = sorted(tmp_path.glob("*.safetensors"))
        other = next(file for file in files if name not in load_file(file))
        save_file({**load_file(other), name: torch.zeros(16)}, other, metadata={"format": "pt"})
    else:
        rewrite(tmp_path, lambda stored: {**stored, "norm.weight": torch.zeros(16)})
    with pytest.raises(ValueError, match=rf"holds {name} more than once: .*norm\.weight in model"):
        models.load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
def test_weights_that_are_whole_numbers_are_refused(tmp_path, dtype):
    saved(tmp_path)
    name = "model.layers.1.self_attn.q_proj.weight"
    rewrite(tmp_path, lambda stored: {**stored, name: stored[name].to(dtype)})
    for mesh in (Mesh.local(), Mesh({"shard": Axis(2, 1, None)}, Sharding())):
        with pytest.raises(ValueError, match=rf"holds {name} as [UI]\d+, and transformers does not know how"):
            models.load(tmp_path, mesh=mesh)


def test_a_value_head_of_whole_numbers_is_refused(tmp_path):
    model, params = make("qwen2", head="value", dtype=torch.float32)
    models.save(model, params, tmp_path)
    rewrite(tmp_path, lambda stored: {n: x.to(torch.int8) if n == "score.weight" else x for n, x in stored.items()})
    with pytest.raises(ValueError, match=r"holds score\.weight as torch\.int8"):
        models.load(tmp_path, "value")


@pytest.mark.parametrize("bits", [4, 8])
def test_a_checkpoint_of_bitsandbytes_is_refused(tmp_path, bits):
    pytest.importorskip("bitsandbytes")
    model = models.build(LlamaConfig(**WIDE))
    models.save(model, models.init_params(model, Key(0)), tmp_path / "plain")
    from transformers import BitsAndBytesConfig

    how = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_quant_type="nf4")
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=how)
    module.save_pretrained(tmp_path / "codes")
    with pytest.raises(
        ValueError, match=r"is quantised \(bitsandbytes\): transformers reads 7 .* as u?int8; dequantise"
    ):
        models.load(tmp_path / "codes")


def test_a_quantisation_that_nothing_here_reads_is_named(tmp_path):
    params = saved(tmp_path)
    configure(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ValueError, match=r"is quantised \(gptq\), and transformers cannot read it here: .*; dequant"):
        models.load(tmp_path)
    configure(tmp_path, quantization_config={"quant_method": "nobody's"})
    assert tree.digest(models.load(tmp_path)[1]) == tree.digest(params)
    name = "model.layers.1.self_attn.q_proj.weight"
    rewrite(tmp_path, lambda stored: {**stored, name: stored[name].to(torch.int8)})
    with pytest.raises(ValueError, match=rf"holds {name} as I8, and transformers does not know how it was quantised"):
        models.load(tmp_path)


def gives(read):
    """`from_pretrained` of a transformers that reads these parameters."""
    module = SimpleNamespace(state_dict=dict, named_parameters=read.items, named_buffers=dict)
    info = dict.fromkeys(("missing_keys", "unexpected_keys", "mismatched_keys"), ())
    return lambda *_, **__: (module, info)


def test_codes_that_pass_for_floats_are_told_from_them(tmp_path, monkeypatch):
    """As torchao's, which have the shape and the dtype of the weights that they stand for."""

    class Codes(torch.Tensor):
        pass

    params = saved(tmp_path)
    configure(tmp_path, quantization_config={"quant_method": "torchao"})
    name = "model.layers.1.self_attn.q_proj.weight"
    read = {**params, name: params[name].as_subclass(Codes)}
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", gives(read))
    with pytest.raises(
        ValueError, match=rf"is quantised \(torchao\): transformers reads 1 of .*, {name} as Codes; deq"
    ):
        models.load(tmp_path)


def test_what_a_quantiser_of_transformers_gives_must_be_what_the_model_has(tmp_path, monkeypatch):
    params = saved(tmp_path)
    configure(tmp_path, quantization_config={"quant_method": "torchao"})
    name = "model.layers.1.self_attn.q_proj.weight"
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", gives({**params, name: params[name][:-1]}))
    with pytest.raises(ValueError, match=rf"{name} has shape \(15, 16\), expected \(16, 16\)"):
        models.load(tmp_path)


def in_fp8(stored, block=32):
    """The weights of layers as FP8 with a scale for each block, as DeepSeek publishes them."""
    codes = {}
    for name, x in stored.items():
        if x.dim() == 2 and ".layers." in name:
            tiles = x.unfold(0, block, block).unfold(1, block, block)
            scales = tiles.abs().amax((-1, -2)) / 448
            wide = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)
            codes[name] = (x / wide).to(torch.float8_e4m3fn)
            codes[f"{name}_scale_inv"] = scales
        else:
            codes[name] = x
    return codes


def test_an_fp8_checkpoint_becomes_floats_and_its_export_says_so(tmp_path):
    model = models.build(LlamaConfig(**WIDE))
    params = models.init_params(model, Key(0))
    models.save(model, params, tmp_path / "m")
    rewrite(tmp_path / "m", in_fp8)
    how = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic", "fmt": "e4m3"}
    configure(tmp_path / "m", quantization_config=how)
    model, loaded = models.load(tmp_path / "m")
    for name, x in params.items():
        assert loaded[name].dtype == torch.float32
        torch.testing.assert_close(loaded[name], x, rtol=0.07, atol=1e-3)
    models.save(model, loaded, tmp_path / "out")
    models.save_config(model, tmp_path / "config")
    for place in ("out", "config"):
        assert "quantization_config" not in json.loads((tmp_path / place / "config.json").read_text())
    assert all(torch.equal(loaded[name], x) for name, x in theirs(tmp_path / "out").items())
    mesh = Mesh({"shard": Axis(2, 1, None)}, Sharding())
    assert tree.digest(models.load(tmp_path / "m", mesh=mesh)[1]) == tree.digest(fsdp.shard(loaded, mesh))


def test_an_mxfp4_checkpoint_becomes_floats_and_its_export_says_so(tmp_path):
    config = GptOssConfig(**{**WIDE, "head_dim": 16}, num_local_experts=2, num_experts_per_tok=1)
    model = models.build(config)
    models.save(model, models.init_params(model, Key(0)), tmp_path / "m")
    generator = torch.Generator().manual_seed(0)

    def in_mxfp4(stored):
        codes = {}
        for name, x in stored.items():
            if name.endswith(("gate_up_proj", "down_proj")):
                rows, columns = x.shape[2], x.shape[1]  # stored [E, in, out], in blocks of 32 along what is summed
                shape = (len(x), rows, columns // 32)
                codes[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator).to(torch.uint8)
                codes[f"{name}_scales"] = torch.full(shape, 120).to(torch.uint8)
            else:
                codes[name] = x
        return codes

    rewrite(tmp_path / "m", in_mxfp4)
    configure(tmp_path / "m", quantization_config={"quant_method": "mxfp4"})
    model, loaded = models.load(tmp_path / "m")
    assert {x.dtype for x in loaded.values()} == {torch.float32}
    models.save(model, loaded, tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert tree.digest(models.load(tmp_path / "out")[1]) == tree.digest(loaded)


DEEPSEEK = DeepseekV3Config(
    **{**COMMON, "num_hidden_layers": 2, "num_key_value_heads": 4},
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    n_shared_experts=1,
    moe_intermediate_size=16,
    first_k_dense_replace=1,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_rope_head_dim=4,
    qk_nope_head_dim=4,
    v_head_dim=4,
)


@pytest.mark.parametrize("mesh", [Mesh.local(), Mesh({"shard": Axis(2, 1, None)}, Sharding())], ids=["whole", "cut"])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_layers_that_transformers_ignores_do_not_make_ranks_read_the_whole(tmp_path, monkeypatch, mesh, head):
    """DeepSeek-V3's layer 61 predicts two tokens: a checkpoint has it, with experts, and transformers leaves it."""
    model = models.build(DEEPSEEK)
    params = models.init_params(model, Key(0))
    models.save(model, params, tmp_path)
    expected = models.load(tmp_path, head, mesh=mesh)[1]
    last = "model.layers.1."

    def with_more(stored):
        more = {f"model.layers.61.{n.removeprefix(last)}": x.clone() for n, x in stored.items() if n.startswith(last)}
        return {**stored, **more, "model.layers.61.eh_proj.weight": torch.zeros(16, 32)}

    rewrite(tmp_path, with_more)
    assert any(".layers.61.mlp.experts.0." in name for name in load_file(tmp_path / "model.safetensors"))
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", None)
    assert tree.digest(models.load(tmp_path, head, mesh=mesh)[1]) == tree.digest(expected)


def test_what_transformers_does_not_ignore_is_unknown(tmp_path):
    model = models.build(DEEPSEEK)
    models.save(model, models.init_params(model, Key(0)), tmp_path)
    rewrite(tmp_path, lambda stored: {**stored, "model.layers.7.eh_proj.weight": torch.zeros(16, 32)})
    with pytest.raises(ValueError, match=r"unknown \['model\.layers\.7\.eh_proj\.weight'\]"):
        models.load(tmp_path)


def test_mtp_of_another_family(tmp_path, monkeypatch):
    config = Qwen3NextConfig(
        **{**COMMON, "num_hidden_layers": 2, "head_dim": 8},
        layer_types=["full_attention", "full_attention"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    model = models.build(config)
    params = models.init_params(model, Key(0))
    models.save(model, params, tmp_path)
    rewrite(
        tmp_path, lambda stored: {**stored, "mtp.fc.weight": torch.zeros(16, 32), "mtp.norm.weight": torch.ones(16)}
    )
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", None)
    assert tree.digest(models.load(tmp_path)[1]) == tree.digest(params)


@pytest.mark.parametrize("mesh", [Mesh.local(), Mesh({"shard": Axis(2, 1, None)}, Sharding())], ids=["whole", "cut"])
def test_a_tied_head_that_is_stored_again_does_not_make_ranks_read_the_whole(tmp_path, monkeypatch, mesh):
    model, params = make("qwen2", dtype=torch.float32)
    models.save(model, params, tmp_path)
    table = "model.embed_tokens.weight"
    rewrite(tmp_path, lambda stored: {**stored, "lm_head.weight": stored[table].clone()})
    with monkeypatch.context() as patched:
        patched.setattr(PreTrainedModel, "from_pretrained", None)
        assert tree.digest(models.load(tmp_path, mesh=mesh)[1]) == tree.digest(fsdp.shard(params, mesh))
    rewrite(tmp_path, lambda stored: {**stored, "lm_head.weight": stored[table] + 1})
    with pytest.raises(ValueError, match=r"tied by the config but stored separately"):
        models.load(tmp_path, mesh=mesh)
