"""`fppo env`: what a report of a problem needs, and nothing about its author."""

from __future__ import annotations

import getpass
import json
from pathlib import Path
from socket import gethostname

import pytest
import torch

import fppo
from fppo.commands import cli, env
from fppo_kernels.table import BUILTIN


@pytest.fixture(scope="module")
def values():
    """What is found where two variables have values that nobody is to see, the first of which bits depend on."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("MKL_CBWR", "a-value-of-mine")
        changed.setenv("HF_TOKEN", "a-secret-of-mine")
        yield env.found()


def test_the_command_prints_versions_machine_kernels_and_extras(capsys):
    assert cli.main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fppo"] == fppo.__version__
    assert found["versions"]["torch"] == torch.__version__.split("+")[0]
    assert found["cores"] >= 1
    assert found["memory_gb"] > 0
    assert found["computes"]["threads"] == str(torch.get_num_threads())
    assert {op: set(each) for op, each in found["kernels"].items()} == {op: set(each) for op, each in BUILTIN.items()}
    assert found["kernels"]["attention"]["sdpa"] == "runs"
    assert found["extras"]["images"] == "installed"  # of the tests
    assert found["extras"]["mlflow"] in ("installed", "lacks mlflow")
    assert not {"test", "docs"} & set(found["extras"])


def test_it_fits_on_a_page(values):
    lines = env.words(values).splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) <= 60
    assert "attention sdpa, eager" in " ".join(" ".join(lines).split())


def test_it_says_nothing_about_people_and_their_files(values):
    own = [f"{Path.home()}/", str(Path.cwd()), getpass.getuser(), gethostname(), "of-mine", "HF_TOKEN"]
    for said in (env.words(values), json.dumps(values)):
        assert "MKL_CBWR" in said
        assert [text for text in own if text in said] == []
