"""What runs on vLLM, and what it is asked about prompts with images; without vLLM."""

import copy
import sys
from types import ModuleType, SimpleNamespace

import attrs
import pytest
import torch

from fppo import models
from fppo.batch import Column, Prompts, RowInputs
from fppo.data import PromptSet
from fppo.key import Key
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.vllm.families import check_family
from fppo.rollout.vllm.host import HostBatch
from fppo.rollout.vllm.vision import check_inputs, check_videos, inputs_of, placed_images, probe_row, weight_names
from tests.models.hybrids import HYBRIDS
from tests.models.vision import CONFIGS, END, GEMMA, IMAGE, START, VIDEO, prompt
from tests.modules import imported_anew


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
    assert [one.start + i for one in placed for i in range(one.length)] == inputs.places.tolist()
    assert all(tokens[one.start - 1] != IMAGE != tokens[one.start + one.length] for one in placed)
    rows = [x for x in range(4) for _ in range(2)]
    every = [inputs, None] * 4
    request = HostBatch(prompts=[tokens] * 8, sampling=Sampling(), key=Key(0), row_ids=torch.tensor(rows), inputs=every)
    assert request.part([0, 3, 6]).inputs == [inputs, None, inputs]
    model = models.build(CONFIGS[name])
    row, own = probe_row(model, [5, 6, 7, 8], 40)
    image, *videos = placed_images(CONFIGS[name], row, own)
    assert image[:2] == ("image", 2)
    assert row[-2:] == [7, 8]
    assert probe_row(model, [5, 6, 7, 8], len(row) - 1) is None
    assert [x.kind for x in videos] == (["video"] if name.startswith("qwen") else [])


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_videos_stand_where_their_tokens_do(name):
    tokens, inputs = prompt(name, "viv", torch.Generator().manual_seed(4))
    image, *videos = placed_images(CONFIGS[name], tokens, inputs)
    assert [tokens[i] for i in range(image.start, image.start + image.length)] == [IMAGE] * image.length
    within = [x.features or (True,) * x.length for x in videos]
    found = [x.start + i for x, features in zip(videos, within) for i, one in enumerate(features) if one]
    assert found == inputs.video_places.tolist()
    assert all(tokens[x.start - (x.features is None)] == START for x in videos)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tokens, at: ([5 if i == at[0] else x for i, x in enumerate(tokens)], at), "do not hold token"),
        (lambda tokens, at: (tokens[: at[-1]], at), "places that do not hold token"),
        (lambda tokens, at: (tokens, at[:-1]), "19 tokens stand for images that have 20 features"),
        (lambda tokens, at: ([*tokens, IMAGE], [*at, len(tokens)]), "21 tokens stand for images that have 20 features"),
        (
            lambda tokens, at: ([*tokens[: at[1]], 5, *tokens[at[1] :]], [at[0], *(place + 1 for place in at[1:])]),
            "tokens of one of the images do not stand together",
        ),
    ],
    ids=["another", "cut", "fewer", "more", "apart"],
)
def test_images_without_their_tokens_are_refused(change, message):
    tokens, inputs = prompt("qwen2_vl", 3, torch.Generator().manual_seed(0))
    changed_tokens, places = change(tokens, inputs.places.tolist())
    with pytest.raises(ValueError, match=message):
        placed_images(CONFIGS["qwen2_vl"], changed_tokens, attrs.evolve(inputs, places=torch.tensor(places)))


@pytest.mark.parametrize("order", ["iv", "iiv", "ivi"])
def test_a_row_with_images_before_a_short_video_is_taken(order):
    """Tokens behind an image have positions behind the longest of its sides."""
    model = models.build(CONFIGS["qwen2_vl"])
    tokens, inputs = prompt("qwen2_vl", order, torch.Generator().manual_seed(4))
    assert model.vision is not None
    placed = placed_images(CONFIGS["qwen2_vl"], tokens, inputs)
    assert sorted(x.kind[0] for x in placed) == sorted(order)
    check_inputs(model, tokens, inputs)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_text_that_vllm_gives_other_positions_is_refused(name):
    """Of two frames of 2 by 2 tokens the last has a time within the longer side; of three it has not."""
    config = copy.deepcopy(CONFIGS[name])
    config.vision_config.tokens_per_second = 1
    model = models.build(config)
    pixels, shown, names = torch.zeros(96, 96), torch.zeros(1, 1, 1, 3, dtype=torch.uint8), Column([""])
    for frames, seconds, fits in ((2, 1.0, True), (3, 1.0, False), (2, 2.0, name == "qwen2_vl")):
        tensors = {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([[frames, 4, 4]])}
        if name == "qwen2_5_vl":
            tensors["second_per_grid_ts"] = torch.tensor([seconds])
        tokens = [5, START, *[VIDEO] * 4 * frames, END, 7]
        inputs = RowInputs(tensors, torch.arange(0), shown, torch.arange(2, 2 + 4 * frames))
        prompts = Prompts(
            tokens=torch.tensor([tokens]),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.bool),
            row_ids=torch.arange(1),
            ids=names,
            ground_truth=names,
            source=names,
            extras=names,
            inputs=Column([inputs]),
        )
        ask = Ask(prompts, Sampling(), Key(0))
        row = PromptSet(
            tokens=(tuple(tokens),), ids=("v:1",), ground_truths=("",), sources=("",), extras=({},), pad_token_id=0
        )
        row = attrs.evolve(row, inputs=(inputs,))
        if fits:
            check_videos(model, row)
            assert inputs_of(model, [tokens], ask) == [inputs]
            several = attrs.evolve(ask, sampling=Sampling(n=2), prompts=SimpleNamespace(inputs=[inputs, None]))
            assert inputs_of(model, [tokens, [5, 7]], several) == [inputs, inputs, None, None]
            continue
        with pytest.raises(ValueError, match=f"longer in time than in height and width, .* type '{name}'"):
            inputs_of(model, [tokens], ask)
        with pytest.raises(ValueError, match="v:1: a row has a video that is longer in time"):
            check_videos(model, row)


