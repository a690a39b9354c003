"""The page of the viewer: one HTML document with its script and style, and with whole runs for an export."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from fppo.report import viewed
from fppo.runs import sample_files
from fppo.runs.sample_files import SAMPLES
from fppo.runtime.exports import write_whole


def page(title: str, blocks: Iterable[str] = (), *, live: bool) -> bytes:
    """The document; with `blocks` it loads nothing, and with `live` it requests its contents from its server.

    Its content security policy allows only the script and the style in the document, by their digests.
    """
    script, style = _asset("viewer.js"), _asset("viewer.css")
    rules = {
        "default-src": "'none'",
        "script-src": _source(script),
        "style-src": _source(style),
        "img-src": "blob:",
        "connect-src": "'self'" if live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    policy = escape("; ".join(f"{name} {value}" for name, value in rules.items()))
    head = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n<body>"
        "<noscript>This page needs JavaScript.</noscript>\n"
    )
    return "".join([head, *blocks, f"<script>{script}</script></body></html>\n"]).encode("utf-8", "replace")


def _asset(name: str) -> str:
    return resources.files("fppo.report").joinpath("viewer", name).read_text(encoding="utf-8")


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def export(runs: Sequence[Path], target: Path, *, most_bytes: float) -> Path:
    """Write runs as one page that works without a server or a network, and return its path.

    While the files of sampled rows exceed `most_bytes` together, every second step, then every fourth and so on is
    left out (`sample_files.thinned`).
    """
    states, blocks = list[dict[str, Any]](), list[str]()
    for number, (run, title) in enumerate(zip(runs, viewed.titles(runs), strict=True)):
        state = viewed.state_of(run, title) or {}
        found = sample_files.files(run / SAMPLES)
        left_out = set(sample_files.thinned(found, most_bytes / len(runs))) if found else set()
        kept = {step for step, path in found.items() if path not in left_out}
        state["samples"] = [[step, tag] for step, tag in state["samples"] if step in kept]
        if left_out:
            state["notes"].append(f"this page holds the rows of {len(kept)} of {len(found)} steps")
        states.append(state)
        blocks += _rows(number, run, [step for step, _ in state["samples"]])
    text = json.dumps(states).replace("<", "\\u003c")
    blocks.insert(0, f'<script type="application/json" id="state">{text}</script>\n')
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, page(", ".join(state["title"] for state in states), blocks, live=False))
    return Path(os.path.abspath(target))


def _rows(number: int, run: Path, steps: Sequence[int]) -> Iterator[str]:
    """The blocks of a run's rows: an index for each few steps, and the file of each step."""
    for first in range(0, len(steps), viewed.MOST_STEPS):
        some = steps[first : first + viewed.MOST_STEPS]
        yield _block(f"index-{number}-{some[0]}", viewed.index_of(run, some))
    for step in steps:
        if (path := viewed.sample_file(run, step)) is not None:
            yield _block(f"rows-{number}-{step}", path.read_bytes())


def _block(name: str, content: bytes) -> str:
    """Bytes in a script element whose type is no script's, so that no browser runs or parses it."""
    return f'<script type="application/octet-stream" id="{name}">{base64.b64encode(content).decode()}</script>\n'
