"""Prompts with images: where they come from, where they stand, and what is said of those that are none."""

import base64
import io
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import torch
from PIL import Image

from fppo import data
from fppo.data.chat import ChatOptions
from fppo.data.examples import _placed
from fppo.data.images import FRAMES, SHOWN, ImageReader, _spread, opened
from tests.data import rows
from tests.data.processors import processor

TOKEN = 3
READER = ImageReader(processor("llava"), TOKEN)
FIELDS = data.Fields(chat=True, images="images")


def picture(seed: int, size: tuple[int, int] = (16, 16)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def encoded(values, reader=READER, *, fields=FIELDS, **keywords):
    named = data.rows_of([{"answer": "1", **value} for value in values], "mine:rows")
    return data.encode_rows(named, reader.processor.tokenizer, fields=fields, images=reader, **keywords)


def test_paths_bytes_and_images_give_the_same(tmp_path):
    image = picture(0, (20, 12))
    image.save(tmp_path / "x.png")
    path = rows.write(tmp_path / "rows.jsonl", [{"prompt": "how many", "answer": "1", "images": "x.png"}])
    of_file = data.load_prompts(path, READER.processor.tokenizer, fields=FIELDS, images=READER)
    kinds = [image, png(image), {"bytes": png(image), "path": None}, {"bytes": None, "path": str(tmp_path / "x.png")}]
    prompts = encoded([{"prompt": "how many", "images": [kind]} for kind in kinds])
    assert {*prompts.tokens, *of_file.tokens} == {prompts.tokens[0]}
    assert prompts.inputs is not None
    assert all(x == of_file.inputs[0] for x in prompts.inputs)
    batch = data.collate(prompts, [0, 2])
    assert batch.inputs is not None
    assert batch.inputs[0].tensors["pixel_values"].shape == (1, 3, 16, 16)
    assert batch.tokens[0][batch.attention_mask[0]][batch.inputs[0].places].tolist() == [TOKEN] * 16
    assert batch.inputs[0].shown.shape == (1, 12, 20, 3)
    assert torch.equal(batch.inputs[0].shown[0], torch.from_numpy(np.array(image)))


@pytest.mark.parametrize("name", ["llava", "idefics3"])
def test_several_images_stand_where_the_prompt_has_them(name):
    reader = ImageReader(processor(name), TOKEN)
    two = [picture(1), picture(2)]
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}, {"type": "image"}]
    marked = [{"role": "system", "content": "s"}, {"role": "user", "content": "a<image>b<image>"}]
    messages = [marked[0], {"role": "user", "content": parts}]
    prompts = encoded(
        [
            {"prompt": marked, "images": two},
            {"prompt": messages, "images": two},
            {"prompt": "ab", "images": two},
            {"prompt": "ab", "images": None},
            {"prompt": "ab"},
        ],
        reader,
    )
    first, second, before, none, missing = prompts.tokens
    assert first == second
    assert none == missing
    assert prompts.inputs is not None
    assert prompts.inputs[3] is prompts.inputs[4] is None
    count = 16 if name == "llava" else 4
    inputs = prompts.inputs[0]
    assert len(inputs.places) == 2 * count
    assert (inputs.places.diff() > 1).sum() >= 1
    assert len(inputs.tensors["pixel_values"]) == 2
    assert inputs.tensors["pixel_values"].dim() == 4
    assert not torch.equal(inputs.tensors["pixel_values"][0], inputs.tensors["pixel_values"][1])
    a, b = (reader.processor.tokenizer.convert_tokens_to_ids(x) for x in "ab")
    assert before.index(a) > int(prompts.inputs[2].places[-1])
    assert first.index(a, 5) < int(inputs.places[0]) < first.index(b) < int(inputs.places[-1])
    chosen = data.select(prompts, [2, 3])
    assert chosen.inputs is not None
    assert chosen.inputs[0] == prompts.inputs[2]
    assert chosen.inputs[1] is None


def test_images_in_a_field_of_a_field_are_those_of_a_plain_one():
    """The prompt and the answer may be, too."""
    several = [[picture(1)], None, [picture(2), picture(3)]]
    plain = encoded([{"prompt": "ab", "images": images} for images in several])
    rows = [{"prompt": "ab", "more": {"images": images}} for images in several]
    nested = encoded(rows, fields=attrs.evolve(FIELDS, images="more.images"))
    listed = encoded(
        [{"prompt": "ab", "images": [[], images]} for images in several],
        fields=attrs.evolve(FIELDS, images="images.-1"),
    )
    assert plain.inputs is not None
    for found in (nested, listed):
        assert found.tokens == plain.tokens
        assert found.inputs is not None
        assert [*found.inputs] == [*plain.inputs]
    assert [x is None for x in plain.inputs] == [False, True, False]


