"""Rows with videos, alone and among images, in any order: packed, padded and split, they are as in transformers."""

import contextlib

import attrs
import pytest
import torch

from fppo import batch as batches
from fppo.models import vision_pass
from fppo.steps import Forward
from tests.models.test_videos import FAMILIES
from tests.models.vision import make, rows
from tests.steps.test_images import check, ours, theirs, weighted

ROWS = ("vi", "", "iv", "vv", "i")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_and_gradients_are_transformers(name):
    module, model, params = make(name)
    record = rows(name, ROWS)
    expected = theirs(module, record)
    weighted(expected).backward()
    gradients = {path: torch.zeros_like(x) if x.grad is None else x.grad for path, x in module.named_parameters()}
    assert any(x.any() for path, x in gradients.items() if path in model.vision_params)
    forward, every = Forward(model), [0, 1, 2, 3, 4]
    cases = [
        (forward, [every]),
        (forward, [[3, 2], [4, 1, 0]]),
        (attrs.evolve(forward, remove_padding=False), [every]),
        (Forward(attrs.evolve(model, checkpoint_layers=True)), [[0], [1], [2], [3], [4]]),
    ]
    for run, groups in cases:
        check(run, params, record, groups, expected, gradients)


def test_a_critic_sees_videos_too():
    module, model, params = make("qwen2_5_vl", "value")
    head = params["score.weight"].clone().requires_grad_(), params["score.bias"].clone().requires_grad_()
    record = rows("qwen2_5_vl", ("iv", "v"))
    expected = theirs(module, record, head)
    weighted(expected).backward()
    gradients = {path: torch.zeros_like(x) if x.grad is None else x.grad for path, x in module.named_parameters()}
    gradients |= {"score.weight": head[0].grad, "score.bias": head[1].grad}
    check(Forward(model), params, record, [[1, 0]], expected, gradients, "values")


def flipped(skeleton, tensors, plain=vision_pass.video_features):
    pooled, deep = plain(skeleton, tensors)
    return pooled.flip(0), [x.flip(0) for x in deep]


def in_rows_order(distinct, plain=vision_pass._numbered):
    """As if the features of a row's images and videos came together."""
    placed, at = plain(distinct), 0
    for x in distinct:
        count = len(x.places) + len(x.video_places)
        placed.numbers[id(x)] = torch.arange(at, at + count)
        at += count
    return placed


def images_first(distinct, plain=vision_pass._numbered):
    """As if a row's images stood before its videos."""
    placed = plain(distinct)
    return placed._replace(numbers={key: x.sort().values for key, x in placed.numbers.items()})


def timeless(model, inputs, plain=vision_pass.row_positions):
    own, after = plain(model, inputs)
    own[0, inputs.video_places] = own[1, inputs.video_places]
    return own, after


def forgetting(rows, *, for_device, plain=vision_pass.joined):
    """Only what the first row has."""
    return {name: x for name, x in plain(rows, for_device=for_device).items() if name in rows[0]}


MISTAKES = (
    ("video_features", flipped),
    ("_numbered", in_rows_order),
    ("_numbered", images_first),
    ("row_positions", timeless),
    ("joined", forgetting),
)


def test_the_law_finds_mistakes():
    module, model, params = make("qwen2_vl")
    record = rows("qwen2_vl", ("i", "vi", "iv"))
    with torch.no_grad():
        expected = theirs(module, record)

        def gap():
            found = ours(Forward(model), params, record, [[0, 1, 2]])
            return max(float((x - y).abs().max()) for x, y in zip(found, expected, strict=True))

        assert gap() < 1e-10
        for function, mistake in MISTAKES:
            with pytest.MonkeyPatch.context() as patch, contextlib.suppress(ValueError):  # refused
                patch.setattr(vision_pass, function, mistake)
                assert gap() > 1e-6, mistake


def test_rows_of_a_prompt_share_its_videos_and_may_sample_what_stands_for_one(monkeypatch):
    _, model, params = make("qwen3_vl")
    record, seen = rows("qwen3_vl", ("", "vi", "v"), sampled=True), []
    plain = vision_pass.video_features
    monkeypatch.setattr(
        vision_pass, "video_features", lambda s, x: seen.append(len(x["pixel_values_videos"])) or plain(s, x)
    )
    with torch.no_grad():
        alone = ours(Forward(model), params, record, [[0], [1], [2]])
        once = sum(seen)
        together = ours(Forward(model), params, batches.repeat(record, 3, interleave=False), [list(range(9))])
    assert sum(seen) == 2 * once
    for i, x in enumerate(together):
        assert (x - alone[i % 3]).abs().max() < 1e-10