def test_what_vllm_lacks_of_llavas_tower_is_not_sent():
    model = models.build(CONFIGS["llava"])
    names = {name: [new for new, _ in weight_names(model)(name, torch.empty(0))] for name in model.shapes}
    tower = "model.vision_tower."
    left = {name for name, new in names.items() if not new}
    unread = ("encoder.layers.1.", "post_layernorm.")
    assert left == {name for name in names if name.startswith(tuple(tower + part for part in unread))}
    assert names[f"{tower}encoder.layers.0.mlp.fc1.bias"] == [f"{tower}vision_model.encoder.layers.0.mlp.fc1.bias"]
    assert names["lm_head.weight"] == ["lm_head.weight"]


class Fields:
    """How vLLM would split a tensor, as it is told."""

    @staticmethod
    def batched(kind, keep_on_cpu=False):
        return ("one each", kind, keep_on_cpu)

    @staticmethod
    def flat_from_sizes(kind, sizes):
        return (sizes.tolist(), kind, False)


class _Generic:
    def __class_getitem__(cls, item):
        return cls


@pytest.fixture
def vllm_images(monkeypatch):
    """The module of images, beside stand-ins for vLLM's part of it."""
    registered = []
    parts = {
        "vllm": {},
        "vllm.inputs": {"mm_input": lambda *given: given},
        "vllm.model_executor": {},
        "vllm.model_executor.models": {},
        "vllm.model_executor.models.registry": {
            "ModelRegistry": SimpleNamespace(
                models={"Known": SimpleNamespace(load_model_cls=lambda: "the class")},
            )
        },
        "vllm.multimodal": {
            "MULTIMODAL_REGISTRY": SimpleNamespace(
                register_processor=lambda processor, **how: lambda kind: registered.append((processor, how, kind))
            )
        },
        "vllm.multimodal.inputs": {
            "MultiModalFieldConfig": Fields,
            "MultiModalKwargsItems": SimpleNamespace(from_hf_inputs=lambda *given: given),
            "PlaceholderRange": lambda **fields: fields,
        },
        "vllm.multimodal.processing": dict.fromkeys(
            ("BaseDummyInputsBuilder", "BaseMultiModalProcessor", "BaseProcessingInfo"), _Generic
        ),
    }
    for name, fields in parts.items():
        made = ModuleType(name)
        vars(made).update(fields)
        monkeypatch.setitem(sys.modules, name, made)
    found = imported_anew(monkeypatch, "fppo.rollout.vllm.images")
    found.registered = registered
    return found


@pytest.mark.parametrize("shape", ["ii", "viv"])
@pytest.mark.parametrize("name", CONFIGS)
def test_vllm_gets_pixels_with_how_they_are_split_and_where_they_stand(name, shape, vllm_images):
    if shape == "viv" and not name.startswith("qwen"):
        pytest.skip("it takes no videos")
    config = CONFIGS[name]
    tokens, inputs = prompt(name, shape, torch.Generator().manual_seed(4))
    ids, (tensors, fields), digests, ranges = vllm_images.with_images(config, torch.bfloat16, tokens, inputs)
    assert ids == tokens
    for key, x in inputs.tensors.items():
        assert torch.equal(tensors[key], x.bfloat16() if x.is_floating_point() else x), key
    counts = {kind: shape.count(kind[0]) for kind in ("image", "video") if kind[0] in shape}
    assert digests == {kind: [f"{inputs.digest()}-{kind}-{i}" for i in range(n)] for kind, n in counts.items()}
    placed = placed_images(config, tokens, inputs)
    for kind in counts:
        own = [one for one in placed if one.kind == kind]
        assert [(x["offset"], x["length"]) for x in ranges[kind]] == [(one.start, one.length) for one in own]
        for x, one in zip(ranges[kind], own, strict=True):
            assert (x["is_embed"] is None) == (one.features is None)
            assert one.features is None or x["is_embed"].tolist() == list(one.features)
    assert [*ranges] == [*counts]
    if name.startswith("qwen"):
        for kind in counts:
            grid = inputs.tensors[f"{kind}_grid_thw"]
            pixels = "pixel_values" if kind == "image" else "pixel_values_videos"
            assert fields[pixels] == (grid.prod(1).tolist(), kind, False)
            assert fields[f"{kind}_grid_thw"] == ("one each", kind, True)
        if "second_per_grid_ts" in inputs.tensors:
            assert fields["second_per_grid_ts"] == ("one each", "video", True)
    elif name == "llava":
        assert fields == {"pixel_values": ("one each", "image", False)}
    else:
        assert tensors["num_patches"].tolist() == [1, 1]
        assert fields.pop("num_patches") == ("one each", "image", True)
        assert all(x == ([1, 1], "image", False) for x in fields.values())


def test_vllm_takes_processed_images_of_the_models_own_class(vllm_images):
    vllm_images.take_processed(SimpleNamespace(architectures=["Known", "Other"]))
    ((processor, how, kind),) = vllm_images.registered
    assert (kind, how["info"], how["dummy_inputs"]) == ("the class", vllm_images._Info, vllm_images._NoDummies)
    assert processor.requires_tokenizer is False
    for model_type, limits in (("qwen2_vl", {"image": None, "video": None}), ("llava", {"image": None})):
        info = vllm_images._Info()
        info.ctx = SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type=model_type)))
        assert info.get_supported_mm_limits() == limits
        assert info.get_mm_max_tokens_per_item(77, {}) == dict.fromkeys(limits, 77)
