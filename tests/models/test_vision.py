"""Models of images and text run as in transformers or are refused, and come back as they were saved."""

from types import SimpleNamespace

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForImageTextToText

from fppo import models
from fppo.key import Key
from fppo.models import vision_pass
from fppo.models.spans import staged
from fppo.models.vision import image_token, vision_of
from fppo.models.vision_pass import place_images, row_positions
from fppo_kernels.collectives import Axis
from tests.models.vision import CONFIGS, GEMMA, IMAGE, make, prompt
from tests.steps.test_work_of_a_mini_batch import Waits


@pytest.mark.parametrize("name", CONFIGS)
def test_what_runs_as_in_transformers_is_accepted(name):
    models.check_model(models.build(CONFIGS[name]))


def test_a_model_whose_images_see_ahead_is_refused():
    with pytest.raises(ValueError, match=r"model type 'gemma3' with images: .* no causal text layers"):
        models.build(GEMMA)


def shifted(model, inputs, tokens, positions, lengths):
    """Positions as of text alone."""
    return place_images(model, inputs, tokens, positions, lengths)[0], positions


def halved(skeleton, tensors, plain=vision_pass.image_features):
    pooled, deep = plain(skeleton, tensors)
    return pooled, [x / 2 for x in deep]


def backwards(skeleton, tensors, plain=vision_pass.image_features):
    pooled, deep = plain(skeleton, tensors)
    return pooled.flip(0), deep


@pytest.mark.parametrize(
    ("name", "target", "mistake"),
    [
        ("qwen2_vl", "fppo.models.probe.place_images", shifted),
        ("qwen3_vl", "fppo.models.vision_pass.image_features", halved),
        ("llava", "fppo.models.vision_pass.image_features", backwards),
    ],
)
def test_a_mistake_with_images_is_found_when_the_model_is_loaded(name, target, mistake, monkeypatch):
    monkeypatch.setattr(target, mistake)
    with pytest.raises(ValueError, match=f"model type '{name}': the logits of packed rows"):
        models.check_model(models.build(CONFIGS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "llava"])
def test_saved_and_loaded_it_is_the_same_model(name, tmp_path):
    _, model, _ = make(name)
    params = models.init_params(model, Key(0))
    models.save(model, params, tmp_path / "lm")
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path / "lm")
    assert all(torch.equal(x, params[path]) for path, x in theirs.named_parameters())
    again, loaded = models.load(tmp_path / "lm")
    assert again.vision is not None
    assert again.whole_config.model_type == CONFIGS[name].model_type
    assert loaded.keys() == params.keys()
    assert all(torch.equal(x, params[path]) for path, x in loaded.items())
    frozen = attrs.evolve(model, vision=attrs.evolve(again.vision, trains=False))
    critic, values = models.as_critic(frozen, params, Key(1))
    assert critic.vision is not None
    assert not critic.vision.trains
    models.save(critic, values, tmp_path / "value")
    _, loaded = models.load(tmp_path / "value", "value")
    assert loaded.keys() == values.keys()
    assert all(torch.equal(x, values[path]) for path, x in loaded.items())


def test_images_without_anything_between_them_have_no_positions():
    model = models.build(CONFIGS["qwen2_vl"])
    _, inputs = prompt("qwen2_vl", 2, torch.Generator().manual_seed(0))
    assert inputs is not None
    start = int(inputs.places[0])
    merged = attrs.evolve(inputs, places=torch.arange(start, start + len(inputs.places)))
    with pytest.raises(ValueError, match=r"2 images have 1 runs of .* placeholder tokens: model type 'qwen2_vl"):
        row_positions(model, merged)


def test_a_text_model_takes_no_images():
    from tests.tiny import model_and_params

    model, _ = model_and_params()
    _, inputs = prompt("llava", 1, torch.Generator().manual_seed(0))
    tokens = torch.full((30,), IMAGE)
    with pytest.raises(ValueError, match="a model of type 'qwen2' takes none"):
        place_images(model, [inputs], tokens, torch.arange(30), [30])


