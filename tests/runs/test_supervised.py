"""Supervised runs: a plain loop in transformers, resuming bit for bit, held-out losses, exports, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from fppo import data
from fppo.assembly.supervised import assemble_supervised
from fppo.commands import actions
from fppo.commands.cli import main
from fppo.key import Key
from fppo.models.precision import KeepDouble
from fppo.pipeline.supervised import imitate_steps
from fppo.runs import jsonl, memory
from fppo.settings import files
from fppo.tree import map as map_tensors
from fppo.tree import replace
from tests import tiny_run


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    directory = tmp_path_factory.mktemp("task")
    tiny_run.write_task(directory)
    for name, offset in (("train", 0), ("test", 1)):
        pairs = [(i % 10, (3 * i + offset) % 10) for i in range(20)]
        rows = [{"prompt": f"{a}+{b}=", "response": str(a + b), "from": f"s{a % 2}"} for a, b in pairs]
        (directory / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return directory


def settings_of(task, tmp_path=None, **changes):
    values = {
        "output_dir": str((tmp_path or task) / "run"),
        "steps": 4,
        "device": "cpu",
        "model": {"path": str(task / "start")},
        "data": {"path": [str(task / "train.jsonl")], "eval_path": [str(task / "test.jsonl")], "source": "from"},
        "sft": {"batch_size": 6, "optimizer": {"lr": 3e-3, "weight_decay": 0.1}},
        "checkpoint": {"every": 1, "keep": 9},
        "digest": {"every": 1},
    }
    return files.replace(files.from_dict(values), {name.replace("__", "."): x for name, x in changes.items()})


def _lines(path: Path):
    return list(jsonl.read(path / "run" / "metrics.jsonl"))


def _digests(path: Path):
    return {line["step"]: line["state"] for line in jsonl.read(path / "run" / "digests.jsonl")}


def plain_loop(task, batches, *, lr, decay):
    """A loop of transformers and torch in float64, a row at a time without padding: losses, and the parameters."""
    model = AutoModelForCausalLM.from_pretrained(
        task / "start", dtype=torch.float64, attn_implementation="eager"
    ).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=decay)
    losses = []
    for rows in batches:
        total, count = torch.zeros((), dtype=torch.float64), 0
        for prompt, response in rows:
            tokens = torch.tensor([[*prompt, *response]])
            with KeepDouble():
                logits = model(tokens).logits[0, len(prompt) - 1 : -1]
            total = total + F.cross_entropy(logits, tokens[0, len(prompt) :], reduction="sum")
            count += len(response)
        optimizer.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(total.detach() / count))
    return losses, dict(model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("cut", [{}, {"sft__token_budget": 13}, {"sft__micro_batch_size": 1}])
def test_the_steps_are_those_of_a_plain_loop_in_float64(task, tmp_path, cut):
    """With the same rows, their end token imitated, packed or not."""
    _, assembly = assemble_supervised(settings_of(task, tmp_path, **cut))
    tokenizer = AutoTokenizer.from_pretrained(task / "start")
    examples = [json.loads(line) for line in (task / "train.jsonl").read_text().splitlines()]
    cursor, batches = data.DataCursor(), []
    for _ in range(3):
        indices, cursor = data.next_indices(len(examples), cursor, size=6, key=Key(0).fold("data"))
        chosen = [examples[i] for i in indices]
        end = tokenizer.eos_token_id
        batches.append([(tokenizer.encode(x["prompt"]), [*tokenizer.encode(x["response"]), end]) for x in chosen])
    expected, params = plain_loop(task, batches, lr=3e-3, decay=0.1)
    wide = map_tensors(lambda x: x.double() if x.is_floating_point() else x, assembly.run.actor)
    run = replace(assembly.run, actor=wide)
    steps = [each for _, each in zip(range(3), imitate_steps(run, imitation=assembly.imitation))]
    reports = [report["supervised/nll_loss"] for _, _, report in steps]
    losses = [float(metric.total / metric.count) for metric in reports]
    assert losses == pytest.approx(expected, rel=1e-9)
    for name, x in steps[-1][0].actor.params.items():
        torch.testing.assert_close(x, params[name].detach(), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("turns", ["all", "last"])
def test_a_conversation_is_imitated_in_the_assistants_turns_alone(task, tmp_path, turns):
    """Against the cross entropy of transformers at these tokens."""
    template = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    (tmp_path / "chat.jinja").write_text(template)
    talks = [[("3+4=", "7"), (f"1+{i}=", str(1 + i)), ("0+0=", "00")] for i in range(4)]
    rows = [[{"role": r, "content": x} for pair in talk for r, x in zip(("user", "assistant"), pair)] for talk in talks]
    lines = [json.dumps({"talk": row, "from": "s"}) for row in rows]
    (tmp_path / "talks.jsonl").write_text("\n".join(lines))
    own = {"data__path": [str(tmp_path / "talks.jsonl")], "data__eval_path": [], "sft__messages": "talk"}
    own |= {"data__chat": True, "data__chat_template": str(tmp_path / "chat.jinja"), "sft__turns": turns}
    _, assembly = assemble_supervised(settings_of(task, tmp_path, sft__batch_size=4, **own))
    _, batch, report = next(imitate_steps(assembly.run, imitation=assembly.imitation))
    model = AutoModelForCausalLM.from_pretrained(task / "start", dtype=torch.float32)
    words, total, count = AutoTokenizer.from_pretrained(task / "start"), 0.0, 0
    for talk in talks:
        tokens, wanted = [], []
        for place, (prompt, answer) in enumerate(talk):
            ids, own_ids = words.encode(prompt), [*words.encode(answer), words.eos_token_id]
            tokens += [*ids, *own_ids]
            wanted += [*[False] * len(ids), *[turns == "all" or place == 2] * len(own_ids)]
        log_probs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        total -= sum(float(log_probs[i - 1, tokens[i]].detach()) for i, x in enumerate(wanted) if x)
        count += sum(wanted)
    metric = report["supervised/nll_loss"]
    assert int(metric.count) == 1
    assert int(batch.response_mask.sum()) == count
    assert float(metric.total) == pytest.approx(total / count, rel=1e-5)


@pytest.mark.slow
def test_a_run_learns_exports_its_model_and_reports(task, tmp_path, capsys):
    own = {"sft__epochs": 30, "sft__optimizer__lr": 1e-2, "eval__every": 50, "log__memory_steps": [2]}
    assert actions.sft(settings_of(task, tmp_path, checkpoint__every=0, **own)) == 0
    lines = _lines(tmp_path)
    assert lines[-1]["step"] == 100  # 20 rows, 30 times, 6 at a time
    names = [f"val-core/s{i}/nll_loss/mean@1" for i in range(2)]
    assert [line["step"] for line in lines if names[0] in line] == [0, 50, 100]
    assert lines[-1]["supervised/nll_loss"] < lines[1]["supervised/nll_loss"] / 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype=torch.float32)
    words = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    total, count = 0.0, 0
    for row in map(json.loads, (task / "test.jsonl").read_text().splitlines()):
        prompt, response = words.encode(row["prompt"]), [*words.encode(row["response"]), words.eos_token_id]
        if row["from"] == "s1":
            log_probs = model(torch.tensor([[*prompt, *response]])).logits[0].log_softmax(-1)
            total -= sum(float(log_probs[len(prompt) - 1 + i, token].detach()) for i, token in enumerate(response))
            count += len(response)
    assert lines[-1][names[1]] == pytest.approx(total / count, rel=1e-4)
    (looked,) = memory.read(tmp_path / "run")
    (update,) = (stage for stage in looked.stages if stage.stage == "update_actor")
    assert (looked.step, update.cache) == (2, 0)
    assert update.parameters == update.gradients == update.moments // 2 > 10_000
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Loss in training" in page
    assert '"memory": {"step": 2' in page
    assert "loss 0." in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("ratio", "rate"), [pytest.param(0.0, 0.0015, marks=pytest.mark.slow), (0.5, 0.002)])
def test_a_longer_run_says_that_its_learning_rate_rises(task, tmp_path, capsys, ratio, rate):
    """Also where passes over the data say how many steps there are, and the warm-up is a part of these."""
    how = {"sft__optimizer__schedule": "linear", "sft__batch_size": 10, "eval__every": 0}
    how |= {"sft__optimizer__warmup_ratio": ratio}
    assert actions.sft(settings_of(task, tmp_path, sft__epochs=1, **how)) == 0
    capsys.readouterr()
    assert actions.sft(settings_of(task, tmp_path, sft__epochs=2, **how)) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "learning rate" in line]
    text = f"supervised/lr is {rate}, and was to be 0: linear from 0.003 to 0 at step 4, before linear from 0.003 to 0"
    assert said == [f"going on from step 2 with another learning rate: {text} at step 2"]
    assert [x for x in _lines(tmp_path) if "supervised/lr" in x][-2]["supervised/lr"] == pytest.approx(rate)


@pytest.mark.slow
def test_a_stopped_run_goes_on_bit_for_bit(task, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    schedule = {"sft__optimizer__schedule": "constant"}
    assert actions.sft(settings_of(task, whole, **schedule)) == 0
    for steps in (2, 4):
        assert actions.sft(settings_of(task, parts, steps=steps, **schedule)) == 0
    assert _digests(whole) == _digests(parts)
    assert [line["step"] for line in _lines(parts)] == [0, 1, 2, 3, 4]
    run = whole / "run"
    assert actions.replay(run, 4) == 0
    lines = [json.loads(line) for line in (run / "digests.jsonl").read_text().splitlines()]
    lines[-1]["result"] = dict.fromkeys(lines[-1]["result"], "0")
    (run / "digests.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert actions.replay(run, 4) == 1
    assert actions.export(run, tmp_path / "exported", None) == 0
    exported = [path / "model.safetensors" for path in (tmp_path / "exported", run / "model")]
    assert exported[0].read_bytes() == exported[1].read_bytes()


@pytest.mark.slow
def test_other_data_and_other_commands_do_not_go_on(task, tmp_path):
    assert actions.sft(settings_of(task, tmp_path, steps=1)) == 0
    with pytest.raises(ValueError, match="data: the prompts as tokens differ"):
        actions.sft(settings_of(task, tmp_path, data__path=[str(task / "test.jsonl")], data__eval_path=[]))
    rl = tiny_run.settings(task, output_dir=str(tmp_path / "run"), steps=2, data__ground_truth="response")
    with pytest.raises(ValueError, match="was made by fppo sft, and fppo train does not go on from it"):
        actions.train(rl)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"sft.messages": "talk"}, "sft.messages = 'talk': conversations go through a chat template"),
        ({"sft.turns": "last"}, "sft.turns = 'last': nothing reads it here"),
        ({"sft.token_budget": 5, "sft.micro_batch_size": 2}, "give one of the two"),
        ({"sft.optimizer.warmup_steps": 9}, "sft.optimizer.warmup_steps = 9: must be less than the run's 4 updates"),
        ({"sft.optimizer.betas": [2.0, 0.9]}, "betas must be 0 or more, and less than 1"),
        ({"sft.respnse": "x"}, "did you mean sft.response"),
        ({"data.chat": True, "data.images": "x"}, "takes no images and videos yet"),
        ({"model.path": "/nowhere"}, "model.path = '/nowhere'"),
    ],
)
def test_all_that_is_wrong_is_said_before_any_work(task, tmp_path, capsys, changes, text):
    files.save(settings_of(task, tmp_path), tmp_path / "run.toml")
    words = {name: value if isinstance(value, str) else json.dumps(value) for name, value in changes.items()}
    flags = [word for pair in words.items() for word in (f"--{pair[0]}", pair[1])]
    assert main(["sft", str(tmp_path / "run.toml"), *flags]) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_file_for_reinforcement_learning_serves_too(task, tmp_path):
    """What fppo sft does not read may be there, and may be missing."""
    values = files.to_dict(tiny_run.settings(task, output_dir=str(tmp_path / "run"), steps=1, checkpoint__every=0))
    values["sft"] = {"batch_size": 4}
    (tmp_path / "a.toml").write_text(files.to_toml(files.from_dict(values)))
    assert main(["sft", str(tmp_path / "a.toml")]) == 0
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_help_names_the_settings(capsys):
    assert main(["sft", "--help"]) == 0
    assert "sft.turns" in capsys.readouterr().out
