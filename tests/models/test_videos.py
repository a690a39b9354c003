"""Videos: positions of three axes against a loop by hand, the check at load, and rows that no model takes."""

import attrs
import pytest
import torch

from fppo import models
from fppo.batch import RowInputs
from fppo.models import vision_pass
from fppo.models.vision_pass import place_images, row_positions, shift_of
from tests.models.vision import CONFIGS, END, IMAGE, START, VIDEO, make, prompt

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SECONDS = 2.0


def by_hand(name, row, sizes, seconds):
    """The positions of every token of a row, of which `row` lists the pieces, from the definition (Qwen2-VL,
    arXiv:2409.12191, section 2.1, as transformers has it): a text goes on by ones on all axes; what is seen begins
    where the text ended, and each token has its time, its line and its column; the text after it begins as many behind
    as its longer side has."""
    positions, at = [], 0
    for kind, count in row:
        if kind == "text":
            for i in range(count):
                positions.append((at + i, at + i, at + i))
            at += count
            continue
        frames, height, width = sizes[kind]
        step = 1.0
        if name == "qwen2_5_vl" and kind == "video":
            step = seconds * CONFIGS[name].vision_config.tokens_per_second
        for frame in range(frames):
            for line in range(height):
                for column in range(width):
                    positions.append((at + int(frame * step), at + line, at + column))
        at += max(height, width)
    return positions


def example(name):
    """A text, an image of 2 by 3 tokens, a text, a video of four frames, seen as two of 3 by 2 tokens, and a text."""
    frame = [VIDEO] * 6
    if name == "qwen3_vl":
        seen, pieces = (
            [7, START, *frame, END, 8, START, *frame, END],
            [("text", 5), ("frame", 6), ("text", 3), ("frame", 6)],
        )
        sizes = {"image": (1, 2, 3), "frame": (1, 3, 2)}
    else:
        seen, pieces = [START, *frame * 2, END], [("text", 4), ("video", 12)]
        sizes = {"image": (1, 2, 3), "video": (2, 3, 2)}
    tokens = [1, 5, START, *[IMAGE] * 6, END, 9, 9, *seen, 11, 12, 13]
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "pixel_values": torch.randn(24, 96, generator=generator, dtype=torch.float64),
        "image_grid_thw": torch.tensor([[1, 4, 6]]),
        "pixel_values_videos": torch.randn(48, 96, generator=generator, dtype=torch.float64),
        "video_grid_thw": torch.tensor([[2, 6, 4]]),
    }
    if name == "qwen2_5_vl":
        tensors["second_per_grid_ts"] = torch.tensor([SECONDS])
    of_images, of_videos = (torch.tensor([i for i, x in enumerate(tokens) if x == mark]) for mark in (IMAGE, VIDEO))
    shown = torch.zeros(2, 1, 1, 3, dtype=torch.uint8)
    inputs = RowInputs(tensors, of_images, shown, of_videos)
    return tokens, inputs, by_hand(name, [("text", 3), ("image", 6), *pieces, ("text", 4)], sizes, SECONDS)


@pytest.mark.parametrize("name", FAMILIES)
def test_positions_are_those_of_a_loop_by_hand(name):
    model = models.build(CONFIGS[name])
    tokens, inputs, expected = example(name)
    assert len(expected) == len(tokens)
    own, after = row_positions(model, inputs)
    head = own.shape[1]
    assert own.T.tolist() == [list(x) for x in expected[:head]]
    assert (after, after, after) == expected[head]
    assert shift_of(model, inputs) == after - head
    rows, lengths = [[4, 5], tokens, [6, VIDEO, IMAGE], tokens], [2, len(tokens), 3, len(tokens)]
    packed, counted = torch.tensor([x for row in rows for x in row]), [i for length in lengths for i in range(length)]
    images, positions = place_images(model, [None, inputs, None, inputs], packed, torch.tensor(counted), lengths)
    plain = [[(i, i, i) for i in range(length)] for length in lengths]
    assert positions.T.tolist() == [list(x) for row in (plain[0], expected, plain[2], expected) for x in row]
    marks = {2 + i for i, x in enumerate(tokens) if x in (IMAGE, VIDEO)}
    assert images.places.tolist() == sorted(marks | {len(tokens) + 3 + i for i in marks})
    assert images.numbers.tolist() == [*range(18)] * 2  # images come first, and the rows share them
    assert images.counts == (6, 12)


