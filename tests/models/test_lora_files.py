"""PEFT's files: read back as they were written, and computed by peft itself as here."""

import json
import warnings

import attrs
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, Qwen3MoeConfig

from fppo import models
from fppo.key import Key
from fppo.models import lora, lora_files
from fppo.models.adapted import Lora
from fppo.models.place import own_params
from fppo.runtime import fsdp
from fppo.runtime.mesh import Sharding
from fppo.runtime.simulate import simulate
from tests import tiny
from tests.models import families
from tests.models.test_lora import noisy

FAMILIES = ("llama", "qwen2", "gpt2", "qwen3_moe", "gpt_oss")


def made(name, directory, *, targets=("all-linear",), scaling="rslora", exclude=()):
    model, params = families.make(name)
    spec = Lora(3, 6.0, targets, scaling, exclude)
    model, adapter = lora.adapt(model, params, spec, key=Key(3), dtype=torch.float64)
    adapter = noisy(adapter)
    lora_files.save(model, adapter, directory, base="somewhere")
    return model, params, adapter


def read(model, params, directory):
    again, fresh = lora.adapt(model.plain, params, lora_files.read_config(directory), key=Key(0), dtype=torch.float64)
    return again, lora_files.load(again, directory, like=fresh)


@pytest.mark.parametrize("name", FAMILIES)
def test_files_read_back_as_they_were_written(name, tmp_path):
    model, params, adapter = made(name, tmp_path / "a")
    again, back = read(model, params, tmp_path / "a")
    assert again.shapes == model.shapes
    assert lora.frozen_of(again).lora.scale == lora.frozen_of(model).lora.scale
    assert all(torch.equal(back[name], x) for name, x in adapter.items())


def test_equal_adapters_are_equal_files(tmp_path):
    """safetensors itself writes metadata in an order that changes from call to call."""
    model, _, adapter = made("qwen2", tmp_path / "a")
    for _ in range(10):
        lora_files.save(model, adapter, tmp_path / "b", base="somewhere")
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    with safe_open(tmp_path / "b" / "adapter_model.safetensors", "pt") as file:
        assert file.metadata() == {"base_digest": lora.frozen_of(model).digest, "format": "pt"}


def test_ranks_that_cut_parameters_write_and_read_them(tmp_path):
    model, _, adapter = made("qwen2", tmp_path / "a")

    def run(mesh):
        mesh = attrs.evolve(mesh, sharding=Sharding())
        lora_files.save(model, fsdp.shard(adapter, mesh), tmp_path / "b", base="somewhere", mesh=mesh)
        return lora_files.load(model, tmp_path / "b", like=fsdp.shard(adapter, mesh), mesh=mesh)

    ranks = simulate({"shard": 3}, run)
    weights = [load_file(tmp_path / each / "adapter_model.safetensors") for each in ("a", "b")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())
    for name, x in adapter.items():
        assert torch.equal(torch.cat([rank[name] for rank in ranks]), x)


def test_what_has_no_such_files_or_does_what_is_not_known_is_refused(tmp_path):
    with pytest.raises(ValueError, match="vocabulary head, too"):
        made("qwen2", tmp_path / "tied", targets=("embed_tokens",))
    model, params = tiny.model_and_params("value")
    model, adapter = lora.adapt(model, params, Lora(2, 4.0), key=Key(0))
    with pytest.raises(ValueError, match="value model has a value head"):
        lora_files.save(model, adapter, tmp_path / "value", base="somewhere")
    with pytest.raises(ValueError, match=r"holds no PEFT adapter"):
        lora_files.read_config(tmp_path)
    model, params, adapter = made("llama", tmp_path / "a", targets=("q_proj", "embed_tokens", "lm_head"))
    read(model, params, tmp_path / "a")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    for changes in ({"use_dora": True}, {"rank_pattern": {"q": 2}}, {"bias": "all"}, {"init_lora_weights": "pissa"}):
        (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ValueError, match=f"does not run adapters with {next(iter(changes))} = "):
            lora_files.read_config(tmp_path / "a")
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config))
    weights = load_file(tmp_path / "a" / "adapter_model.safetensors")
    first = next(iter(weights))
    save_file(weights | {first: weights[first].to(torch.int8)}, tmp_path / "a" / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"does not fit the model: .*lora_[AB] in torch\.int8"):
        read(model, params, tmp_path / "a")
    save_file(weights, tmp_path / "a" / "adapter_model.safetensors")
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config | {"r": 2}))
    with pytest.raises(ValueError, match=r"does not fit the model: .*lora_A of shape \[3, 16\]"):
        read(model, params, tmp_path / "a")
    stored = load_file(tmp_path / "a" / "adapter_model.safetensors")
    stored.pop(next(name for name in stored if name.endswith("q_proj.lora_A.weight")))
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config))
    save_file(stored, tmp_path / "a" / "adapter_model.safetensors")
    with pytest.raises(
        ValueError, match=r"does not fit the model: missing \['base_model.model.*q_proj.lora_A.weight'\]"
    ):
        read(model, params, tmp_path / "a")


