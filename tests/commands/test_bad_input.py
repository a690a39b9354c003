"""Bad input ends in one clear message, before any work, and nothing is lost."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from fppo import models
from fppo.commands import cli
from fppo.data import chat
from fppo.key import Key
from fppo.quickstart import character_tokenizer, small_model
from fppo.runs import session
from fppo.runtime import checkpoint
from tests import tiny_run
from tests.commands.refused import fails, make_read
from tests.distributed.processes import server


def test_a_malformed_row_names_file_line_and_field(task, capsys):
    path = task / "train.jsonl"
    lines = path.read_text().splitlines()
    lines[2] = '{"prompt": "1+1="}'
    lines[4] = "{"
    path.write_text("\n".join(lines))
    said = fails(task, capsys)
    assert "train.jsonl" in said
    assert "'answer'" in said
    assert "3" in said
    assert "5" in said


def test_an_empty_data_set_and_a_missing_one(task, capsys):
    (task / "train.jsonl").write_text("")
    assert "no " in fails(task, capsys)
    (task / "train.jsonl").unlink()
    assert "train.jsonl" in fails(task, capsys)


def test_prompts_over_the_limit(task, capsys):
    assert "max_prompt_tokens" in fails(task, capsys, "--data.max-prompt-tokens", "3")
    assert "dropped" in fails(task, capsys, "--data.max-prompt-tokens", "3", "--data.over-long", "drop")


def test_an_unknown_setting_names_the_nearest(task, capsys):
    text = (task / "run.toml").read_text().replace("batch_size", "batchsize")
    (task / "run.toml").write_text(text)
    assert "batch_size" in fails(task, capsys)


def test_conflicting_sizes_are_named_at_once(task, capsys):
    said = fails(task, capsys, "--rollout.n", "3", "--actor.mini-batch-size", "5", "--critic.mini-batch-size", "7")
    assert "rollout.batch_size" in said
    assert "actor.mini_batch_size" in said
    assert "critic.mini_batch_size" in said


def test_a_chat_template_is_needed(task, capsys):
    assert "chat template" in fails(task, capsys, "--data.chat")


def test_a_reward_that_does_not_import_or_is_unknown(task, capsys):
    assert "nowhere" in fails(task, capsys, "--reward.functions", "nowhere:reward")
    assert "exact_match" in fails(task, capsys, "--reward.functions", "exact_macth")


def test_a_loss_that_does_not_import(task, capsys):
    assert "actor.loss.name" in fails(task, capsys, "--actor.loss.name", "nowhere:loss")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nan_reward", "no_reward"])
def test_a_reward_that_returns_no_number(task, capsys, name):
    said = fails(task, capsys, "--reward.functions", f"tests.rewards.functions:{name}", begun=True)
    assert name in said
    assert "sample 0" in said


@pytest.mark.slow
def test_a_checkpoint_of_another_model_and_a_damaged_one(task, capsys):
    assert cli.main(["train", str(task / "run.toml"), "--steps", "2"]) == 0
    other = small_model(len(character_tokenizer()), width=32, layers=1)
    shutil.rmtree(task / "start")
    models.save(other, models.init_params(other, Key(0)), task / "start", tokenizer=character_tokenizer())
    assert "of another model" in fails(task, capsys, begun=True)
    tiny_run.write_task(task)
    newest = checkpoint.path_of(task / "run" / "checkpoints", 2) / "shard_00000.safetensors"
    newest.write_bytes(newest.read_bytes()[:1000])
    assert "Remove it to resume from step 1" in fails(task, capsys, begun=True)
    shutil.rmtree(newest.parent)
    assert cli.main(["train", str(task / "run.toml")]) == 0


@pytest.mark.slow
def test_a_full_disk_keeps_the_last_checkpoint(task, capsys, monkeypatch):
    assert cli.main(["train", str(task / "run.toml"), "--steps", "2"]) == 0

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    assert "The last complete one is of step 2" in fails(task, capsys, begun=True)
    monkeypatch.undo()
    assert cli.main(["train", str(task / "run.toml")]) == 0


def test_an_output_directory_that_cannot_be_written(task, capsys, monkeypatch):
    (task / "file").write_text("")
    (task / "file").chmod(0o755)
    for command in ("train", "rollout"):
        for path in ("file", "file/run"):
            assert cli.main([command, str(task / "run.toml"), "--output-dir", str(task / path)]) == 2
            said = capsys.readouterr().err
            assert f"output_dir = {str(task / path)!r}: {task / 'file'} is a file" in said
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert f"{task} may not be written to; give another directory" in fails(task, capsys)


@pytest.mark.slow
def test_rollouts_of_another_command_are_not_written_over(task, capsys):
    assert cli.main(["rollout", str(task / "run.toml"), "--steps", "2"]) == 0
    before = {path: path.read_bytes() for path in (task / "run" / "rollouts").iterdir()}
    capsys.readouterr()
    said = fails(task, capsys, "--rollout.save", "--seed", "1", begun=True)
    assert "rollout.save = True: " in said
    assert "holds files of fppo rollout" in said
    assert {path: path.read_bytes() for path in (task / "run" / "rollouts").iterdir()} == before


@pytest.mark.slow
def test_a_directory_without_rollouts_and_the_one_around_them(task, capsys):
    said = fails(task, capsys, "--rollout.from", str(task))
    assert f"rollout.from = {str(task)!r}: it holds no rollouts, no step_00000001.safetensors" in said
    made = task / "made"
    assert cli.main(["rollout", str(task / "run.toml"), "--steps", "2", "--output-dir", str(made)]) == 0
    said = fails(task, capsys, "--rollout.from", str(made))
    assert f"it holds no rollouts; give {made / 'rollouts'}" in said


@pytest.mark.slow
def test_a_part_of_the_reward_that_there_is_not(task, capsys):
    overrides = ["--rollout.n", "2", "--rollout.filter.groups", "--rollout.filter.by", "nowhere"]
    said = fails(task, capsys, *overrides, begun=True)
    assert "rollout.filter.by: the reward has no part 'nowhere' to compare groups by; there are ['score', " in said


def _alone_in(directory, there):
    with session.alone_in(directory):
        there.set()
        time.sleep(600)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "place"), [("train", "run"), ("rollout", "run/rollouts")])
def test_a_directory_that_another_process_writes_to(task, capsys, command, place):
    (task / place).mkdir(parents=True)
    context = server()
    there = context.Event()
    other = context.Process(target=_alone_in, args=(task / place, there))
    other.start()
    assert there.wait(200)
    assert cli.main([command, str(task / "run.toml")]) == 2
    assert f"another process is writing to {task / place}" in capsys.readouterr().err
    assert not list((task / place).iterdir())
    other.kill()
    other.join()
    assert cli.main([command, str(task / "run.toml"), "--steps", "1"]) == 0


@pytest.mark.slow
def test_all_that_is_wrong_is_named_at_once_without_torch(task):
    """Settings, places, functions, devices and processes: one list, and torch is not loaded for it."""
    (task / "start" / "model.safetensors").write_bytes(b"cut")
    (task / "run.toml").write_text((task / "run.toml").read_text().replace("max_tokens = 3\n", "max_token = 3\n"))
    (task / "mine.py").write_text("import torch\n\ndef reward(sample):\n    return 1.0\n")
    (task / "torn.py").write_text("def (")
    (task / "run" / "model").mkdir(parents=True)
    (task / "run" / "model" / "notes").write_text("mine")
    overrides = (
        "--rollout.n 3 --model.critic-path ./none --data.path ./none.jsonl --nproc 3 --mesh.sequence 2 "
        "--device cuda:99 --model.attention falsh --reward.functions mine:reword exact_macth nowhere.reward:f "
        "--algorithm.gae cp --actor.loss.name torn:loss --rollout.stop-token-ids 99 --resume must --log.loggers wandb"
    )
    code = (
        "import sys; from fppo.commands import cli\n"
        "assert cli.main(sys.argv[1:]) == 2\n"
        "sys.exit(sorted({'torch', 'transformers'} & set(sys.modules)) or 0)"
    )
    asked = [sys.executable, "-c", code, "train", str(task / "run.toml"), *overrides.split()]
    done = subprocess.run(asked, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    parts = [
        "rollout.max_token = 3: there is no such setting; did you mean rollout.max_tokens?",
        "rollout.batch_size = 8: must be a multiple of rollout.n = 3",
        f"model.path = '{task}/start': {task}/start/model.safetensors is cut off",
        "model.critic_path = './none': there is no such file",
        "data.path = './none.jsonl': there is no such file",
        "mesh: its axes",
        "device = 'cuda:99': there ",
        "model.attention = 'falsh': there is no such kernel; did you mean flash?",
        "algorithm.gae = 'cp': there is no such kernel; did you mean cpp?",
        "reward.functions = 'exact_macth': there is no such reward; did you mean exact_match?",
        "reward.functions = 'mine:reword': 'mine' has no 'reword'; did you mean 'reward'?",
        "reward.functions = 'nowhere.reward:f': the module 'nowhere.reward' does not import: there is none",
        "actor.loss.name = 'torn:loss': the module 'torn' does not import: SyntaxError",
        "rollout.stop_token_ids = [99]: the tokenizer has no such ids; they go up to ",
        "resume = 'must': there is no checkpoint",
        f"output_dir = '{task}/run': {task}/run/model holds notes, which saving a model would delete",
        "log.loggers = ['wandb']: wandb is not installed",
    ]
    assert f"{len(parts)} problems in" in done.stderr, done.stderr
    for said in parts:
        assert f"  {said}" in done.stderr, (said, done.stderr)
    assert [path.name for path in (task / "run").rglob("*")] == ["model", "notes"]


@pytest.mark.slow
def test_rows_are_looked_at_without_torch_where_something_else_is_wrong(task):
    """The list has them too, and of a run with nothing else wrong they are read once."""
    with (task / "train.jsonl").open("a") as file:
        file.write('{"prompt": "1+1="}\n')
    code = (
        "import sys; from fppo.commands import cli\n"
        "assert cli.main(sys.argv[1:]) == 2\n"
        "sys.exit(sorted({'torch', 'transformers'} & set(sys.modules)) or 0)"
    )
    asked = [sys.executable, "-c", code, "train", str(task / "run.toml"), "--rollout.n", "3"]
    done = subprocess.run(asked, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "2 problems in" in done.stderr
    assert f"{task}/train.jsonl:25: field 'answer': missing" in done.stderr


def test_all_that_is_wrong_inside_of_files_is_named_at_once(task, capsys):
    with (task / "train.jsonl").open("a") as file:
        file.write("{\n")
    (task / "test.jsonl").write_text('{"prompt": "1"}\n{"prompt": "1", "answer": "2"}\n')
    overrides = (
        "--device cuda:7 --reward.functions exact_macth --actor.loss.name nowhere:loss --rollout.stop-token-ids 99"
    )
    said = fails(task, capsys, *overrides.split())
    assert f"6 problems in {task / 'run.toml'}" in said
    for part in (
        "device = 'cuda:7'",
        "exact_match",
        "nowhere",
        "train.jsonl:25",
        "test.jsonl:1",
        "stop_token_ids = [99]",
    ):
        assert part in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("--model.path ./start", "model.path = './start': there is no such file or directory"),
        ("--model.path ~/start", "~ is not replaced here; give "),
        ("--model.path {task}/no/start", "there is no {task}/no"),
        ("--model.path {task}/train.jsonl", "is a file, not the directory of a model"),
        ("--data.path ~/rows.jsonl", "data.path = ['~/rows.jsonl']: ~ is not replaced here"),
        ("--data.chat --data.tools {task}/train.jsonl", "data.tools = '{task}/train.jsonl': is not JSON"),
        ("--data.chat --data.tools {task}/start/config.json", "must hold a list of objects, a schema each"),
        ("--data.chat --data.chat-template none.jinja", "data.chat_template = 'none.jinja': there is no such file"),
        ("--data.tools none.json", "data.tools = 'none.json': nothing reads it here: it is for data.chat = true"),
        ("--data.rows nowhere:rows --data.path", "data.rows = 'nowhere:rows': the module 'nowhere' does not import"),
        ("--data.rows nowhere:rows", "data.rows = 'nowhere:rows' is given too"),
        ('--rollout.engine vllm --rollout.vllm.extra {{"dtype":"half"}}', "give rollout.vllm.dtype"),
        ('--rollout.engine vllm --rollout.vllm.extra {{"load_format":"auto"}}', "leave it out"),
        ("--rollout.stop-token-ids -1", "must be 0 or more"),
        ("--resume {task}/none", "resume = '{task}/none': there is no such checkpoint; give auto, must, never, or a"),
        ("--rollout.from {task}/none", "rollout.from = '{task}/none': there is no such file or directory"),
        ("--rollout.from {task}/train.jsonl", "is a file, not a directory of rollouts"),
        ("--seed 18446744073709551616", "seed = 18446744073709551616: must be 18446744073709551615 or less"),
        ("--device gpu", "device = 'gpu': did you mean cuda? must be auto, cpu, cuda or cuda:N, "),
        ("--algorithm.advantage gea", "there is no such estimator; did you mean gae?"),
        ("--actor.loss.name ppo_clp", "there is no such policy loss; did you mean ppo_clip?"),
        (
            "--actor.optimizer.name adam",
            "there is no such optimizer; did you mean adamw? there are adamw, adamw_8bit, sgd, lion, muon and module",
        ),
        ("--model.log-probs chunkd", "model.log_probs = 'chunkd': there is no such kernel; did you mean chunked?"),
        ("--actor.mini-batch-size 16", "actor.mini_batch_size = 16: must divide rollout.batch_size = 8"),
        ("--nproc 16", "some ranks would have nothing to do"),
        ("--log.loggers jsonl jsonl", "names a logger twice"),
        (
            "--log.loggers mine.log",
            "no logger 'mine.log'; there are console, jsonl, tensorboard, wandb, trackio, mlflow, swanlab and module:",
        ),
        ("--log.loggers nowhere:log", "the module 'nowhere' does not import"),
        ("--data.eval-path {task}/train.jsonl", "are trained on too (data.path)"),
        ("--data.sampler mine", "data.sampler = 'mine': must be module:function"),
        ("--rollout.turns.respond calculater", "must be one of ['calculator'], or module:function"),
        ("--data.chat", "model.path = '{task}/start': its tokenizer has no chat template, which chat = true needs"),
        ("--algorithm.advantage tests.tiny_run:nowhere", "'tests.tiny_run' has no 'nowhere'"),
        ("--algorithm.advantage tests.nowhere.at:all", "the module 'tests.nowhere.at' does not import: there is none"),
        ("--nproc 3 --mesh.sequence 2", "give --nproc 2 or a multiple of it"),
    ],
)
def test_places_and_values_that_are_none(task, capsys, monkeypatch, overrides, message):
    monkeypatch.chdir(task / "start")
    said = fails(task, capsys, *overrides.format(task=task).split())
    assert message.format(task=task) in said


@pytest.mark.slow
def test_a_disk_that_fills_up_says_how_to_go_on(task, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(session, "export", full)
    assert cli.main(["train", str(task / "run.toml"), "--steps", "1"]) == 2
    assert "the disk is full; free space, then run the same command" in capsys.readouterr().err
    monkeypatch.undo()
    assert cli.main(["train", str(task / "run.toml"), "--steps", "1"]) == 0


@pytest.mark.slow
def test_what_is_loaded_is_said(task, capsys):
    assert cli.main(["train", str(task / "run.toml"), "--steps", "1", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 + len(str(task))
    said = "\n".join(lines)
    for part in (
        "cpu, float32",
        "24 of train; held out: 24 of test",
        "'<eos>'",
        "rollout.batch_size=8",
        "and a critic",
    ):
        assert part in said
    assert "2,624 parameters" in said


DEEP = 30_000  # tables and lists inside of each other, more than any reader's stack


@pytest.mark.parametrize("depth", [150, DEEP])
@pytest.mark.parametrize(
    ("file", "overrides", "said"),
    [
        ("train.jsonl", "", "train.jsonl:1: not JSON: its tables and lists are nested more than 100 deep"),
        ("rows.json", "--data.path {task}/rows.json", "rows.json"),
        ("tools.json", "--data.chat --data.tools {task}/tools.json", "data.tools"),
        ("start/config.json", "", "model.path"),
        ("start/tokenizer.json", "", "model.path"),
        ("start/tokenizer_config.json", "", "model.path"),
        ("start/model.safetensors.index.json", "", "model.path"),
    ],
)
def test_json_that_is_nested_without_an_end(task, capsys, file, overrides, said, depth):
    (task / file).write_text("[" * depth + "]" * depth if file.endswith("rows.json") else _nested(depth))
    make_read(task, file)
    assert said in fails(task, capsys, *overrides.format(task=task).split())


def _nested(depth):
    """An object of JSON, nested so deep."""
    return '{"a": ' * depth + "1" + "}" * depth


@pytest.mark.parametrize("depth", [150, DEEP])
@pytest.mark.parametrize("text", ["a = {}", "[model]\nconfig = {{b = {}}}"])
def test_toml_that_is_nested_without_an_end(task, capsys, text, depth):
    (task / "run.toml").write_text(text.format("[" * depth + "]" * depth))
    assert "nested" in fails(task, capsys)


def endless_rows():
    row = {"prompt": "1+1=", "answer": "2"}
    row["row"] = [row, row]
    return [row]


def test_a_row_that_holds_itself(task, capsys):
    words = ["--data.rows", f"{__name__}:endless_rows", "--data.path", "--data.ground-truth", "row", "--data.eval-path"]
    said = fails(task, capsys, *words)
    assert "field 'row': its tables and lists are nested more than 100 deep" in said


@pytest.mark.parametrize(
    "overrides",
    [
        "--model.path {loop}",
        "--model.critic-path {loop}",
        "--model.ref-path {loop}",
        "--model.tokenizer {loop}",
        "--model.lora.rank 2 --model.lora.path {loop}",
        "--data.path {loop}",
        "--data.path {loop}/rows.jsonl",
        "--data.eval-path {loop}",
        "--data.chat --data.chat-template {loop}",
        "--data.chat --data.tools {loop}",
        "--rollout.from {loop}",
        "--resume {loop}",
        "--reward.model.path {loop}",
        "--reward.judge.path {loop}",
        "--output-dir {loop}",
        "--output-dir {loop}/run",
        "--module-dirs {loop} --reward.functions nowhere:f",
    ],
)
def test_a_path_that_is_a_loop_of_links(task, capsys, overrides):
    (task / "loop").symlink_to(task / "back")
    (task / "back").symlink_to(task / "loop")
    words = overrides.format(loop=task / "loop").split()
    assert words[-2][2:].replace("-", "_").split(".")[-1] in fails(task, capsys, *words).replace("-", "_")
    assert cli.main(["train", str(task / "loop")]) == 2
    assert cli.main(["eval", str(task / "loop")]) == 2
    assert cli.main(["export", str(task / "loop"), str(task / "to")]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("--rollout.temperature 1e300", "rollout.temperature = 1e+300: must be "),
        ("--rollout.temperature 1e-300", "rollout.temperature = 1e-300: must be "),
        ("--rollout.temperature 1e30", "rollout.temperature = 1e+30: must be from 1e-06 to 1e+06"),
        ("--eval.temperature 1e300", "eval.temperature = 1e+300: must be "),
        ("--reward.judge.path {task}/start --reward.judge.temperature 1e9", "reward.judge.temperature"),
        ("--actor.optimizer.lr 1e300", "actor.optimizer.lr = 1e+300: must be 0, or of a size"),
        ("--actor.optimizer.eps 1e-300", "actor.optimizer.eps = 1e-300: must be 0, or of a size"),
        ("--algorithm.kl.coef 1e200", "algorithm.kl.coef = 1e+200: must be 0, or of a size"),
        ("--reward.weights 1e300", "reward.weights"),
        ("--rollout.max-tokens 1000000000", "rollout.max_tokens = 1000000000: must be 16777216 or less"),
        ("--eval.max-tokens 1000000000", "eval.max_tokens = 1000000000: must be 16777216 or less"),
        ("--data.max-prompt-tokens 1000000000", "data.max_prompt_tokens = 1000000000: must be 16777216 or less"),
        ("--rollout.batch-size 1000000000000", "rollout.batch_size = 1000000000000: must be 16777216 or less"),
        ("--rollout.n 1000000000", "rollout.n = 1000000000: must be 16777216 or less"),
        ("--eval.n 1000000000", "eval.n = 1000000000: must be 16777216 or less"),
        ("--rollout.ahead 5", "rollout.ahead = 5: the run has 4 steps"),
        ("--rollout.ahead 1000000 --steps 1000000", "rollout.ahead = 1000000: must be 1000 or less"),
        ("--reward.workers 1000000", "reward.workers = 1000000: must be 1024 or less"),
        ("--rollout.turns.workers 1000000", "rollout.turns.workers = 1000000: must be 1024 or less"),
        ("--reward.time-limit 1e300", "reward.time_limit = 1e+300: must be "),
        ("--mesh.timeout 1e30", "mesh.timeout = 1e+30: must be 10000000.0 or less"),
        ("--placement.patience 1e30", "placement.patience = 1e+30: must be 10000000.0 or less"),
        ("--steps 99999999999999999999999", "steps = 99999999999999999999999: is larger than 64 bits hold"),
        (
            '--placement.roles.actor a --placement.pools {{"a":{{"ranks":1,"threads":1000000}}}}',
            "placement.pools.a.threads = 1000000: must be 1024 or less",
        ),
        (
            '--placement.roles.actor a --placement.pools {{"a":{{"ranks":1000000}}}}',
            "placement.pools.a.ranks = 1000000: must be 65536 or less",
        ),
        (
            '--placement.roles.actor a --placement.pools {{"a":{{"ranks":2000}}}} --rollout.batch-size 2000',
            "they have 2,000 ranks together, and one machine starts at most 1,024",
        ),
    ],
)
def test_numbers_that_nothing_could_come_of(task, capsys, overrides, said):
    """Refused by the setting's name, where a run would be silent for hours, or end in the middle."""
    assert said in fails(task, capsys, *overrides.format(task=task).split())


