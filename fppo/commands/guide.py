"""The guide for agents: guide.md, one skill, whose blocks the tests run."""

from __future__ import annotations

from pathlib import Path


def show() -> None:
    """Print the guide without its comments, which say how tests run a block."""
    lines = Path(__file__).with_name("guide.md").read_text(encoding="utf-8").splitlines()
    print("\n".join(line for line in lines if not line.startswith("<!--")))
