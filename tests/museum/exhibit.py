"""The form of an exhibit, and the ways to show one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import attrs

from fppo import laws

GITHUB: Mapping[str, str] = MappingProxyType(
    {
        "AReaL": "areal-project/AReaL",
        "Arctic-Platform": "Snowflake-AI-Research/Arctic-Platform",
        "DeepSeekRL-Extended": "brendanhogan/DeepSeekRL-Extended",
        "DeepSpeedExamples": "deepspeedai/DeepSpeedExamples",
        "Gym": "NVIDIA-NeMo/Gym",
        "Liger-Kernel": "linkedin/Liger-Kernel",
        "Megatron-Bridge": "NVIDIA-NeMo/Megatron-Bridge",
        "NeMo-RL": "NVIDIA-NeMo/RL",
        "OpenRLHF": "OpenRLHF/OpenRLHF",
        "PAE": "Mowenyii/PAE",
        "ROLL": "alibaba/ROLL",
        "SkyRL": "NovaSky-AI/SkyRL",
        "ToolRL": "qiancheng0/ToolRL",
        "agents": "tensorflow/agents",
        "gem": "axon-rl/gem",
        "hands-on-modern-rl": "walkinglabs/hands-on-modern-rl",
        "marin": "marin-community/marin",
        "miles": "radixark/miles",
        "ms-swift": "modelscope/ms-swift",
        "prime-rl": "PrimeIntellect-ai/prime-rl",
        "rlhf-book": "natolambert/rlhf-book",
        "slime": "THUDM/slime",
        "trl": "huggingface/trl",
        "verl": "verl-project/verl",
    }
)


@attrs.frozen
class Exhibit:
    """A published failure: `source` is repository#number or arXiv:number, `story` what went wrong in one sentence.

    `law` is the law that notices it; `show` plants the mistake, and returns what the law says of it or None.
    """

    source: str
    story: str
    law: str
    show: Callable[[], str | None]

    @property
    def link(self) -> str:
        """The source as a link of Markdown; GitHub leads from an issue's address to a pull request of that number."""
        name, _, number = self.source.partition("#")
        if not number:
            return f"[{self.source}](https://arxiv.org/abs/{self.source.removeprefix('arXiv:')})"
        return f"[{self.source}](https://github.com/{GITHUB[name]}/issues/{number})"


def exhibit(source: str, story: str, law: str, kind: str, **more: Any) -> Callable[[Callable], Exhibit]:
    """Make an exhibit of a function by a law of a kind of `laws.verdicts`; `reference`, `tokens` as there."""

    def made(fn: Callable) -> Exhibit:
        def show() -> str | None:
            found = laws.verdicts(fn, kind=kind, only=(law,), name=fn.__name__, **more)
            broken = [verdict.reason for verdict in found if verdict.outcome == "fault"]
            return broken[0] if broken else None

        return Exhibit(source, story, law, show)

    return made


def raised(source: str, story: str, law: str, check: Callable[[], None]) -> Exhibit:
    """Make an exhibit of a check that raises LawViolation."""

    def show() -> str | None:
        try:
            check()
        except laws.LawViolation as error:
            return str(error).splitlines()[1].strip() if law in error.law else None
        return None

    return Exhibit(source, story, law, show)
