"""`fppo bias`: tables, files, own functions, what a run optimises, and mistakes."""

from __future__ import annotations

import json

import pytest

from fppo import advantages, losses
from fppo.commands import cli
from fppo.settings import bias


def own_estimator(scores, mask, groups):
    """RLOO with the wrong sign."""
    return -advantages.rloo(scores, mask, groups).advantages


def own_loss(log_probs, old_log_probs, advantages, mask):
    """Half of PPO's."""
    loss, metrics = losses.ppo_clip(log_probs, old_log_probs, advantages, mask)
    return loss / 2, metrics


def neither(numbers):
    return numbers


SMALL = ["--n", "2", "--worlds", "2", "--horizon", "2"]
HERE = "tests.commands.test_bias"


@pytest.mark.slow
def test_tables_files_and_own_functions(tmp_path, capsys):
    files = {kind: tmp_path / "out" / f"bias.{kind}" for kind in ("json", "markdown", "png")}
    own = ["--with", f"{HERE}:own_estimator", f"{HERE}:own_loss"]
    given = [word for kind, file in files.items() for word in (f"--{kind}", str(file))]
    assert cli.main(["bias", "--tables", "estimators,losses", *SMALL, *own, *given]) == 0
    out = capsys.readouterr().out
    assert "Estimators" in out
    assert "Policy losses" in out
    read = json.loads(files["json"].read_text())
    rows = {table["name"]: {row["label"]: row for row in table["rows"]} for table in read["tables"]}
    assert rows["estimators"]["rloo"]["size, n 2"] == pytest.approx(1)
    assert rows["estimators"]["own_estimator"]["size, n 2"] == pytest.approx(-1)
    assert rows["estimators"]["opo"]["turned, n 2"] > 0.01
    assert rows["losses"]["own_loss"]["size, lag 0"] == pytest.approx(0.5)
    assert rows["losses"]["own_loss"]["turned, lag 0.5"] > rows["losses"]["own_loss"]["turned, lag 0.1"] > 0
    assert "| rloo | 0 | 1.000 |" in files["markdown"].read_text()
    assert files["png"].stat().st_size > 10_000


@pytest.mark.slow
def test_every_table_says_what_it_must(capsys):
    assert cli.main(["bias", *SMALL, "--json", "-"]) == 0
    tables = {table["name"]: table["rows"] for table in json.loads(capsys.readouterr().out)["tables"]}
    kl = {row["label"]: row for row in tables["kl"]}
    assert {label: row["gradient of"] for label, row in kl.items() if row["in runs"] == ""} == {
        **{f"{kind} in the reward": "sequence" for kind in ("k1", "k1+")},
        "k1 in the reward, rloo": "sequence",
        "abs in the loss": "variation",
        "k3 in the loss": "reverse",
        **{f"reverse_kl, gamma {gamma}": of for gamma, of in ((0, "token"), (0.5, "none"), (1, "sequence"))},
        **{f"{kind} in the loss": "token" for kind in ("k2", "k1+", "abs+", "k2+", "k3+")},
    }
    assert kl["k1 in the loss"]["turned"] == "no gradient"
    values = {row["label"]: row["1 with 0.3"] for row in tables["values"]}
    assert all(abs(values[name]) < 1e-6 for name in ("mse", "mse, clip none", "huber", "hl_gauss", "two_hot"))
    assert values["huber, delta 0.1"] < -0.1
    critics = {row["label"]: row for row in tables["critics"]}
    assert abs(critics["lam 1"]["turned, error 1"]) < 1e-9
    assert critics["lam 0"]["turned, error 1"] > critics["lam 0.9"]["turned, error 1"] > 0
    corrections = {row["label"]: row for row in tables["corrections"]}
    assert abs(corrections["sequence, rloo"]["turned, lag 0.5"]) < 1e-9
    assert corrections["none, rloo"]["turned, lag 0.5"] > 0.01
    assert {row["label"] for row in tables["modes"] if abs(row["turned"]) < 1e-9} >= {"rloo, seq-mean-token-sum"}


@pytest.mark.slow
def test_three_lines_say_what_a_run_optimises(capsys):
    run = ["--algorithm.advantage", "rloo", "--rollout.n", "2", "--actor.kl-coef", "0.01", "--worlds", "2"]
    assert cli.main(["bias", *run, "--actor.weight-mode", "seq-mean-token-sum"]) == 0
    score, kl, critic = capsys.readouterr().out.splitlines()
    assert score.startswith("score: the gradient of the expected score, its direction, exactly; 1 of its size")
    assert "0.01 * k3 in the loss, the gradient of KL(reference || policy) of each token" in kl
    assert critic == "critic: none"
    run = ["--worlds", "2", "--algorithm.advantage.lam", "0.5", "--algorithm.kl.coef", "0.1"]
    assert cli.main(["bias", *run]) == 0
    score, kl, critic = capsys.readouterr().out.splitlines()
    assert "the weight mode alone by" in score
    assert "gae, not whitened" in score
    assert "0.1 * k1 in the reward, the gradient of KL(policy || reference) of whole responses" in kl
    assert "errors of its values turn the gradient by" in critic


@pytest.mark.parametrize(
    "words", [["--tables", "kl", "--vocabulary", "6"], ["--actor.epochs", "2", "--vocabulary", "4"]]
)
def test_large_worlds_are_taken_where_nothing_sums_over_their_groups(words):
    """A table without groups, and lines about a run: neither reads --n."""
    _, options = bias.load(None, words)
    assert options.vocabulary == int(words[-1])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--tables", "estimatrs"], "did you mean estimators?"),
        (["--n", "1"], "give sizes of groups, of 2 to 100 rows"),
        (["--n", "1", "4"], "give sizes of groups, of 2 to 100 rows"),
        (["--n", "0", "8"], "give sizes of groups, of 2 to 100 rows"),
        (["--with", "own"], "is not of the form module:function"),
        (["--tables", "modes", "--with", f"{HERE}:neither"], "neither a policy loss nor an estimator"),
        (["--actor.loss", "kl_cov"], "selects tokens by noise"),
        (["--actor.weight-mod", "token-mean"], "weight"),
        (["--actor.kl-coef", "0.1", "--with", f"{HERE}:own_loss"], "--with is of the tables"),
        (["--actor.kl-coef", "0.1", "--n", "2", "--png", "x.png"], "--png is of the tables"),
    ],
)
def test_mistakes_are_named(words, text, capsys):
    assert cli.main(["bias", *words]) != 0
    assert text in capsys.readouterr().err
