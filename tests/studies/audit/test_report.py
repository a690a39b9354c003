"""An audit runs all functions through all laws, and says what it found as text and JSON."""

import json
from importlib import metadata

import pytest
import torch

from fppo import advantages, laws, losses
from fppo._errors import UsageError
from fppo.commands import cli
from fppo.commands.output import document
from fppo.studies.audit import Audited, audit, report
from fppo.studies.audit.peers import PEERS, adapters_of

token_mean = laws.whole_loss(losses.ppo_clip, "token-mean")


def mean_of_means(*tensors, pieces, whole):
    return token_mean(*tensors, pieces=1, whole=tensors[-1]) / pieces


ADAPTERS = (
    Audited("ours", "whole_loss", token_mean, token_mean),
    Audited("means", "whole_loss", mean_of_means),
    Audited("means, excused", "whole_loss", mean_of_means, leave_out=("micro-batches", "width of micro-batches")),
)


@pytest.fixture(scope="module")
def found():
    return audit("mine", ADAPTERS, ("mine 1.0",))


@pytest.mark.slow
def test_every_function_gets_every_law(found):
    ours, means, excused = found.functions
    assert {verdict.outcome for verdict in ours.verdicts} == {"holds"}
    assert [verdict.law for verdict in means.those("fault")] == ["micro-batches", "width of micro-batches"]
    assert not excused.those("fault")
    assert len(excused.verdicts) == len(means.verdicts) - 2
    assert found.faults == 2


@pytest.mark.slow
def test_an_estimator_that_needs_two_rows_is_asked_for_groups_of_two():
    def pairs(scores, mask, groups):
        if (groups[mask.any(1)].unique(return_counts=True)[1] == 1).any():
            raise ValueError("two rows or more")
        return advantages.grpo_passk(scores, mask, groups)

    alone, paired = (audit("mine", [Audited("pass at k", "advantages", pairs, group_rows=rows)]) for rows in (1, 2))
    assert (alone.faults > 0, paired.faults) == (True, 0)


def test_the_table_counts_and_explains(found):
    text = report.table(found)
    assert text.startswith("mine (mine 1.0)\n")
    assert 'fault "micro-batches": in micro-batches of 1 and 1 rows, the gradient' in text
    assert text.endswith("faults, 2 notes")
    assert "log_probs" not in text
    assert "log_probs     = tensor(" in report.table(found, batches=True)


def test_json_holds_the_batch(found):
    numbers = json.loads(document(report.record(found)))
    means = numbers["functions"][1]
    (broken,) = [law for law in means["laws"] if law["law"] == "micro-batches"]
    assert broken["outcome"] == "fault"
    batch = {name: torch.tensor(x) for name, x in broken["batch"].items()}
    assert batch["log_probs"].shape == batch["mask"].shape


@pytest.mark.slow
def test_json_has_words_for_what_is_no_number():
    def spreads(log_probs, old, advantages, mask, *, pieces, whole):
        return (log_probs * mask).sum()

    numbers = json.loads(document(report.record(audit("mine", [Audited("spreads", "whole_loss", spreads)]))))
    assert "nan" in json.dumps(numbers)


@pytest.mark.parametrize("name", PEERS)
def test_a_trainer_that_is_not_installed_says_how_to_install_it(name):
    try:
        metadata.version(PEERS[name].package)
    except metadata.PackageNotFoundError:
        with pytest.raises(UsageError, match=r"is not installed(.|\n)*pip install"):
            adapters_of(name)
    else:
        pytest.skip(f"{name} is installed here")


@pytest.mark.slow
def test_the_command_prints_verdicts_and_fails_for_faults(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "peer_of_mine.py").write_text(
        "from tests.studies.audit.test_report import ADAPTERS\n\n\ndef adapters():\n    return ADAPTERS[:1]\n"
    )
    assert cli.main(["audit", "peer_of_mine:adapters", "--json", "found/audit.json"]) == 0
    assert "13 of 13 laws hold" in capsys.readouterr().out
    assert json.loads((tmp_path / "found/audit.json").read_text())["name"] == "peer_of_mine:adapters"
    (tmp_path / "faults_of_mine.py").write_text(
        "from tests.studies.audit.test_report import ADAPTERS\n\nFAULTS = ADAPTERS[1:2]\n"
    )
    assert cli.main(["audit", "faults_of_mine:FAULTS"]) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give a trainer"),
        (["tlr"], "did you mean trl"),
        (["trl", "--dump", "x"], "not both"),
        (["os:path"], "module"),
        (["os:getcwd"], "expected a tuple of Audited"),
    ],
)
def test_wrong_arguments_are_named(arguments, words, capsys):
    assert cli.main(["audit", *arguments]) != 0
    assert words in capsys.readouterr().err