def test_features_of_mixed_rows_are_numbered_images_first():
    """A row whose video stands before its image, and one of the other order."""
    model, generator = models.build(CONFIGS["qwen2_vl"]), torch.Generator().manual_seed(3)
    rows = [prompt("qwen2_vl", kinds, generator) for kinds in ("vi", "iv")]
    tokens, lengths = torch.tensor([x for row, _ in rows for x in row]), [len(row) for row, _ in rows]
    images, _ = place_images(model, [x for _, x in rows], tokens, torch.zeros_like(tokens), lengths)
    counts = [(len(x.places), len(x.video_places)) for _, x in rows]
    of_images = sum(count for count, _ in counts)
    assert images.counts == (of_images, sum(count for _, count in counts))
    expected = [
        *(of_images + i for i in range(counts[0][1])),
        *range(counts[0][0]),
        *range(counts[0][0], of_images),
        *(of_images + counts[0][1] + i for i in range(counts[1][1])),
    ]
    assert images.numbers.tolist() == expected
    assert (tokens[images.places] == IMAGE).tolist() == [number < of_images for number in expected]


def reversed_frames(skeleton, tensors, plain=vision_pass.video_features):
    pooled, deep = plain(skeleton, tensors)
    return pooled.flip(0), [x.flip(0) for x in deep]


def halved(skeleton, tensors, plain=vision_pass.video_features):
    pooled, deep = plain(skeleton, tensors)
    return pooled, [x / 2 for x in deep]


def crossed(distinct, plain=vision_pass._numbered):
    """Features of videos at the places of images."""
    placed = plain(distinct)
    total = sum(placed.counts)
    return placed._replace(numbers={key: (x + placed.counts[0]) % total for key, x in placed.numbers.items()})


def timeless(model, inputs, plain=vision_pass.row_positions):
    own, after = plain(model, inputs)
    own[0, inputs.video_places] = own[1, inputs.video_places]
    return own, after


def as_published(model, inputs, plain=vision_pass.row_positions):
    """The text after a video begins behind its last time, as in vLLM."""
    own, _ = plain(model, inputs)
    return own, int(own.max()) + 1


@pytest.mark.parametrize(
    ("name", "function", "mistake"),
    [
        ("qwen2_vl", "video_features", reversed_frames),
        ("qwen2_vl", "row_positions", timeless),
        ("qwen2_5_vl", "row_positions", as_published),
        ("qwen2_5_vl", "_numbered", crossed),
        ("qwen3_vl", "video_features", halved),
    ],
)
def test_a_mistake_with_videos_is_found_when_the_model_is_loaded(name, function, mistake, monkeypatch):
    model = models.build(CONFIGS[name])
    monkeypatch.setattr(vision_pass, function, mistake)
    with pytest.raises(ValueError, match=f"model type '{name}'"):
        models.check_model(model)


def test_rows_whose_videos_do_not_fit_are_refused():
    model = models.build(CONFIGS["qwen2_vl"])
    tokens, inputs, _ = example("qwen2_vl")
    places = torch.arange(len(tokens))

    def placed(inputs, row=tokens, model=model):
        place_images(model, [inputs], torch.tensor(row), places[: len(row)], [len(row)])

    placed(inputs)
    with pytest.raises(ValueError, match="a row's videos have positions without their placeholder token 61"):
        placed(attrs.evolve(inputs, video_places=inputs.video_places - 1))
    with pytest.raises(ValueError, match="a row's images have positions without their placeholder token 60"):
        placed(attrs.evolve(inputs, places=inputs.video_places, video_places=inputs.places))
    with pytest.raises(ValueError, match="11 placeholder tokens for videos with 12 features"):
        placed(attrs.evolve(inputs, video_places=inputs.video_places[:-1]))
    with pytest.raises(ValueError, match=f"a row of {len(tokens) - 5} tokens has images or videos beyond its end"):
        placed(inputs, tokens[:-5])
    apart = torch.tensor([*inputs.video_places[:5].tolist(), *(inputs.video_places[5:] + 1).tolist()])
    with pytest.raises(ValueError, match=r"1 videos have 2 runs of \[5, 7\] placeholder tokens"):
        row_positions(model, attrs.evolve(inputs, video_places=apart))
    blind = models.build(CONFIGS["idefics3"])
    with pytest.raises(ValueError, match="the rows have videos, and a model of type 'idefics3' takes none"):
        placed(inputs, model=blind)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_frames_that_stand_as_another_family_has_them_are_refused(name):
    """Those of Qwen3-VL apart, of Qwen2-VL together."""
    other = "qwen3_vl" if name == "qwen2_vl" else "qwen2_vl"
    _, model, _ = make(name)
    _, inputs, _ = example(other)
    with pytest.raises(ValueError, match=f"are split differently than model type '{name}' splits them"):
        row_positions(model, inputs)
