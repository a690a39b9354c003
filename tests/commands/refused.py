"""Refusals of commands, as their users read them."""

from __future__ import annotations

from fppo.commands import cli


def fails(task, capsys, *overrides, begun=False):
    """The refusal of bad settings by `fppo train`; nothing may have been written unless the run had begun."""
    assert cli.main(["train", str(task / "run.toml"), *overrides]) == 2
    assert (task / "run").exists() == begun
    return capsys.readouterr().err


def make_read(task, file):
    """Leave no whole file of weights beside an index, which is not read there."""
    if file.endswith("safetensors.index.json"):
        (task / "start" / "model.safetensors").unlink()
