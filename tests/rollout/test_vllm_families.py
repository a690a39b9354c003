"""What runs on vLLM, and what it is asked about prompts with images; without vLLM."""

import copy

import pytest
import torch

from fppo import models
from fppo.key import Key
from fppo.rollout.engine import Sampling
from fppo.rollout.vllm.families import check_family
from fppo.rollout.vllm.host import Request
from fppo.rollout.vllm.vision import placed_images, probe_row, weight_names
from tests.models.hybrids import HYBRIDS
from tests.models.vision import CONFIGS, GEMMA, IMAGE, prompt


def changed(name, **changes):
    config = copy.deepcopy(CONFIGS[name])
    for key, value in changes.items():
        setattr(config, key, value)
    return config


@pytest.mark.parametrize(
    ("config", "others", "message"),
    [
        (GEMMA, {}, "models of type 'gemma3', which take images: it knows how vLLM takes those of qwen2_vl,"),
        (changed("llava", vision_feature_layer=[-2, -1]), {}, r"a llava that reads layer \[-2, -1\]"),
        (CONFIGS["idefics3"], {"tensor_parallel": 2}, "tensor_parallel = 2: not with .* images"),
        (CONFIGS["qwen2_vl"], {"alone": True}, r"adapter cannot go .* images \('qwen2_vl'\): send it merged"),
    ],
    ids=["family", "layers", "workers", "adapter"],
)
def test_what_vllm_does_not_run_with_images_is_refused_by_name(config, others, message):
    for known in CONFIGS.values():
        check_family(known)
    with pytest.raises(ValueError, match=message):
        check_family(config, **others)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bamba", "'bamba' here: it has no code for them any more"),
        ("granitemoehybrid", "'granitemoehybrid' here: it names their weights otherwise"),
        ("jamba", "'jamba' on a CPU, where it has no selective scan"),
        ("qwen3_next", "'qwen3_next' on a CPU, where it computes gated delta rules in bfloat16 alone"),
        ("lfm2", "'lfm2' on a CPU, where it gives other log-probs than transformers"),
    ],
)
def test_what_vllm_does_not_run_with_states_is_refused_by_name(name, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=message):
        check_family(HYBRIDS[name])
    check_family(HYBRIDS["falcon_h1"])
    dense = copy.deepcopy(HYBRIDS["granitemoehybrid"])
    dense.layer_types, dense.num_local_experts = ["full_attention"] * 2, 0
    check_family(dense)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_family(HYBRIDS["jamba"])


@pytest.mark.parametrize("name", CONFIGS)
def test_images_stand_where_their_tokens_do(name):
    generator = torch.Generator().manual_seed(0)
    tokens, inputs = prompt(name, 3, generator)
    placed = placed_images(CONFIGS[name], tokens, inputs)
    assert len(placed) == 3
    assert [start + i for start, count in placed for i in range(count)] == inputs.places.tolist()
    assert all(tokens[start - 1] != IMAGE != tokens[start + count] for start, count in placed)
    rows = [x for x in range(4) for _ in range(2)]
    every = [inputs, None] * 4
    request = Request(prompts=[tokens] * 8, sampling=Sampling(), key=Key(0), row_ids=torch.tensor(rows), inputs=every)
    assert request.part([0, 3, 6]).inputs == [inputs, None, inputs]
    model = models.build(CONFIGS[name])
    row, own = probe_row(model, [5, 6, 7, 8], 40)
    ((start, count),) = placed_images(CONFIGS[name], row, own)
    assert (start, len(row)) == (2, count + 4)
    assert probe_row(model, [5, 6, 7, 8], count + 3) is None


def test_what_vllm_lacks_of_llavas_tower_is_not_sent():
    model = models.build(CONFIGS["llava"])
    names = {name: [new for new, _ in weight_names(model)(name, torch.empty(0))] for name in model.shapes}
    tower = "model.vision_tower."
    left = {name for name, new in names.items() if not new}
    unread = ("encoder.layers.1.", "post_layernorm.")
    assert left == {name for name in names if name.startswith(tuple(tower + part for part in unread))}
    assert names[f"{tower}encoder.layers.0.mlp.fc1.bias"] == [f"{tower}vision_model.encoder.layers.0.mlp.fc1.bias"]
    assert names["lm_head.weight"] == ["lm_head.weight"]
