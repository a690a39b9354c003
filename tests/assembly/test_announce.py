"""Lines on what is loaded, word for word, with stand-ins for what is loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from fppo import models
from fppo.assembly import announce
from fppo.assembly.announce import (
    input_lines,
    model_lines,
    optimizer_lines,
    sharing_lines,
    supervised_lines,
)
from fppo.models import lora
from fppo.models.adapted import Lora
from fppo.quickstart import small_model
from fppo.runtime.simulate import simulate
from fppo.settings.learning import OptimizerSettings
from fppo.settings.model import ModelSettings
from fppo.settings.placement import PlacementSettings, RoleSettings
from fppo.settings.train import DataSettings
from fppo_kernels.table import Kernels

MODEL = ModelSettings(path="m", compute_dtype="bfloat16", attention="varlen", log_probs="triton")


class Prompts(SimpleNamespace):
    """Prompts, one for each of their sources."""

    def __len__(self) -> int:
        return len(self.sources)


def prompts(*sources: str, dropped: int = 0, cut: int = 0) -> Any:
    return Prompts(sources=sources, num_dropped=dropped, num_truncated=cut)


def inputs(placement: PlacementSettings | None = None, **changes: Any) -> Any:
    sampling = SimpleNamespace(stop_token_ids=(1, 8), stop_texts=SimpleNamespace(texts=[b"ab", b"\n"]))
    words = SimpleNamespace(decode=lambda ids: f"<{ids[0]}>")
    whole = {"device": torch.device("cpu"), "tokenizer": words, "sampling": sampling, "held_out": None}
    whole["settings"] = SimpleNamespace(model=MODEL, placement=placement or PlacementSettings())
    return SimpleNamespace(**{**whole, "prompts": prompts("b", "a", "a", "d", "c", dropped=1200, cut=2), **changes})


def test_what_is_read_is_said_line_by_line():
    differing = {"steps": 4, "data.path": ["x", "y"], "model.config": "a\n " * 40}
    pools = {"p": {"ranks": 2, "threads": 3}, "e": {"ranks": 1, "threads": 1}}
    placement = PlacementSettings(pools=pools, roles=RoleSettings(actor="p", rollout="e"))
    made = inputs(placement, held_out=prompts("t", "t"))
    found = input_lines(made, differing, ["one: two"], ["old log-probs"], ["x changes nothing"])
    assert [" ".join(line.split()) for line in found] == [
        "device cpu, bfloat16",
        "kernels attention varlen, log-probs triton",
        "auto one: two",
        "pools p (actor, reference): 2 ranks of 3 threads; e (rollout): 1 engine of 1 thread",
        "prompts 5 of a, b, c and 1 more (1,200 too long, dropped, 2 cut); held out: 2 of t",
        r"ends '<1>' '<8>' 'ab' '\n'",
        f"settings steps=4, data.path=x, y, model.config={('a ' * 29)[:57]}...",
        "auto old log-probs",
        "note x changes nothing",
    ]
    assert all(line.startswith(f"{line.split()[0]:<10}") for line in found)
    assert all(len(part) <= 80 for line in found for part in line.splitlines())
    assert all(part.startswith(" " * 10) for line in found for part in line.splitlines()[1:])


def test_a_stop_that_is_a_token_and_a_text_is_said_once():
    both = SimpleNamespace(stop_token_ids=(1, 8), stop_texts=SimpleNamespace(texts=[b"<8>", b"x"]))
    lines = input_lines(inputs(sampling=both), {})
    assert [line.split() for line in lines if line.startswith("ends")] == [["ends", "'<1>'", "'<8>'", "'x'"]]


def test_nothing_is_said_of_what_is_not_there():
    alone = SimpleNamespace(stop_token_ids=(1,), stop_texts=None)
    nobodys = {"mesh.shard": 1, "x": 1}  # a command fills the first in
    found = input_lines(inputs(sampling=alone, prompts=prompts("a", "b", "c")), nobodys)
    assert [" ".join(line.split()) for line in found] == [
        "device cpu, bfloat16",
        "kernels attention varlen, log-probs triton",
        "prompts 3 of a, b, c",
        "ends '<1>'",
        "settings x=1",
    ]


@pytest.mark.parametrize(
    ("chat", "roles", "thinking", "said"),
    [
        (False, ["user"], "keep", []),
        (True, [], "keep", []),
        (
            True,
            ["user", "tool"],
            "keep",
            [
                "turns the chat template leaves out thoughts before a user's or a tool's message; "
                "the policy goes on reading its own"
            ],
        ),
        (
            True,
            ["user"],
            "drop",
            [
                "turns the chat template leaves out thoughts before a user's message; "
                "each turn is a row, whose prompt is as the template has it"
            ],
        ),
        (
            True,
            [],
            "drop",
            [
                "turns the chat template leaves out no earlier thoughts; "
                "each turn is a row, whose prompt is as the template has it"
            ],
        ),
    ],
)
def test_what_becomes_of_thoughts_is_said_of_chats(monkeypatch, chat, roles, thinking, said):
    asked = []
    monkeypatch.setattr(announce, "forgets_thinking", lambda words, **named: asked.append(named["roles"]) or roles)
    rows = DataSettings(chat=chat)
    found = input_lines(inputs(), {}, thinking=thinking, rows=rows)
    lines = [" ".join(line.split()) for line in found]
    assert [line for line in lines if line.startswith("turns")] == said
    assert asked == [("tool",)] * chat


def test_a_supervised_run_says_its_rows_and_the_tokens_that_it_imitates_in_training():
    class Rows(SimpleNamespace):
        def __len__(self) -> int:
            return len(self.rows)

    def rows(*masks, dropped=0):
        return Rows(rows=[SimpleNamespace(mask=mask) for mask in masks], num_dropped=dropped)

    sets: Any = {"demonstrations": rows((True, False), (True, True)), "held out": rows((True,), dropped=1500)}
    found = supervised_lines(torch.device("cpu"), MODEL, sets, 1200, 64, ["a: b"])
    assert [" ".join(line.split()) for line in found] == [
        "device cpu, bfloat16",
        "kernels attention varlen, log-probs triton",
        "auto a: b",
        "rows demonstrations 2, held out 1 (1,500 too long, dropped); 3 tokens to imitate",
        "steps 1,200 of 64 sequences",
    ]
    none: Any = {"demonstrations": rows((True,)), "held out": None}
    assert "rows demonstrations 1; 1 tokens to imitate" in " ".join(
        " ".join(supervised_lines(torch.device("cpu"), MODEL, none, 1, 2, [])).split()
    )


def test_a_model_says_its_size_and_an_adapter_what_is_trained():
    model = small_model(15, width=16, layers=1)
    count = sum(x.numel() for x in model.shapes.values())
    (line,) = model_lines(model, "there", ["critic", "reference"])
    whole = f"model qwen2 of {count:,} parameters, from there, and a critic and a reference"
    assert " ".join(line.split()) == whole
    assert model_lines(model, "there", [])[0].split()[-1] == "there"
    adapted = lora.without_base(model, Lora(2, 8.0, ("q_proj", "v_proj")))
    first, second = model_lines(adapted, "there", [])
    trained = sum(x.numel() for x in adapted.shapes.values())
    assert " ".join(first.split()) == whole.partition(", and")[0]
    assert " ".join(second.split()) == f"adapter rank 2 on 2 weights: {trained:,} parameters are trained"


def test_a_base_in_codes_says_its_kind_and_the_memory_of_a_rank(monkeypatch):
    monkeypatch.setattr(announce, "base_kind", lambda model: "nf4")
    params = {"a": torch.zeros(3, 2**18, dtype=torch.float32), "b": torch.zeros(2**19, dtype=torch.uint8)}
    frozen = SimpleNamespace(lora=SimpleNamespace(rank=4), places=("q", "v"), params=params)
    model: Any = SimpleNamespace(
        plain=SimpleNamespace(whole_shapes={"a": (10, 20), "b": (5,)}),
        config=SimpleNamespace(model_type="kind"),
        frozen=frozen,
        whole_shapes={"x": (7, 4), "y": (4, 9), "z": (100, 100)},
        extents={"x": None, "y": None},
        forms={"q": None, "v": None, "o": None},
    )
    assert [" ".join(line.split()) for line in model_lines(model, "there", ["critic"])] == [
        "model kind of 205 parameters, from there, and a critic",
        "adapter rank 4 on 2 weights: 64 parameters are trained",
        "base 3 weights in nf4; 3.5 MiB a rank with the others",
    ]


@pytest.mark.parametrize(
    ("n", "share", "graphs", "hindrances", "said"),
    [
        (1, "auto", True, [("a.b", 2, "does")], []),
        (2, True, False, [("a.b", 2, "does")], []),
        (2, False, False, [("a.b", 2, "does")], []),
        (2, "auto", False, [], []),
        (2, "auto", False, [("a.b", "x", "does"), ("c", 1, "d")], ["a.b = 'x' does"]),
        (2, "auto", True, [], ["model.graphs records passes over rows that share nothing"]),
        (2, "auto", True, [("a.b", 2, "does")], ["a.b = 2 does"]),
        (2, "auto", "auto", [], []),
    ],
)
def test_why_rows_share_no_prompts_is_said_once(n, share, graphs, hindrances, said):
    section = attrs.evolve(MODEL, share_prompts=share, graphs=graphs)
    found = sharing_lines(section, n, hindrances, small_model(15, width=16, layers=1), Kernels.named())
    expected = [f"prompts computed anew for each response: {text}" for text in said]
    assert [" ".join(line.split()) for line in found] == expected


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_rows_of_a_model_that_is_cut_share_prompts_as_those_of_the_whole_one(axis):
    model = small_model(16, width=16, layers=2)
    section = attrs.evolve(MODEL, share_prompts="auto")
    cut = simulate({axis: 2}, lambda mesh: sharing_lines(section, 2, [], models.place(model, mesh), Kernels.named()))
    assert cut == [[], []]


def test_a_run_says_which_parameters_muon_has():
    model = small_model(16, width=16, layers=2)
    own, both = OptimizerSettings(), OptimizerSettings(name="muon")
    assert optimizer_lines("actor", own, model) == optimizer_lines("critic", both, None) == []
    (line,) = optimizer_lines("actor", both, model)
    said = " ".join(line.split())
    assert said.startswith("optimizer actor: muon: 14 matrices; adamw: ")
    assert "embeddings and heads" in said
    adapted = lora.without_base(model, Lora(2, 4.0))
    (line,) = optimizer_lines("sft", both, adapted)
    assert " ".join(line.split()) == "optimizer sft: muon: 28 matrices of adapters; adamw: nothing"
