"""Held-out metrics: the reward before its terms, and nothing averaged with what is unlike it."""

import io

import pytest
from hypothesis import given, settings
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


def by_hand(metrics, sources, measures, n):
    """What is shown: means over the sources of the reward, of its terms, of its best of all, and the rest."""
    logged_, shown = dict(metrics), {}
    for measure in ["reward", *measures]:
        values = [
            logged_.get(f"val-{'core' if measure == 'reward' else 'aux'}/{s}/{measure}/mean@{n}") for s in sources
        ]
        shown[measure] = [x for x in values if x is not None]
        if measure == "reward":
            best = [logged_.get(f"val-core/{s}/reward/best@{n}/mean") for s in sources]
            shown[f"best@{n}"] = [x for x in best if x is not None]
    terms = [name for name in measures if "/" not in name]
    further = [name for name in measures if "/" in name]
    first = [name for name in (*terms, *further) if shown[name]][:1]
    if first and shown[first[0]] == shown["reward"]:
        del shown[first[0]]
    order = ["reward", *terms, f"best@{n}", *further]
    return [(name, sum(shown[name]) / len(shown[name])) for name in order if shown.get(name)]


@settings(max_examples=60)
@given(
    st.sampled_from([["a"], ["a", "b/c"], ["b", "a", "c"]]),
    st.lists(st.sampled_from(["exact", "mine", "exact/chars", "mine/words", "zeal"]), max_size=4, unique=True),
    st.sampled_from([1, 2, 8]),
    st.data(),
)
def test_an_evaluation_is_shown_as_its_definition_says(sources, measures, n, data):
    """Some numbers may be missing, as where every score failed, and terms may be what the reward is."""
    numbers = st.sampled_from([None, 0.0, 0.25, 0.5, 1.0])
    metrics = {}
    for measure in ["reward", *measures]:
        copies = measure != "reward" and data.draw(st.booleans())
        for source in sources:
            core = measure == "reward"
            name = f"val-{'core' if core else 'aux'}/{source}/{measure}/mean@{n}"
            own = data.draw(numbers) if not copies else metrics[f"val-core/{source}/reward/mean@{n}"]
            metrics[name] = own if own is not None or not core else 0.5
            if n > 1:
                for kind in ("best@2/mean", f"best@{n}/mean", f"maj@{n}/mean")[: 2 + (not core)]:
                    level = "core" if core and f"@{n}" in kind else "aux"
                    metrics[f"val-{level}/{source}/{measure}/{kind}"] = data.draw(numbers)
    expected = by_hand(metrics, sources, measures, n)
    assert held_out.shown(metrics) == [(name, pytest.approx(value)) for name, value in expected]
    found = held_out.held_out(metrics)
    assert {each.metric for each in found} == {*metrics}
    assert [(x.source, x.measure, x.kind, x.responses) for x in found if x.is_mean] == [
        (source, measure, f"mean@{n}", n)
        for measure in ["reward", *(m for m in measures if "/" not in m), *(m for m in measures if "/" in m)]
        for source in sources
    ]
    assert held_out.sources(metrics) == sources
    assert [each.metric for each in held_out.rewards(metrics)] == [f"val-core/{s}/reward/mean@{n}" for s in sources]


def test_a_term_that_is_the_reward_is_the_first_alone():
    same = {"reward": [0.5], "best@4": [0.5], "mine": [0.5], "other": [0.5]}
    assert held_out.repeated(same) == ["mine"]
    assert held_out.repeated({"reward": [0.5], "mine": [0.25], "other": [0.5]}) == []
    assert held_out.repeated({"best@4": [0.5], "reward": [0.5]}) == []


def test_numbers_without_a_reward_belong_to_what_stands_before_the_last_slash():
    (found,) = held_out.held_out(["val-aux/a/b/c/mean@4"])
    assert (found.source, found.measure, found.kind) == ("a/b", "c", "mean@4")
    assert [(x.source, x.measure) for x in held_out.held_out(["val-aux/c/mean@1", "val-aux/a/c/best@2/mean"])] == [
        ("", "c"),
        ("a", "c"),
    ]