@pytest.mark.slow
@pytest.mark.parametrize("as_chat", [False, True])
def test_a_prompt_of_many_megabytes(task, capsys, as_chat):
    (task / "chat.jinja").write_text("{{ messages[0].content }}")
    with (task / "train.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "1+" * (5 << 20), "answer": "2"}) + "\n")
    words = ["--data.chat", "--data.chat-template", str(task / "chat.jinja")] if as_chat else []
    said = fails(task, capsys, *words)
    assert "train.jsonl:25: the prompt has 10,485,760 characters, more than max_prompt_tokens = 512 tokens" in said
    assert len(said) < 2000
    changed = ["--data.over-long", "drop", "--steps", "1", "--eval.no-before", "--data.eval-path"]
    assert cli.main(["train", str(task / "run.toml"), *words, *changed]) == 0
    assert "1 too long, dropped" in capsys.readouterr().out


@pytest.mark.slow
def test_a_chat_template_that_loops(task, capsys, monkeypatch):
    monkeypatch.setattr(chat, "LONGEST", 0.3)
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x"
    (task / "chat.jinja").write_text(loops)
    said = fails(task, capsys, "--data.chat", "--data.chat-template", str(task / "chat.jinja"))
    assert "the chat template has not finished in 0.3 CPU seconds: it loops" in said
    assert "data.chat_template" in said