def test_bad_images_are_named_with_row_and_field(tmp_path):
    (tmp_path / "torn.png").write_bytes(png(picture(0))[:60])
    values = [
        {"prompt": "x", "images": [picture(0)]},
        {"prompt": "x", "images": [picture(0), str(tmp_path / "torn.png")]},
        {"prompt": "x", "images": str(tmp_path / "none.png")},
        {"prompt": "x", "images": b"text"},
        {"prompt": "x", "images": 5},
        {"prompt": "<image> and <image>", "images": [picture(0)]},
        {"prompt": "a literal <image>"},
        {"prompt": [{"role": "user", "content": [{"type": "sound"}]}], "images": [picture(0)]},
    ]
    with pytest.raises(ValueError) as caught:
        encoded(values)
    lines = str(caught.value)
    for text in (
        "mine:rows:2: field 'images': image 2 (",
        "torn.png): ",
        "mine:rows:3: field 'images': image 1 (",
        "mine:rows:4: field 'images': image 1: cannot identify",
        "mine:rows:5: field 'images': image 1: a int, not a path",
        "mine:rows:6: field 'images': 1 images, and the prompt has 2 placeholders for them",
        "mine:rows:7: field 'images': 0 images, and the prompt has 1 placeholders for them",
        "mine:rows:8: field 'prompt': message 0 has a part that is neither",
    ):
        assert text in lines
    assert "mine:rows:1:" not in lines


