"""The command: a model and a run are served, ctrl-C ends it, and what was recorded is on disk."""

from __future__ import annotations

import os
import signal
import threading

import httpx2 as httpx
import openai
import pytest
import torch
from safetensors.torch import load_file

from fppo import batch as batches
from fppo.batch import Rollout
from fppo.commands import actions, cli, serve
from fppo.runs import session
from fppo.runs.serving import served_policy
from fppo.runtime import checkpoint
from fppo.serve.episodes import EpisodeRow, RecordedTurn
from fppo.serve.server import bound_socket
from tests import tiny_run
from tests.serve.test_episodes import finished


def free_port():
    with bound_socket("127.0.0.1", 0) as listener:
        return listener.getsockname()[1]


def key_said(capsys):
    """The key that the server prints, which it may do after it has begun to answer."""
    text = ""
    for _ in range(600):
        text += capsys.readouterr().out
        if "ctrl-C" in text:
            break
        threading.Event().wait(0.05)
    return text.split("key: ")[1].split()[0]


def served(arguments, visit, environment=None, *, number=signal.SIGINT):
    """The status of the command, and the result of a visitor of its URL, who then ends it."""
    port, got = free_port(), []

    def visitor():
        url = f"http://127.0.0.1:{port}"
        try:
            for _ in range(600):
                try:
                    if httpx.get(f"{url}/health").status_code == 200:
                        break
                except httpx.ConnectError:
                    threading.Event().wait(0.05)
            got.append(visit(url))
        except Exception as error:
            got.append(error)
        finally:
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=visitor)
    thread.start()
    try:
        for name, value in (environment or {}).items():
            os.environ[name] = value
        status = cli.main(["serve", *arguments, "--port", str(port), "--device", "cpu"])
    finally:
        for name in environment or {}:
            del os.environ[name]
    thread.join()
    if isinstance(got[0], Exception):
        raise got[0]
    return status, got[0]


@pytest.mark.slow
def test_a_model_is_served_and_recorded_until_ctrl_c(tmp_path, capsys):
    tiny_run.write_task(tmp_path)

    def visit(url):
        client = openai.OpenAI(base_url=f"{url}/e/7/v1", api_key="given", max_retries=0)
        answer = client.completions.create(model="start", prompt="1+2=", max_tokens=3, seed=1, logprobs=0)
        with pytest.raises(openai.BadRequestError, match="chat template"):
            client.chat.completions.create(model="start", messages=[{"role": "user", "content": "1+2="}])
        return answer.choices[0].text

    arguments = [str(tmp_path / "start"), "--record", str(tmp_path / "episodes"), "--max-tokens", "4"]
    status, text = served(arguments, visit, {"FPPO_API_KEY": "given"})
    assert status == 0
    printed = capsys.readouterr()
    assert "start at http://127.0.0.1:" in printed.out
    assert "given" not in printed.out
    assert printed.out.endswith("stopped\n")
    rollout = batches.load(Rollout, tmp_path / "episodes" / "episodes_000001.safetensors")
    assert list(rollout.ids) == ["7"]
    assert rollout.response_mask.sum() <= 3
    assert isinstance(text, str)
    before = signal.getsignal(signal.SIGINT)
    assert before is not None
    assert not any(thread.name.startswith("fppo-") for thread in threading.enumerate())


@pytest.mark.slow
def test_a_run_is_served_by_its_newest_checkpoint_and_followed(tmp_path, capsys):
    tiny_run.write_task(tmp_path)
    assert actions.train(tiny_run.settings(tmp_path, steps=2, checkpoint__every=1)) == 0
    run, away = tmp_path / "run", tmp_path / "away"
    newest = checkpoint.place_of(run / session.CHECKPOINTS, 2)
    newest.rename(away)
    capsys.readouterr()

    def visit(url):
        key = key_said(capsys)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        client.completions.create(model="run", prompt="1+2=", max_tokens=3, user="before")
        away.rename(newest)
        headers = {"authorization": f"Bearer {key}"}

        def versions(name):
            return {*httpx.get(f"{url}/e/{name}", headers=headers).json()["rows"][0]["turns"][0]["versions"]}

        before, after = versions("before"), set()
        for number in range(1000):  # until it is time to look for checkpoints again
            client.completions.create(model="run", prompt="1+2=", max_tokens=3, user=f"after {number}")
            if max(after := versions(f"after {number}")) > max(before):
                break
        return before, after

    status, (before, after) = served([str(run), "--follow", "0.001"], visit, number=signal.SIGTERM)
    assert status == 0
    assert len(before) == 1
    assert max(after) > max(before)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nowhere/model"], "nowhere/model"),
        (["{model}", "--step", "3"], "is no run"),
        (["{model}", "--follow", "3"], "is no run"),
        (["{model}", "--host", "0.0.0.0"], "--public"),
        (["{model}", "--port", "99999"], "--port 99999"),
        (["{model}", "--top-p", "3"], "--top-p 3.0: must be 1 or less"),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path, capsys, arguments, text):
    tiny_run.write_task(tmp_path)
    words = [word.format(model=tmp_path / "start") for word in arguments]
    assert cli.main(["serve", *words, *([] if "--port" in words else ["--port", "0"])]) == 2
    assert text in capsys.readouterr().err


def test_files_of_episodes_are_numbered_on(tmp_path):
    rows = [EpisodeRow(n, (RecordedTurn((5, 6), finished("x"), ""),)) for n in range(2)]
    for name in ("a", "b"):
        writer = serve.EpisodeFiles(tmp_path, 0)
        writer.add(name, rows)
        writer.close()
        writer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "episodes_000001.safetensors",
        "episodes_000002.safetensors",
    ]
    second = batches.load(Rollout, tmp_path / "episodes_000002.safetensors")
    assert list(second.ids) == ["b", "b"]
    assert torch.equal(second.groups, torch.tensor([0, 0]))


@pytest.mark.parametrize(("begins", "cache", "exact"), [(False, None, False), (True, 0.5, True)])
def test_a_served_policy_is_made_as_the_settings_say(tmp_path, begins, cache, exact):
    tiny_run.write_task(tmp_path)
    found = served_policy(
        tiny_run.settings(
            tmp_path, rollout__cache_gb=cache, rollout__exact=exact, rollout__draft_tokens=3, device="cpu"
        ),
        begins=begins,
    )
    engine, weights = found.engine, load_file(tmp_path / "start" / "model.safetensors")
    assert engine.model is found.model
    assert engine.draft_tokens == 3
    assert (engine.exact, engine.cache_bytes) == (exact, None if cache is None else 2**29)
    assert engine.pad_token_id == found.tokenizer.pad_token_id
    assert (found.sampling.max_tokens, found.texts.vocabulary) == (3, found.model.config.vocab_size)
    assert (found.params is not None) is begins
    if found.params is not None:
        assert {*found.params} == {*found.model.whole_shapes}
        assert torch.equal(found.params["model.embed_tokens.weight"], weights["model.embed_tokens.weight"])
