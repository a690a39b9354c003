"""What `fppo eval` prints."""

from fppo import metrics
from fppo.runs import evaluations


def test_an_evaluation_is_a_table_of_80_columns():
    n, places = 8, {"gsm8k": 2, "someone/a-data-set-with-a-long-name": 3, "someone": 1}
    report = {}
    for source, count in places.items():
        for name, value in (("reward", 0.5), ("format/of an answer, strictly", 1 / 8)):
            kinds = [f"mean@{n}", f"best@{n}/mean", "best@2/mean"] + [f"maj@{n}/mean"] * (name == "reward")
            for kind in kinds:
                level = "core" if name == "reward" and f"@{n}" in kind else "aux"
                report[f"val-{level}/{source}/{name}/{kind}"] = metrics.mean(value * count, count)
    report |= {"val-aux/errors": metrics.total(3), "val-aux/timeouts": metrics.total(0)}
    assert evaluations.table(report) == [
        "source                  prompts                        mean@8  best@8   maj@8",
        "gsm8k                         2  reward                0.5000  0.5000  0.5000",
        "                                 format/of an answ...  0.1250  0.1250",
        "someone/a-data-set-...        3  reward                0.5000  0.5000  0.5000",
        "                                 format/of an answ...  0.1250  0.1250",
        "someone                       1  reward                0.5000  0.5000  0.5000",
        "                                 format/of an answ...  0.1250  0.1250",
        "responses without a score: 3 errors",
    ]


def test_a_part_that_is_the_reward_is_not_shown_twice():
    report = {f"val-{kind}/mean@1": metrics.mean(3.0, 4) for kind in ("core/test/reward", "aux/test/exact_match")}
    assert evaluations.table(report) == ["source  prompts          mean@1", "test          4  reward  0.7500"]


def test_a_table_has_the_terms_of_each_source_that_are_not_its_reward():
    """One term may be the reward of one source and not of another; prompts are counted, not added up."""
    report = {
        "val-core/a/reward/mean@1": metrics.mean(300.0, 1200),
        "val-aux/a/exact/mean@1": metrics.mean(300.0, 1200),
        "val-core/b\x1b/reward/mean@1": metrics.mean(1.0, 2),
        "val-aux/b\x1b/exact/mean@1": metrics.mean(1.0, 2),
        "val-aux/b\x1b/chars/mean@1": metrics.mean(9.0, 2),
        "val-core/c/reward/mean@1": metrics.mean(1.0, 4),
        "val-aux/c/exact/mean@1": metrics.mean(3.0, 4),
        "val-aux/errors": metrics.total(2),
        "val-aux/timeouts": metrics.total(1),
        "val-core/errors": metrics.total(9),
    }
    assert evaluations.table(report) == [
        "source  prompts          mean@1",
        "a         1,200  reward  0.2500",
        "b\\x1b         2  reward  0.5000",
        "                 exact   0.5000",
        "                 chars   4.5000",
        "c             4  reward  0.2500",
        "                 exact   0.7500",
        "responses without a score: 2 errors, 1 timeouts",
    ]
