"""Runs whose policy has a tool, from settings to metrics."""

import attrs
import pytest
import torch

from fppo import metrics
from fppo.assembly import run as assembly
from fppo.pipeline.train import iterate
from fppo.runtime.mesh import LOCAL, Sharding
from fppo.runtime.simulate import simulate
from fppo.settings import checks
from tests import tiny_run
from tests.pipeline.test_mesh import steps
from tests.rollout.templates import KINDS


def with_adder(directory, **changes):
    """The settings of a run in whose rows most have several turns."""
    tiny_run.write_task(directory)
    turns = {"respond": "tests.rollout.functions:adder", "max_turns": 3}
    section = {f"rollout__turns__{name}": value for name, value in turns.items()}
    return tiny_run.settings(directory, rollout__stop=["+", "="], rollout__max_tokens=24, **section, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"rollout__ahead": 1}, {"algorithm__advantage": "grpo", "rollout__n": 4}])
def test_whole_steps_with_turns(tmp_path, changes):
    """Settings to metrics: all finite, and the trainer's log-probs are those sampled with."""
    settings = with_adder(tmp_path, **changes)
    with assembly.assemble(settings) as assembly_of_run:
        run = assembly_of_run.run
        sampled = iterate(run, program=assembly_of_run.program, draw=assembly_of_run.draw, ahead=settings.rollout.ahead)
        for _ in range(2):
            run, batch, report = next(sampled)
            numbers = metrics.report(report)
            assert numbers["rollout/turns/max"] > 1
            assert numbers["rollout/tool_failures"] == 0
            if not changes:
                assert numbers["training/rollout_probs_diff_max"] < 1e-5
            trained = {name: x for name, x in numbers.items() if name.startswith(("actor/", "critic/"))}
            assert all(torch.tensor(list(trained.values())).isfinite()), trained
            seen = batch.attention_mask[:, -batch.response_mask.shape[1] :]
            assert (seen & ~batch.response_mask).any()
        assert all(torch.tensor(list(metrics.report(assembly_of_run.evaluate(run)).values())).isfinite())


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"shard": 2}, pytest.param({"shard": 2, "sequence": 2}, marks=pytest.mark.slow)])
def test_steps_on_a_mesh_are_those_of_one_process(tmp_path, axes):
    """Every rank asks for some of the rows, remax's greedy ones too, and all train on the same."""
    settings = with_adder(tmp_path, device="cpu", algorithm__advantage="remax")
    expected, held_out = steps(settings, LOCAL, 2)

    def on_rank(mesh):
        return steps(settings, attrs.evolve(mesh, sharding=Sharding()), 2)

    for runs, evaluated in simulate(axes, on_rank):
        assert evaluated == pytest.approx(held_out, abs=1e-5, nan_ok=True)
        for (_, batch, report, _), (_, other, same, _) in zip(expected, runs, strict=True):
            assert torch.equal(batch.tokens, other.tokens)
            assert torch.equal(batch.response_mask, other.response_mask)
            for name in ("rollout/turns/mean", "actor/grad_norm", "critic/rewards/mean"):
                assert report[name] == pytest.approx(same[name], rel=1e-4, abs=1e-5)


BAD = [
    ({"max_turns": 3}, "nothing reads it here: it is for rollout.turns.respond"),
    ({"respond": "abacus"}, "one of ['calculator'], or module:function"),
    ({"respond": "a b:c"}, "module:function"),
    ({"respond": "my.tools:f", "max_turns": 1}, "would never be asked"),
    ({"respond": "my.tools:f", "turn_tokens": 300}, "at most rollout.max_tokens = 3"),
    ({"respond": "calculator"}, 'give rollout.stop = ["="]'),
]


@pytest.mark.parametrize(("changes", "text"), BAD, ids=range(len(BAD)))
def test_settings_that_conflict(tmp_path, changes, text):
    good = tiny_run.settings(tmp_path)
    turns = attrs.evolve(good.rollout.turns, **changes)
    bad = attrs.evolve(good, rollout=attrs.evolve(good.rollout, turns=turns))
    (problem,) = checks.problems(bad)
    assert problem.path.startswith("rollout.turns.")
    assert text in str(problem)


def test_a_turn_may_be_as_long_as_the_response(tmp_path):
    good = tiny_run.settings(tmp_path)
    most = good.rollout.max_tokens
    turns = attrs.evolve(good.rollout.turns, respond="my.tools:f", turn_tokens=most)
    assert list(checks.problems(attrs.evolve(good, rollout=attrs.evolve(good.rollout, turns=turns)))) == []
    longer = attrs.evolve(turns, turn_tokens=most + 1)
    (problem,) = checks.problems(attrs.evolve(good, rollout=attrs.evolve(good.rollout, turns=longer)))
    assert problem.path == "rollout.turns.turn_tokens"


def test_a_tool_that_is_not_there(tmp_path):
    tiny_run.write_task(tmp_path)
    settings = tiny_run.settings(tmp_path, rollout__turns__respond="no.such:tool")
    with pytest.raises(ValueError, match=r"tool 'no\.such:tool': the module"), assembly.assemble(settings):
        pass


@pytest.mark.slow
def test_a_run_says_once_what_becomes_of_thoughts(tmp_path):
    (tmp_path / "chat.jinja").write_text(KINDS["forgets thinking"])
    chat = {"data__chat": True, "data__chat_template": str(tmp_path / "chat.jinja"), "data__max_prompt_tokens": 64}
    (line,) = said_of_turns(with_adder(tmp_path, **chat))
    assert "leaves out thoughts before a user's or a tool's message" in " ".join(line.split())
    (line,) = said_of_turns(with_adder(tmp_path, rollout__turns__thinking="drop", **chat))
    assert "each turn is a row, whose prompt is as the template has it" in " ".join(line.split())
    assert said_of_turns(with_adder(tmp_path)) == []
    assert said_of_turns(tiny_run.settings(tmp_path, **chat)) == []


def said_of_turns(settings):
    lines = []
    with assembly.assemble(settings, announce=lines.extend):
        return [line for line in lines if line.startswith("turns")]
