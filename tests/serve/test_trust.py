"""Servers whose checkpoints, engines, keys or files are not as they should be: what they say, and what goes on."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat

import attrs
import httpx2 as httpx
import openai
import pytest
from transformers import AutoTokenizer

from fppo.commands import actions, cli, serve
from fppo.runs import saved, session, starts
from fppo.runs.serving import served_policy
from fppo.runtime import checkpoint
from tests import tiny_run
from tests.serve.test_command import served
from tests.serve.world import chat, parrot_world

CHAT = "/v1/chat/completions"
OTHERS = stat.S_IRWXG | stat.S_IRWXO


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with checkpoints of two steps, and its policy."""
    root = tmp_path_factory.mktemp("run")
    tiny_run.write_task(root)
    assert actions.train(tiny_run.settings(root, steps=2, checkpoint__every=1)) == 0
    settings = attrs.evolve(starts.load(root / "run"), device="cpu")
    return root / "run", served_policy(saved.bare(settings), begins=False)


def damage(path, fault):
    """Writes a file with one bit of each hundredth byte flipped, or without its end."""
    data = bytearray(path.read_bytes())
    if fault == "a torn file":
        del data[len(data) // 2 :]
    else:
        data[-len(data) // 2 :: 100] = bytes(byte ^ 1 for byte in data[-len(data) // 2 :: 100])
    path.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["flipped bits", "a torn file"])
def test_a_checkpoint_that_cannot_be_read_is_said_once_and_looked_at_again(run, tmp_path, capsys, fault):
    """The same one is read once it is whole."""
    directory = tmp_path / "run"
    shutil.copytree(run[0], directory)
    follow = serve.FollowedRun(directory, run[1], 0.0, 1)
    newest = checkpoint.place_of(directory / session.CHECKPOINTS, 2)
    for path in newest.rglob("*.safetensors"):
        damage(path, fault)
    assert [follow() for _ in range(3)] == [None] * 3
    said = capsys.readouterr().err
    assert said.count("could not be read") == 1
    assert "answers go on with the weights of step 1" in said
    shutil.rmtree(directory)
    shutil.copytree(run[0], directory)
    found = follow()
    assert found is not None
    assert found[1] == saved.policy(run[1].model, newest, device=run[1].device).actor.step
    assert follow() is None
    assert capsys.readouterr().err == ""


def test_health_tells_of_an_engine_that_failed_and_so_does_its_owner(capsys):
    with parrot_world("lamp") as world:

        async def health():
            async with world.client("no key") as client:
                return await client.get("/health")

        assert asyncio.run(health()).json() == {"status": "ok"}
        world.engine.fails = RuntimeError("secret path")
        assert world.post(CHAT, chat("find")).status_code == 500
        response = asyncio.run(health())
        world.service.attach(None)
        assert asyncio.run(health()).json() == {"status": "ok"}, "another engine may come"
        waits = world.post(CHAT, chat("find"))
    assert (waits.status_code, waits.headers["retry-after"]) == (503, "1")
    assert response.status_code == 503
    assert response.json() == {"status": "failed", "error": "the engine failed: RuntimeError"}


@pytest.mark.parametrize("kind", [(), ("--tinker",)])
@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("", "FPPO_API_KEY"),
        ("tml-two words", "FPPO_API_KEY"),
        ("tml-line\n", "FPPO_API_KEY"),
        ("tml-schlüssel", "ASCII"),
    ],
)
def test_a_key_that_nobody_can_send_is_refused_at_the_start(tmp_path, capsys, monkeypatch, kind, key, text):
    tiny_run.write_task(tmp_path)
    monkeypatch.setenv("FPPO_API_KEY", key)
    arguments = [str(tmp_path / "start"), "--port", "0", "--store", str(tmp_path / "store"), *kind]
    assert cli.main(["serve", *arguments]) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def test_a_file_of_keys_is_for_its_owner_alone(tmp_path, capsys):
    tiny_run.write_task(tmp_path)
    keys = tmp_path / "keys"
    keys.write_text("tml-one-key\ntml-anöther\n")
    arguments = ["serve", str(tmp_path / "start"), "--tinker", "--port", "0", "--keys", str(keys)]
    for mode in (0o640, 0o604, 0o600):
        keys.chmod(mode)
        assert cli.main([*arguments, "--store", str(tmp_path / "store")]) == 2
        said = capsys.readouterr().err
        assert "key 2 of --keys" in said
        assert ("others could read it" in said) == (mode != 0o600)
        assert stat.S_IMODE(keys.stat().st_mode) == 0o600


@pytest.mark.slow
def test_what_a_server_writes_is_for_its_owner_alone(tmp_path, monkeypatch):
    """Stores and samples, also in a folder that others could read before."""
    tiny_run.write_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "store").mkdir(0o755)
    before = os.umask(0o022)
    try:

        def visit(url):
            body = {"tags": [], "user_metadata": None, "sdk_version": "0"}
            headers = {"x-api-key": "tml-given-key"}
            assert httpx.post(f"{url}/api/v1/create_session", json=body, headers=headers).status_code == 200
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="tml-given-key", max_retries=0)
            client.completions.create(model="start", prompt="1+2=", max_tokens=3)

        arguments = ["start", "--tinker", "--store", "store", "--record", "episodes"]
        assert served(arguments, visit, {"FPPO_API_KEY": "tml-given-key"})[0] == 0
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    roots = [tmp_path / "store", tmp_path / "episodes"]
    found = [path for root in roots for path in (root, *root.rglob("*"))]
    assert {"server.log", "episodes_000001.safetensors"} <= {path.name for path in found}
    assert [path for path in found if path.stat().st_mode & OTHERS] == []


@pytest.mark.slow
def test_a_model_whose_tokenizer_has_no_padding_token_is_served(tmp_path, capsys):
    tiny_run.write_task(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "start")
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "start")
    assert AutoTokenizer.from_pretrained(tmp_path / "start").pad_token_id is None

    def visit(url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="given", max_retries=0)
        made = client.completions.create(model="start", prompt=["1+2=", "1+22="], max_tokens=3, seed=1)
        with pytest.raises(openai.BadRequestError, match="the text is empty: an answer follows at least one token"):
            client.completions.create(model="start", prompt="", max_tokens=3)
        return [choice.text for choice in made.choices]

    status, texts = served([str(tmp_path / "start")], visit, {"FPPO_API_KEY": "given"})
    assert status == 0
    assert len(texts) == 2
