"""Sizes of decoding that fit into memory, found by halving what did not: no token depends on them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import attrs

from fppo._errors import RunFailed, printable
from fppo.rollout.rows import OpenRow

_log = logging.getLogger("fppo.rollout")


@attrs.define
class FittedSizes:
    """The sizes that an engine found, which remembers them from call to call; None: nothing failed yet.

    `cache_bytes` bounds the keys, values and states of rows at their longest, and `prefill_tokens` the tokens of a
    prefill of several rows. A row alone is prefilled with at most `row_tokens`; its other tokens run one by one.
    """

    cache_bytes: int | None = None
    prefill_tokens: int | None = None
    row_tokens: int | None = None

    def halve(self, prefilled: Sequence[int], *, rows: int, row_bytes: int, cuts: bool) -> bool:
        """Halve what may help a step that ran out of memory, and say so. Returns False if nothing is left to halve.

        `prefilled` are the numbers of tokens of the rows of the prefill that failed, if one did. `rows` counts the rows
        whose keys and values were on the device, each of `row_bytes` at its longest. `cuts`: whether a row alone can
        be prefilled in part.
        """
        what = None
        if len(prefilled) > 1:
            self.prefill_tokens = sum(prefilled) // 2
            what = f"passes over {sum(prefilled)} tokens of prompts", f"{self.prefill_tokens} tokens"
        elif rows > 1 and row_bytes:
            half = rows * row_bytes // 2
            self.cache_bytes = half if self.cache_bytes is None else min(half, self.cache_bytes)
            what = f"{rows} rows at once", f"{self.cache_bytes / 2**30:.3g} GiB of keys and values"
        elif cuts and sum(prefilled) > 1:
            self.row_tokens = sum(prefilled) // 2
            what = f"a pass over a row of {sum(prefilled)} tokens", f"{self.row_tokens} of its tokens"
        if what is not None:
            _log.warning("sampling: no memory for %s; at most %s from now on", *what)
        return what is not None


def alone(row: OpenRow, error: str) -> RunFailed:
    """The failure of a row that has no other beside it and does not fit."""
    found = printable(error.partition("\n")[0], 300)
    return RunFailed(
        f"sampling: request {row.name!r}: one row of {len(row.ids)} tokens, which may have {row.max_length}, does not "
        f"fit into memory by itself ({found}); shorten rows (rollout.max_tokens, data.max_prompt_tokens), or make room "
        "for it with model.offload, model.ref_offload or model.lora.base: docs/guides/memory.md"
    )
