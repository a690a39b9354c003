"""Bodies of some bytes that would be gigabytes once they are read: refused before anything is written out."""

from __future__ import annotations

import io
import resource
import tracemalloc

import numpy as np
import pytest
import zstandard
from PIL import Image
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from fppo.serve.refusal import Refusal
from fppo.serve.tinker import decode
from fppo.serve.tinker.decode import TinkerBounds
from fppo.serve.tinker.futures import Futures
from fppo.serve.tinker.guard import decompressed
from fppo.serve.tinker.samples import sample_work
from tests.serve.tinker.served import SIZE, base

TINY = TinkerBounds(decoded=64, padded=96, numbers=64, drawn=40, pixels=100)


def sparse(rows, columns, dtype=pb.DTYPE_INT64, value=np.int64):
    """A tensor with one number in its first row."""
    pointers = np.array([0, *[1] * rows], np.int64).tobytes()
    csr = pb.SparseCsr(
        values=np.ones(1, value).tobytes(), crow_indices=pointers, col_indices=np.zeros(1, np.int64).tobytes()
    )
    return pb.Tensor(dtype=dtype, shape=[rows, columns], sparse_csr=csr)


def image(width, height):
    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "png")
    return file.getvalue()


def datum(length, columns, *, pictures=(), **beside):
    text = pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=np.full(length, 3, np.int32).tobytes()))
    chunks = [text, *(pb.Chunk(image=pb.ImageChunk(data=each)) for each in pictures)]
    return pb.Datum(model_input=chunks, loss_fn_inputs={"target_tokens": sparse(length, columns), **beside})


def read(*data, bounds=None, vocabulary=SIZE):
    message = pb.ForwardBackwardRequest(data=data, loss_fn="cross_entropy")
    return decode.pass_verb(message, bounds=bounds or TinkerBounds(), vocabulary=vocabulary, limit=4096)


WIDE = sparse(4, 1 << 20, pb.DTYPE_FLOAT32, np.float32)
WEIGHTS = {"weights": sparse(4, 9, pb.DTYPE_FLOAT32, np.float32)}


@pytest.mark.parametrize(
    ("data", "bounds", "text"),
    [
        ([datum(1, 1 << 20)], None, "more columns than the model"),
        ([datum(1, SIZE + 1)], None, f"more columns than the model's {SIZE} tokens"),
        (
            [datum(4, 8, weights=sparse(4, 1 << 20, pb.DTYPE_FLOAT32, np.float32))],
            None,
            "weights: shape .* more columns",
        ),
        ([datum(4, 9), datum(4, 9)], TINY, "over 64 numbers in all"),
        ([datum(4, 9, **WEIGHTS)], TINY, "over 64 numbers in all"),
        (
            [datum(1, 8), datum(9, 1), datum(1, 1)],
            TINY,
            "3 datums of up to 9 tokens with up to 8 targets",
        ),
        ([datum(4, 2, pictures=[image(9, 9), image(5, 4)])], TINY, "over 100 pixels in all images"),
    ],
)
def test_what_would_be_large_once_it_is_read_is_refused_before(data, bounds, text):
    tracemalloc.start()
    try:
        with pytest.raises(Refusal, match=text):
            read(*data, bounds=bounds)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_what_is_just_within_the_bounds_is_taken():
    assert read(datum(1, SIZE)).data[0].targets.shape == (1, SIZE)
    assert len(read(datum(4, 8), datum(4, 8), bounds=TINY).data) == 2
    assert len(read(datum(1, 4), datum(8, 1), datum(1, 1), bounds=TINY).data) == 3


def test_a_request_counts_by_what_it_is_once_it_is_read():
    verb = read(datum(4, 8))
    assert decode.memory_of(verb) == 8 * 4 + 8 * 32
    futures = Futures(lambda: 0.0)
    futures.open("a", "me", 10)
    futures.weigh("a", decode.memory_of(verb))
    assert futures.pending("me") == (1, 288)
    futures.forget(["a"])
    assert futures.pending("me") == (0, 0)


@pytest.mark.parametrize(
    ("samples", "most", "top", "taken"), [(2, 5, 4, True), (2, 5, 5, False), (3, 5, 3, False), (9, 9, 0, True)]
)
def test_likeliest_tokens_are_bounded_over_all_samples(samples, most, top, taken):
    request = types.SampleRequest(
        prompt=types.ModelInput.from_ints([3, 4]),
        num_samples=samples,
        sampling_params=types.SamplingParams(max_tokens=most),
        topk_sample_logprobs=top,
    )
    if taken:
        assert sample_work(request, "x", rules=base().rules, bounds=TINY).count == samples
        return
    with pytest.raises(Refusal, match="at most 40"):
        sample_work(request, "x", rules=base().rules, bounds=TINY)


def test_a_compressed_body_is_one_whole_frame():
    whole = b"tokens" * 4000 + bytes(range(256)) * 9
    packed = zstandard.ZstdCompressor(write_content_size=False).compress(whole)
    assert decompressed(packed, "zstd", len(whole)) == whole
    for cut in {1, 2, 5, len(packed) // 2, len(packed) - 1}:
        with pytest.raises(Refusal, match="breaks off"):
            decompressed(packed[:cut], "zstd", len(whole))
    for more in (b"x", packed):
        with pytest.raises(Refusal, match="behind its zstd frame"):
            decompressed(packed + more, "zstd", 2 * len(whole))
    zeros = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(Refusal, match="decompressed"):
        decompressed(zeros, "zstd", 1 << 20)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 128 << 10