def test_tensors_that_are_no_factors_of_a_named_weight_are_refused(tmp_path):
    made("llama", tmp_path / "a")
    stored = load_file(tmp_path / "a" / "adapter_model.safetensors")
    for other, message in (("x.bias", r"\['x.bias'\]$"), ("x.base_layer.weight", "save_embedding_layers=False")):
        save_file(stored | {other: torch.ones(2)}, tmp_path / "a" / "adapter_model.safetensors")
        with pytest.raises(ValueError, match=f"holds tensors that are no factor of a weight: .*{message}"):
            lora_files.read_config(tmp_path / "a")
    made("qwen3_moe", tmp_path / "b", targets=("experts.down_proj",))
    place = tmp_path / "b" / "adapter_config.json"
    config = json.loads(place.read_text())
    assert config["target_parameters"] == ["mlp.experts.down_proj"]
    for changes, message in (
        ({"target_parameters": ["gate_up_proj", "down_proj"]}, "1 pairs of factors of model.layers.0.mlp.experts, and"),
        ({"rank_pattern": {"(": 3}}, "is no pattern of names"),
    ):
        place.write_text(json.dumps(config | changes))
        with pytest.raises(ValueError, match=message):
            lora_files.read_config(tmp_path / "b")


SEVEN = [f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "down")]


