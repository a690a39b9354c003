"""Files that are written tensor by tensor: the library's bytes, whatever comes first."""

import contextlib

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo.runtime.streamed import opened, written

KINDS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
TENSORS = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__" and name.isprintable()),
    st.tuples(st.sampled_from(KINDS), st.lists(st.integers(0, 4), max_size=3)),
    min_size=1,
    max_size=6,
)


@given(TENSORS, st.randoms(use_true_random=False))
def test_the_file_is_the_librarys_in_any_order(tmp_path_factory, kinds, random):
    place = tmp_path_factory.mktemp("files")
    tensors = {name: torch.randint(0, 2, shape).to(kind) for name, (kind, shape) in kinds.items()}
    safetensors.torch.save_file(tensors, place / "whole", metadata={"format": "pt"})
    like = {name: x.to("meta") for name, x in tensors.items()}
    with written(place / "streamed", like, metadata={"format": "pt"}) as write:
        for name in random.sample(sorted(tensors), len(tensors)):
            write(name, tensors[name])
    assert (place / "streamed").read_bytes() == (place / "whole").read_bytes()
    with opened(place / "whole") as tensor:
        for name, x in tensors.items():
            assert torch.equal(tensor(name, x.dtype), x)


@given(st.data())
def test_a_file_that_is_cut_or_changed_gives_an_error_or_the_tensors_bytes(tmp_path_factory, data):
    place = tmp_path_factory.mktemp("files") / "x"
    safetensors.torch.save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}, place)
    content = bytearray(place.read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    place.write_bytes(content)
    for name, kind in (("a", torch.float32), ("b", torch.bfloat16)):
        with contextlib.suppress(ValueError, KeyError, TypeError), opened(place) as tensor:
            assert tensor(name, kind).nbytes <= len(content)


def test_what_does_not_fit_or_never_comes_is_refused(tmp_path):
    like = {"a": torch.empty(2), "b": torch.empty(3)}
    words = r"a is torch.float32 \[3\], not torch.float32 \[2\]"
    with pytest.raises(ValueError, match=words), written(tmp_path / "x", like, metadata={}) as write:
        write("a", torch.ones(3))
    with pytest.raises(ValueError, match=r"x lacks \['b'\]"), written(tmp_path / "x", like, metadata={}) as write:
        write("a", torch.ones(2))
