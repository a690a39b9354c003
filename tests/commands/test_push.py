"""Uploads to the hub, against the interface of its client: nothing goes there."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import huggingface_hub
import pytest
from huggingface_hub import HfApi, RepoUrl

from fppo._errors import UsageError
from fppo.commands import actions, cli, push
from tests import tiny_run

TOKEN = "hf_abcdefghijklmnop"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client whose every call is checked against the real one's signature."""
    made = create_autospec(HfApi, instance=True)
    made.create_repo.return_value = RepoUrl("https://huggingface.co/me/new")
    made.repo_info.return_value.private = True
    made.list_repo_files.return_value = []
    for name in ("whoami", "create_repo", "repo_info", "list_repo_files", "upload_folder"):
        monkeypatch.setattr(HfApi, name, getattr(made, name))
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: TOKEN)
    return made


def write_export(directory: Path, *names: str) -> Path:
    directory.mkdir()
    for name in ("model.safetensors", "config.json", "fppo_files.json", *names):
        (directory / name).write_text("{}")
    return directory


def test_what_is_uploaded_is_private_unless_it_is_to_be_public(hub, tmp_path):
    directory = write_export(tmp_path / "out")
    assert push.push(directory, "new", hub) == "https://huggingface.co/me/new"
    assert hub.create_repo.call_args.kwargs["private"] is True
    sent = hub.upload_folder.call_args.kwargs
    assert (sent["repo_id"], sent["folder_path"], sent["ignore_patterns"]) == ("me/new", directory, ["fppo_files.json"])
    push.push(directory, "new", hub, public=True)
    assert hub.create_repo.call_args.kwargs["private"] is False


def test_nothing_is_uploaded_to_what_is_public_already(hub, tmp_path):
    hub.repo_info.return_value.private = False
    with pytest.raises(UsageError, match="it is there and public; give --public"):
        push.push(write_export(tmp_path / "out"), "new", hub)
    hub.upload_folder.assert_not_called()
    push.push(tmp_path / "out", "new", hub, public=True)
    hub.upload_folder.assert_called_once()


def test_weights_of_an_earlier_upload_go_and_other_files_stay(hub, tmp_path):
    old = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "adapter_config.json"]
    hub.list_repo_files.return_value = [*old, "model.safetensors", "notes.md", "original/model.safetensors"]
    push.push(write_export(tmp_path / "out"), "new", hub)
    assert hub.upload_folder.call_args.kwargs["delete_patterns"] == sorted(old)


@pytest.mark.parametrize("call", ["create_repo", "upload_folder"])
def test_an_error_says_what_to_do_and_no_token(hub, tmp_path, call):
    getattr(hub, call).side_effect = ConnectionError(f"Bearer {TOKEN} and hf_another1token \x1b[2J")
    with pytest.raises(UsageError, match="give the command again") as caught:
        push.push(write_export(tmp_path / "out"), "new", hub)
    assert "hf_" not in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("token", ["of-another-form", None])
def test_the_users_own_token_is_in_no_message_whatever_its_form(hub, tmp_path, monkeypatch, token):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: token)
    hub.create_repo.side_effect = ConnectionError("sent of-another-form there")
    with pytest.raises(UsageError) as caught:
        push.push(write_export(tmp_path / "out"), "new", hub)
    assert f"sent {'of-another-form' if token is None else '[token]'} there" in str(caught.value)


def test_a_wrong_name_and_a_missing_login_end_it_before_any_work(hub, tmp_path, capsys):
    tiny_run.write_task(tmp_path)
    from fppo.runs import starts

    settings = tiny_run.settings(tmp_path)
    (tmp_path / "run").mkdir()
    starts.record(settings, 0)
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    assert cli.main(["export", run, out, "--push", "a/b/c"]) == 2
    assert "--push 'a/b/c': " in capsys.readouterr().err
    hub.whoami.side_effect = huggingface_hub.errors.LocalTokenNotFoundError("no token")
    assert cli.main(["export", run, out, "--push", "new"]) == 2
    assert "there is no login; run hf auth login, or set HF_TOKEN" in capsys.readouterr().err
    assert cli.main(["export", run, out, "--public"]) == 2
    assert "give --push NAME too" in capsys.readouterr().err
    hub.create_repo.assert_not_called()


@pytest.mark.slow
def test_the_command_uploads_what_it_has_written(hub, tmp_path, monkeypatch, capsys):
    tiny_run.write_task(tmp_path)
    assert actions.train(tiny_run.settings(tmp_path, steps=1, eval__before=False)) == 0
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--push", "me/new"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "https://huggingface.co/me/new"
    assert "# me&#47;new" in (tmp_path / "out" / "README.md").read_text()
    hub.upload_folder.assert_called_once()
