"""Bodies of the protocol's requests, which may come compressed."""

from __future__ import annotations

import zstandard

from fppo.serve.refusal import Refusal

_STEP = 512  # bytes that are decompressed at a time, to 16 MiB at most


def decompressed(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Decompress a body to at most `max_bytes`. Raises Refusal."""
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise Refusal(f"content-encoding: {encoding[:40]!r}: give zstd, or nothing", status=415)
    parts, size, place = list[bytes](), 0, 0
    reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
    try:
        while place < len(body) and not reader.eof:
            parts.append(reader.decompress(body[place : place + _STEP]))
            place, size = place + _STEP, size + len(parts[-1])
            if size > max_bytes:
                raise Refusal(f"a body of over {max_bytes:,} bytes, decompressed", status=413)
    except zstandard.ZstdError as error:
        raise Refusal(f"the body is no zstd: {error}"[:300]) from error
    if not reader.eof:
        raise Refusal(f"the body is no whole zstd: it breaks off after {len(body):,} bytes")
    if place < len(body) or reader.unused_data:
        raise Refusal("the body has bytes behind its zstd frame: send one frame")
    return b"".join(parts)
