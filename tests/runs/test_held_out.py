"""Held-out metrics: the reward before its terms, and nothing averaged with what is unlike it."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fppo.runs import held_out, loggers

WORDS = st.text("abz_", min_size=1, max_size=4)


def logged(sources, measures, n=1, best=()):
    """What an evaluation logs, in its order: the reward, then each measure; values tell measures apart."""
    found = {}
    for number, measure in enumerate(["reward", *measures]):
        for source in sources:
            level = "core" if measure == "reward" else "aux"
            found[f"val-{level}/{source}/{measure}/mean@{n}"] = float(number)
            for k in best:
                own = "core" if measure == "reward" and k == n else "aux"
                found[f"val-{own}/{source}/{measure}/best@{k}/mean"] = 100.0 + number
    return found


def test_the_reward_stands_first_whatever_the_alphabet_says():
    line = logged(["gsm8k"], ["exact_match", "chars", "zeal"], n=4, best=(2, 4))
    assert held_out.held_out(sorted(line))[0].metric == "val-core/gsm8k/reward/mean@4"
    assert [each.metric for each in held_out.rewards(line)] == ["val-core/gsm8k/reward/mean@4"]
    assert held_out.shown(line) == [
        *(("reward", 0.0), ("exact_match", 1.0), ("chars", 2.0), ("zeal", 3.0), ("best@4", 100.0))
    ]


def test_numbers_of_two_terms_are_not_averaged_and_one_source_is_one():
    """The lengths of two rewards are called the same behind their slashes."""
    line = logged(["gsm8k"], ["short", "long", "short/chars", "long/chars"], n=4, best=(2, 4))
    shown = dict(held_out.shown(line))
    assert (shown["short/chars"], shown["long/chars"]) == (3.0, 4.0)
    assert "sources" not in dict(loggers.held_out_summary(line))
    assert dict(loggers.held_out_summary(logged(["a", "b/c"], [])))["sources"] == "2"


def test_the_own_reward_is_in_the_line_before_further_numbers():
    further = [f"exact_match/number_{i}" for i in range(9)]
    out = io.StringIO()
    log = loggers.PlainConsole(9, file=out)
    log.log(0, logged(["s"], [*further, "exact_match", "my_own_reward"], n=4, best=(2, 4)))
    assert "  reward 0.000  exact_match 10.000  my_own_reward 11.000" in out.getvalue()
    assert len(out.getvalue().rstrip()) <= 80


def test_a_term_that_is_the_reward_is_shown_once():
    line = {"val-core/a/reward/mean@1": 0.5, "val-aux/a/mine/mean@1": 0.5, "val-aux/a/chars/mean@1": 0.5}
    assert held_out.shown(line) == [("reward", 0.5), ("chars", 0.5)]
    assert held_out.shown(line | {"val-aux/a/mine/mean@1": 0.25})[1] == ("mine", 0.25)


@given(st.lists(st.lists(WORDS, min_size=1, max_size=2).map("/".join), min_size=1, max_size=3, unique=True), WORDS)
def test_sources_may_have_slashes(sources, measure):
    measures = [] if measure == "reward" else [measure, f"{measure}/{measure}"]
    found = held_out.held_out(logged(sources, measures, n=8, best=(2, 8)))
    clear = [s for s in sources if not any(s != other and s.startswith(f"{other}/") for other in sources)]
    for each in found:
        if each.source in clear:
            assert each.metric.split("/", 1)[1].startswith(f"{each.source}/{each.measure}/")
    assert held_out.sources(logged(sources, measures)) == sources


def test_metrics_of_ones_own_evaluation_are_held_out_too():
    own = {"val/sums/accuracy/mean@1": 0.5, "val/accuracy": 0.25, "value/x": 1.0, "val/sums/length": 3.0}
    found = held_out.held_out(own)
    assert [(each.source, each.measure, each.kind) for each in found] == [
        ("sums", "accuracy", "mean@1"),
        ("", "accuracy", "mean"),
    ]


def test_a_number_of_several_sources_is_their_mean():
    found = held_out.shown({"val-core/a/reward/mean@1": 0.2, "val-core/b/reward/mean@1": 0.6})
    assert found == [("reward", pytest.approx(0.4))]