def test_an_image_of_too_many_pixels_is_named(monkeypatch):
    """pillow refuses more than twice as many as it warns of."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 16 * 16 // 2 - 1)
    with pytest.raises(ValueError, match=r"mine:rows:1: field 'images': image 1: .* decompression bomb"):
        encoded([{"prompt": "x", "images": png(picture(0))}])


def test_an_image_in_the_place_of_tokens_has_as_many_placeholders_as_beside_others():
    """A processor that reads images together otherwise than one by one is refused."""
    at_once = SimpleNamespace(count=4)

    def read(*, text, images, return_tensors):
        count = 2 if len(images) == 1 else at_once.count
        return {"input_ids": torch.tensor([[9, *[TOKEN] * count, 9]]), "pixel_values": torch.zeros(len(images), 2)}

    reader = ImageReader(_Reads(read), TOKEN)
    parts = [[7], png(picture(0)), [8], png(picture(1))]
    tokens, inputs = reader.joined(parts)
    assert (tokens, inputs.places.tolist()) == ([7, TOKEN, TOKEN, 8, TOKEN, TOKEN], [1, 2, 4, 5])
    at_once.count = 3
    with pytest.raises(ValueError, match="3 placeholders of all images, and 4 of each alone"):
        reader.joined(parts)


@pytest.mark.parametrize("tools", [(), ({"name": "calculator"},)])
def test_a_processors_template_gets_the_chats_own_arguments_and_tools(tools):
    """None where there are none: to a template an empty list may be tools."""
    given = []

    def apply_chat_template(conversation, **how):
        if not how["tokenize"]:
            return f"fppo0said0x {how['tools']} x"
        given.append((how["tools"], how["enable_thinking"], how["add_generation_prompt"]))
        return {"input_ids": torch.tensor([[7, 8]])}

    words = SimpleNamespace(convert_ids_to_tokens=lambda ids: [])
    template = SimpleNamespace(tokenizer=words, apply_chat_template=apply_chat_template)
    reader = ImageReader(template, TOKEN, chat=ChatOptions(arguments={"enable_thinking": False}, tools=tools))
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    assert reader.encode(messages, []) == ([7, 8], None)
    assert given == [([*tools] or None, False, True)]


class _Reads:
    """A processor that is a function."""

    image_token = "<image>"

    def __init__(self, read):
        self._read = read

    def __call__(self, **given):
        return self._read(**given)


def test_text_that_stands_for_an_image_is_refused():
    reader = ImageReader(processor("idefics3"), TOKEN)
    marks = [{"type": "text", "text": "a"}]
    assert reader.encode([{"role": "user", "content": marks}], [])[1] is None
    marks.append({"type": "text", "text": "what is <image> ?"})
    with pytest.raises(ValueError, match=r"the text holds .*<image>.*, placeholders of images"):
        reader.encode([{"role": "user", "content": marks}], [])


def test_images_count_as_tokens():
    values = [{"prompt": "ab", "images": [picture(i) for i in range(count)]} for count in (0, 1, 2)]
    assert [len(x) for x in encoded(values).tokens] == [9, 25, 41]
    kept = encoded(values, max_prompt_tokens=30, over_long="drop")
    assert (len(kept), kept.num_dropped) == (2, 1)
    assert kept.inputs is not None
    assert len(kept.inputs[1].places) == 16
    exact = encoded(values, max_prompt_tokens=25, over_long="drop")
    assert exact.inputs is not None
    assert (len(exact), len(exact.inputs[1].places)) == (2, 16)
    with pytest.raises(ValueError, match="mine:rows:3: the prompt has 41 tokens"):
        encoded(values, max_prompt_tokens=30)


def test_what_images_do_not_go_with_is_refused():
    with pytest.raises(ValueError, match="'truncate' would cut through images and videos"):
        encoded([{"prompt": "x"}], over_long="truncate")
    with pytest.raises(ValueError, match="no row has images in the field 'images'; the first has"):
        encoded([{"prompt": "x", "image": picture(0)}])
    named = data.rows_of([{"prompt": "x", "answer": "1"}], "mine:rows")
    with pytest.raises(ValueError, match="go together"):
        data.encode_rows(named, READER.processor.tokenizer, fields=FIELDS)
    with pytest.raises(ValueError, match="give chat = true"):
        data.encode_rows(named, READER.processor.tokenizer, fields=data.Fields(images="images"), images=READER)


def test_images_are_shown_small():
    prompts = encoded([{"prompt": "x", "images": [picture(0, (400, 100)), picture(1, (10, 30))]}])
    assert prompts.inputs is not None
    shown = prompts.inputs[0].shown
    assert shown.shape == (2, 30, SHOWN, 3)
    assert (shown[1, :, 10:] == 255).all()
    assert (shown[1, :, :10] < 255).any()


def test_images_that_are_not_kept_are_read_again(monkeypatch):
    values = [{"prompt": "x", "images": [picture(i)]} for i in range(3)]
    kept = encoded(values)
    assert kept.inputs is not None
    assert kept.inputs[2] is kept.inputs[2]
    monkeypatch.setattr("fppo.data.encode._KEPT", sum(x.nbytes for x in kept.inputs[0].named().values()))
    again = encoded(values)
    assert again.inputs is not None
    assert [again.inputs[i] is again.inputs[i] for i in range(3)] == [True, False, False]
    assert list(again.inputs) == list(kept.inputs)
    for inputs in (again.inputs, kept.inputs):
        assert len(inputs) == 3
        assert list(inputs[1:]) == list(inputs[-2:]) == list(kept.inputs)[1:]
        assert list(inputs.select([2, 0, 2])) == [kept.inputs[i] for i in (2, 0, 2)]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "RGB"])
def test_images_of_any_mode_are_opened_in_rgb(mode, tmp_path):
    image = picture(4).convert(mode)
    image.save(tmp_path / "x.png")
    elsewhere = {"bytes": png(image), "path": "nowhere.png"}
    values = [image, png(image), bytearray(png(image)), elsewhere, str(tmp_path / "x.png"), tmp_path / "x.png"]
    for value in (*values, {"path": str(tmp_path / "x.png")}):
        found = opened(value, 1)
        assert found.mode == "RGB"
        assert np.array_equal(np.asarray(found), np.asarray(image.convert("RGB")))
    with pytest.raises(ValueError, match="image 7: a NoneType, not a path, bytes or an image"):
        opened({"bytes": None}, 7)


def test_frames_are_shown_from_the_first_to_the_last_evenly():
    assert [_spread(total) for total in range(FRAMES + 1)] == [list(range(total)) for total in range(FRAMES + 1)]
    for total in range(FRAMES + 1, 40):
        shown = _spread(total)
        gaps = [b - a for a, b in itertools.pairwise(shown)]
        assert (len(shown), shown[0], shown[-1]) == (FRAMES, 0, total - 1)
        assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("size", [(96, 96), (97, 10), (10, 192), (400, 3), (3, 3)])
def test_a_thumbnail_keeps_its_shape_and_a_small_image_every_pixel(size):
    image = picture(5, size)
    prompts = encoded([{"prompt": "x", "images": [image]}])
    shown = prompts.inputs[0].shown[0]
    width, height = (max(1, int(side * min(1.0, SHOWN / max(size)))) for side in size)
    assert tuple(shown.shape) == (height, width, 3)
    if max(size) <= SHOWN:
        assert torch.equal(shown, torch.from_numpy(np.array(image)))


@pytest.mark.parametrize("mark", ["<image>", "<begin>", "<video>", "<soft>", "<3>", "<4>"])
def test_no_placeholder_of_a_processor_stands_in_texts(mark):
    """Processors call theirs by several names, and tokens of features have names, too."""
    names = {"image_token": "<image>", "boi_token": "<begin>", "video_token": "<video>", "image_token_text": "<soft>"}
    words = SimpleNamespace(convert_ids_to_tokens=lambda ids: [f"<{token}>" for token in ids])
    reader = ImageReader(SimpleNamespace(tokenizer=words, **names), 3, video=4)

    def messages(text):
        parts = [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "text", "text": text}]
        return [{"role": "system", "content": parts[1:2]}, {"role": "user", "content": parts}]

    reader._check_text(messages("<5> image"))
    with pytest.raises(ValueError, match=rf"the text holds \['{mark}'\], placeholders"):
        reader._check_text(messages(f"b{mark}c"))


def test_paths_in_images_and_videos_are_beside_their_file_however_deep():
    """In lists of frames, tables of one file, and tables of frames with more beside them; other values stay."""
    beside, array = Path("/data"), np.zeros(3)
    for value, expected in (
        ("a.png", "/data/a.png"),
        ("/else/a.png", "/else/a.png"),
        (["a.png", "b/c.png"], ["/data/a.png", "/data/b/c.png"]),
        (("a.png", [array, "b.png"]), ["/data/a.png", [array, "/data/b.png"]]),
        ({"path": "a.png"}, "/data/a.png"),
        ({"path": "a.png", "bytes": None}, "/data/a.png"),
        ({"path": "a.png", "bytes": b"x"}, {"path": "a.png", "bytes": b"x"}),
        ({"frames": ["a.png", {"path": "b.png"}], "fps": 2}, {"frames": ["/data/a.png", "/data/b.png"], "fps": 2}),
        ({"frames": "clip.mp4"}, {"frames": "/data/clip.mp4"}),
        (None, None),
    ):
        assert _placed(value, beside) == expected
    assert _placed(array, beside) is array


ENCODED = base64.b64encode(png(picture(5))).decode()


@pytest.mark.parametrize(
    "text",
    [
        ENCODED,
        f"data:image/png;base64,{ENCODED}",
        f"DATA:;charset=x;BASE64,{ENCODED}",
        f"data:image/png;base64,{ENCODED.replace('+', '-').replace('/', '_').rstrip('=')}",
        "\n".join(ENCODED[i : i + 76] for i in range(0, len(ENCODED), 76)),
    ],
)
def test_an_image_may_be_text_in_base64(text, tmp_path):
    """Bare or in a data: URL, beside a file whose relative paths are resolved, and as a frame."""
    for value in (text, {"bytes": text}, {"path": text}):
        assert np.array_equal(np.asarray(opened(value, 1)), np.asarray(picture(5)))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "what?", "answer": "1", "images": [text]}) + "\n")
    read = data.read_rows(str(tmp_path / "rows.jsonl"), problems=data.Problems())
    assert len(data.encode_rows(read, READER.processor.tokenizer, fields=FIELDS, images=READER)) == 1


def test_a_file_whose_name_looks_like_base64_is_a_file(tmp_path):
    name = "a" * 64
    (tmp_path / name).write_bytes(png(picture(6)))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "what?", "answer": "1", "images": [name]}) + "\n")
    read = data.read_rows(str(tmp_path / "rows.jsonl"))
    found = data.encode_rows(read, READER.processor.tokenizer, fields=FIELDS, images=READER)
    assert np.array_equal(found.inputs[0].shown[0].numpy(), np.asarray(picture(6)))


WRONG = {
    "no image": base64.b64encode(b"none" * 200_000).decode(),
    "no base64": "data:image/png,%89PNG" + "x" * 700_000,
    "broken base64": "data:image/png;base64," + "=x" * 350_000,
    "cut": f"data:image/png;base64,{ENCODED[:40]}",
    "no path": "a photo. " * 80_000,
    "long path": "p/" * 2000 + "a.png",
    "bytes": b"none" * 200_000,
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_said_of_no_image_is_short_and_says_what_it_was_taken_for(kind):
    for value in (WRONG[kind], {"path": None, "bytes": WRONG[kind]}):
        with pytest.raises(ValueError, match=r"image 3[ :]") as found:
            opened(value, 3)
        assert len(str(found.value)) < 900
        if kind in ("no image", "no base64", "broken base64", "cut"):
            assert "base64" in str(found.value)
    with pytest.raises(ValueError, match="7 problems in the data") as found:
        encoded([{"prompt": "what?", "images": [value]} for value in WRONG.values()])
    assert len(str(found.value)) < 900 * len(WRONG)


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_photo_is_turned_as_it_says(turn, kind, tmp_path):
    from transformers.image_utils import load_image

    tags, file = Image.Exif(), tmp_path / "photo"
    tags[0x0112] = turn
    picture(7, (16, 8)).save(file, kind, exif=tags)
    expected = np.asarray(load_image(str(file)))
    assert expected.shape[:2] == ((16, 8) if turn > 4 else (8, 16))
    for value in (str(file), file.read_bytes(), {"bytes": file.read_bytes()}, Image.open(file)):
        assert np.array_equal(np.asarray(opened(value, 1)), expected)
