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