@pytest.mark.parametrize("name", ["qwen2_vl", "llava"])
def test_images_go_to_a_device_without_waiting_for_it(name, monkeypatch):
    """But for one look at the tokens that they stand for."""
    _, model, _ = make(name)
    drawn = [prompt(name, count, torch.Generator().manual_seed(count)) for count in (2, 1)]
    lengths = [len(tokens) for tokens, _ in drawn]
    tokens = torch.cat([torch.as_tensor(tokens) for tokens, _ in drawn])
    there = [x.to("meta") for x in (tokens, torch.cat([torch.arange(length) for length in lengths]))]
    checked = []
    monkeypatch.setattr(vision_pass, "_check_tokens", lambda *arguments: checked.append(arguments))
    with Waits() as waits:
        images, positions = place_images(model, [inputs for _, inputs in drawn], *there, lengths)
        assert images is not None
        sent = vision_pass._on_device(images.tensors, torch.empty(0, dtype=torch.bfloat16, device="meta"))
    assert waits.found == []
    assert len(checked) == 1
    assert images.counts == (sum(len(inputs.places) for _, inputs in drawn), 0)
    assert all(x.is_meta for x in (*sent.values(), images.places, images.numbers, positions))
    assert sent["pixel_values"].dtype == torch.bfloat16


shapes = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3), st.integers(1, 2)), min_size=1, max_size=4)


@given(shapes, st.data())
def test_tensors_of_several_rows_lie_behind_one_another_padded_with_zeros(sizes, data):
    """Tensors are joined by name, whatever other rows lack."""
    rows = [
        {"a": torch.full(size, float(number + 1)), f"of {number % 2}": torch.ones(2)}
        for number, size in enumerate(sizes)
    ]
    found = vision_pass.joined(rows, for_device=torch.device("cpu"))
    assert list(found) == list(dict.fromkeys(name for row in rows for name in row))
    width, depth, start = max(size[1] for size in sizes), max(size[2] for size in sizes), 0
    for number, (count, wide, deep) in enumerate(sizes):
        own = found["a"][start : start + count]
        expected = torch.zeros(count, width, depth)
        expected[:, :wide, :deep] = number + 1
        assert torch.equal(own, expected)
        start += count
    assert found["a"].shape == (start, width, depth)
    assert all(len(found[name]) == 2 * sum(name in row for row in rows) for name in found if name != "a")
    places = torch.tensor(sorted(data.draw(st.sets(st.integers(0, 19)))), dtype=torch.int64)
    images = vision_pass.Images({}, torch.arange(len(places)) + 7, places, (9, 0))
    begin, length = data.draw(st.integers(0, 19)), data.draw(st.integers(0, 9))
    within = images.within(begin, length)
    expected = [(7 + i, place - begin) for i, place in enumerate(places.tolist()) if begin <= place < begin + length]
    assert list(zip(within.numbers.tolist(), within.places.tolist(), strict=True)) == expected
    assert within.counts == (9, 0)


@pytest.mark.parametrize(
    ("named", "token"),
    [
        ({"image_token_id": 0, "image_token_index": 5}, 0),
        ({"image_token_id": None, "image_token_index": 5}, 5),
        ({"image_token_index": 0}, 0),
        ({}, None),
    ],
)
def test_the_placeholder_of_images_is_that_which_the_config_names(named, token):
    assert image_token(SimpleNamespace(**named)) == token


def test_a_vision_tower_is_on_the_first_stage_alone():
    model = models.build(CONFIGS["qwen2_vl"])
    first, last = (set(staged(model, Axis(2, rank)).shapes) for rank in range(2))
    assert model.vision_params
    assert model.vision_params <= first
    assert not model.vision_params & last


class Blind(torch.nn.Module):
    """A stand-in for a model of text alone."""

    def __init__(self):
        super().__init__()
        self.text = torch.nn.Module()

    def get_decoder(self):
        return self.text


class Seeing(Blind):
    """A stand-in for a model of images and text."""

    def get_image_features(self):
        raise NotImplementedError


class Itself(Seeing):
    """A model that is its own language model."""

    def get_decoder(self):
        return self


@pytest.mark.parametrize(
    ("base", "token", "lacks"),
    [
        (Seeing(), 5, None),
        (Blind(), 5, "get_image_features"),
        (Itself(), 5, "text model of its own inside"),
        (Seeing(), None, "image_token_id in its config"),
    ],
)
def test_a_model_without_a_part_of_seeing_is_refused_by_that_part(base, token, lacks):
    config = SimpleNamespace(model_type="x", image_token_id=token, vision_config=SimpleNamespace())
    if lacks is None:
        found = vision_of(config, base)
        assert (found.text, found.token, found.axes, found.deep) == ("text", 5, 1, 0)
        return
    with pytest.raises(
        ValueError, match=f"cannot run model type 'x' with images: {type(base).__name__} has no {lacks}"
    ):
        vision_of(config, base)