@pytest.mark.parametrize(
    ("name", "asked", "rank"),
    [
        ("qwen3_moe", {"target_modules": SEVEN}, 4),  # PEFT takes twice the rank for gate and up together
        ("qwen3_moe", {"target_modules": SEVEN, "use_rslora": True}, None),
        ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": ["down_proj"]}, 2),
        ("qwen3_moe", {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]}, 2),
        ("mixtral", {"target_modules": ["q_proj", "w1", "w2", "w3"]}, 4),
        ("glm4_moe", {"target_modules": ["q_proj"], "target_parameters": ["shared_experts.up_proj.weight"]}, 2),
        ("gpt_oss", {"target_modules": "all-linear", "target_parameters": ["experts.down_proj"]}, 2),
        ("qwen2", {"target_modules": r".*\.1\..*(q|up)_proj"}, 2),
        ("qwen2", {"target_modules": SEVEN, "rank_pattern": {"q_proj": 5}, "alpha_pattern": {"q_proj": 7.5}}, 5),
        ("qwen2", {"target_modules": SEVEN, "rank_pattern": {"q_proj": 5}}, None),
        ("qwen2", {"target_modules": SEVEN, "alpha_pattern": {"layers.1.mlp.up_proj": 5}}, None),
    ],
)
def test_an_adapter_that_peft_began_is_read_with_its_ranks_by_weight(name, asked, rank, tmp_path):
    """Where all have one scale: fppo's adapters have one, and one rank, to which others are filled up."""
    peft = pytest.importorskip("peft")
    model, params = families.make(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(r=2, lora_alpha=3, task_type="CAUSAL_LM", init_lora_weights=False, **asked)
        theirs = peft.get_peft_model(families.plain(model, params), config)
        theirs.save_pretrained(tmp_path, save_embedding_layers=False)
        weights = theirs.merge_and_unload().state_dict()
    if rank is None:
        with pytest.raises(ValueError, match=r"adapters with .*_pattern = .*, which give weights different scales"):
            lora_files.read_config(tmp_path)
        return
    model, adapter = read(model, params, tmp_path)
    assert lora.frozen_of(model).lora.rank == rank
    merged = lora.merged(model, adapter)
    assert sum(not torch.equal(x, params[each]) for each, x in merged.items()) == len(adapter) / 2
    for each, x in merged.items():
        torch.testing.assert_close(weights[each], x, rtol=1e-6, atol=1e-6, check_dtype=False)  # buffers are wider


def test_ranks_by_weight_are_filled_up_on_ranks_that_cut_parameters(tmp_path):
    model, params, adapter = made("qwen3_moe", tmp_path / "a", scaling="standard")
    stored, place = load_file(tmp_path / "a" / "adapter_model.safetensors"), tmp_path / "a" / "adapter_config.json"
    for name in [each for each in stored if ".q_proj." in each]:
        stored[name] = (stored[name][:1] if "lora_A" in name else stored[name][:, :1]).contiguous()
    save_file(stored, tmp_path / "a" / "adapter_model.safetensors")
    config = json.loads(place.read_text())
    place.write_text(json.dumps(config | {"rank_pattern": {"q_proj": 1}, "alpha_pattern": {"q_proj": 2.0}}))
    again, whole = read(model, params, tmp_path / "a")
    for name, x in whole.items():
        expected = adapter[name].clone()
        if ".q_proj." in name:
            (expected if "lora_A" in name else expected.T)[1:] = 0
        assert torch.equal(x, expected)

    def run(mesh):
        mesh = attrs.evolve(mesh, sharding=Sharding())
        return lora_files.load(again, tmp_path / "a", like=fsdp.shard(whole, mesh), mesh=mesh)

    ranks = simulate({"shard": 2}, run)
    for name, x in whole.items():
        assert torch.equal(torch.cat([rank[name] for rank in ranks]), x)


def test_what_peft_means_otherwise_or_refuses_is_no_adapter_of_its_files(tmp_path):
    made("llama", tmp_path / "a", targets=("embed_tokens",))
    model, params = families.make("qwen2")
    tied, adapter = lora.adapt(model, params, Lora(3, 6.0, ("embed_tokens",), "rslora"), key=Key(0))
    assert "is the vocabulary head, too" in (lora_files.obstacle(tied) or "")
    with pytest.raises(ValueError, match=r"PEFT adapts model\.embed_tokens\.weight alone"):
        lora_files.load(tied, tmp_path / "a", like=adapter)
    one = Qwen3MoeConfig(**families.QWEN3_MOE, num_experts=1, num_experts_per_tok=1, moe_intermediate_size=8)
    model, params = families.make("qwen3_moe", config=one)
    adapted, _ = lora.adapt(model, params, Lora(2, 4.0), key=Key(0))
    assert "gate_up_proj is a stack of one expert" in (lora_files.obstacle(adapted) or "")
    model, params = families.make("gpt2")
    adapted, _ = lora.adapt(model, params, Lora(2, 4.0), key=Key(0))
    assert lora_files.obstacle(adapted) is None


def merged_by_peft(peft, model, params, directory, *, again=None):
    """The whole model that peft makes of the adapter in a directory, which it may write `again`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.PeftModel.from_pretrained(families.plain(model.plain, params), str(directory))
        if again is not None:
            theirs.save_pretrained(again, save_embedding_layers=False)
        return theirs.merge_and_unload()


@pytest.mark.parametrize(
    ("name", "targets"),
    [(name, ("all-linear",)) for name in FAMILIES] + [("llama", ("q_proj", "embed_tokens", "lm_head"))],
)
def test_peft_computes_the_same_and_its_own_file_reads_back_equal(name, targets, tmp_path):
    peft = pytest.importorskip("peft")
    model, params, adapter = made(name, tmp_path / "a", targets=targets)
    merged = lora.merged(model, adapter)
    weights = dict(merged_by_peft(peft, model, params, tmp_path / "a", again=tmp_path / "b").named_parameters())
    for each, x in merged.items():
        torch.testing.assert_close(weights[each], x, rtol=1e-12, atol=1e-12)
    _, back = read(model, params, tmp_path / "b")
    assert all(torch.equal(back[name], x) for name, x in adapter.items())


@pytest.mark.parametrize(
    ("name", "exclude", "left_out"),
    [
        ("qwen2", ("down_proj", "model.layers.1.self_attn.*"), lambda x: "down_proj" in x or "layers.1.self_attn" in x),
        ("gpt2", ("h.0.mlp.c_fc", "attn.c_proj"), lambda x: "h.0.mlp.c_fc" in x or "attn.c_proj" in x),
        ("qwen3_moe", ("self_attn.q_proj", "experts.down_proj"), lambda x: "q_proj" in x or "experts.down" in x),
    ],
)
def test_what_is_excluded_has_no_adapter_and_peft_adapts_the_same_modules_from_names_and_exclusions(
    name, exclude, left_out, tmp_path
):
    """PEFT from the file computes the same. From the ends of all names it adapts what the exclusions leave."""
    peft = pytest.importorskip("peft")
    model, params, adapter = made(name, tmp_path / "a", exclude=exclude)
    every = lora.places_of(model.plain, ("all-linear",))
    places = lora.frozen_of(model).places
    assert places.keys() == {each for each in every if not left_out(each)}
    weights = dict(merged_by_peft(peft, model, params, tmp_path / "a").named_parameters())
    for each, x in lora.merged(model, adapter).items():
        torch.testing.assert_close(weights[each], x, rtol=1e-12, atol=1e-12)
    modules = [each.removesuffix(".weight") for each in every if each.endswith(".weight")]
    own = json.loads((tmp_path / "a" / "adapter_config.json").read_text())["exclude_modules"]
    assert own == sorted(each for each in modules if left_out(each))
    config = peft.LoraConfig(target_modules={each.rpartition(".")[2] for each in modules}, exclude_modules=own)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.get_peft_model(families.plain(model.plain, params), config)
    found = {each for each, x in theirs.base_model.model.named_modules() if hasattr(x, "lora_A")}
    assert found == {each.removesuffix(".weight") for each in places if each.endswith(".weight")}


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_ranks_with_parts_of_a_model_write_what_one_process_does_of_an_adapter_with_exclusions(axis, tmp_path):
    spec, key = Lora(3, 6.0, exclude=("down_proj", "layers.1.self_attn.q_proj")), Key(3)
    model, params = families.make("qwen2")
    lora_files.save(*lora.adapt(model, params, spec, key=key), tmp_path / "a", base="somewhere")

    def run(mesh):
        placed = models.place(model, mesh)
        adapted, own = lora.adapt(placed, own_params(placed, params, mesh), spec, key=key, mesh=mesh)
        lora_files.save(adapted, own, tmp_path / "b", base="somewhere", mesh=mesh)

    simulate({axis: 2}, run)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_an_exclusion_that_matches_nothing_suggests_the_nearest():
    model, params = families.make("qwen2")
    for exclude, text in {
        ("down_prj",): r"exclude \['down_prj'\] names no weight that targets name; did you mean 'down_proj'\?",
        ("embed_tokens",): r"exclude \['embed_tokens'\] names no weight that targets name",
        ("*",): "leaves none of the weights",
    }.items():
        with pytest.raises(ValueError, match=text):
            lora.adapt(model, params, Lora(2, 4.0, exclude=exclude), key=Key(0))
    value, whole = families.make("qwen2", head="value")
    lora.adapt(value, whole, Lora(2, 4.0, ("all-linear", "lm_head"), exclude=("lm_head",)), key=Key(0))


@pytest.mark.parametrize("scaling", ["standard", "rslora"])
@pytest.mark.parametrize("name", ["qwen2", "gpt2", "qwen3_moe"])
def test_the_config_says_all_of_an_adapter(name, scaling, tmp_path):
    model, params = families.make(name, dtype=torch.float32)
    targets = ("c_attn",) if name == "gpt2" else ("q_proj", "o_proj") if name == "qwen2" else ("all-linear",)
    adapted, adapter = lora.adapt(model, params, Lora(3, 6.5, targets, scaling), key=Key(3))
    lora_files.save(adapted, adapter, tmp_path / "a", base="some/where")
    stacks = name == "qwen3_moe"
    places = [each.removesuffix(".weight") for each in sorted(params) if any(t in each for t in targets)]
    attention = [f"model.layers.{i}.self_attn.{x}_proj" for i in range(2) for x in "koqv"]
    found = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert found == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "some/where",
        "r": 3,
        "lora_alpha": 6.5,
        "use_rslora": scaling == "rslora",
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": attention if stacks else [each for each in places if not each.endswith(".bias")],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if stacks else None,
        "fan_in_fan_out": name == "gpt2",
        "exclude_modules": None,
    }
    read_back = lora_files.read_config(tmp_path / "a")
    assert attrs.evolve(read_back, targets=("x",)) == Lora(3, 6.5, ("x",), scaling)
    again, _ = lora.adapt(model, params, read_back, key=Key(0))
    assert lora.frozen_of(again).places == lora.frozen_of(adapted).places


def test_weights_that_are_stored_in_two_ways_are_said_to_be_turned():
    """A Conv1D and a linear layer: PEFT turns the first and knows the second."""
    config = GPT2Config(vocab_size=31, n_embd=16, n_layer=1, n_head=4, n_positions=64, tie_word_embeddings=False)
    model, params = families.make("gpt2", config=config)
    for targets, turned in ((("c_attn", "lm_head"), True), (("lm_head",), False)):
        adapted, _ = lora.adapt(model, params, Lora(2, 4.0, targets), key=Key(0))
        assert lora_files._config(adapted, "x")["fan_in_fan_out"] is turned
