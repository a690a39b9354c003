"""Places are dealt to the owners of what waits in turn."""

from collections import Counter
from itertools import count

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo.key import Key
from fppo.rollout.engine import Sampling
from fppo.rollout.requests import Request
from fppo.rollout.rows import OpenRow
from fppo.rollout.waiting import WaitingRows
from tests.models.families import make
from tests.rollout.test_embedded import engine_of

NUMBERS = count()


def row_of(owner):
    name = f"{next(NUMBERS)}"
    return OpenRow(Request(name=name, ids=(3,), sampling=Sampling(), key=Key(0), owner=owner), [3], None, 0)


def dealt(waiting, places):
    return waiting.deal(lambda row, others, fresh: len(others) < places)


ARRIVALS = st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=30)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(st.tuples(ARRIVALS, st.integers(0, 5)), max_size=12))
def test_nobody_waits_for_more_than_one_row_of_each_other_owner(rounds):
    """Whatever comes when: between two places of an owner that has rows waiting, others have at most one each. Rows of
    one owner and kind keep their order, and those that come back go first."""
    waiting, held = WaitingRows(), {owner: ([], []) for owner in "abcd"}
    others = {owner: Counter() for owner in "abcd"}  # places of others since an owner's last one, while it waits
    for arrivals, places in rounds:
        for owner, fresh in arrivals:
            row = row_of(owner)
            waiting.add(row, fresh=fresh)
            held[owner][fresh].append(row)
        total = sum(len(rows) for pair in held.values() for rows in pair)
        assert len(waiting) == total == len([*waiting])
        given_out = dealt(waiting, places)
        assert len(given_out) == min(places, total)
        for row in given_out:
            own = held[row.owner]
            assert row is (own[0] or own[1]).pop(0)
            for owner, pair in held.items():
                if owner == row.owner or not any(pair):
                    others[owner].clear()
                else:
                    others[owner][row.owner] += 1
                    assert others[owner][row.owner] <= 1


@settings(max_examples=60)
@given(ARRIVALS, st.data())
def test_rows_that_are_put_back_or_taken_out(arrivals, data):
    waiting = WaitingRows()
    rows = []
    for owner, fresh in arrivals:
        rows.append(row_of(owner))
        waiting.add(rows[-1], fresh=fresh)
    first = dealt(waiting, data.draw(st.integers(0, 10)))
    waiting.put_back(first)
    begun = [row.owner for row in first]
    gone = [row for row in rows if data.draw(st.booleans())]
    assert all(waiting.remove(row) for row in gone)
    assert not any(waiting.remove(row) for row in gone)
    again = dealt(waiting, len(rows))
    assert {id(row) for row in again} == {id(row) for row in rows} - {id(row) for row in gone}
    for owner in "abcd":
        own = [row for row in first if row.owner == owner and row not in gone]
        assert [row for row in again if row.owner == owner][: len(own)] == own
    assert len(waiting) == 0
    left = [owner for owner in dict.fromkeys(begun) if any(row.owner == owner for row in again)]
    assert [row.owner for row in again[: len(left)]] == left  # before owners whose rows had no places


def test_a_prompt_that_does_not_fit_lets_rows_come_back_but_no_other_prompt_begin():
    waiting = WaitingRows()
    rows = {name: row_of(name[0]) for name in ("a1", "b1", "c1", "b2")}
    for name, row in rows.items():
        waiting.add(row, fresh=name != "b2")
    found = waiting.deal(lambda row, others, fresh: row is not rows["a1"])
    assert found == [rows["b2"]]
    assert waiting.deal(lambda row, others, fresh: True)[0] is rows["a1"]


def test_many_requests_of_one_do_not_keep_anothers_waiting():
    model, params = make("qwen2")
    many = [
        Request(name=f"{i}", ids=(3, 4), sampling=Sampling(max_tokens=3), key=Key(0), row=i, owner="many")
        for i in range(40)
    ]
    with engine_of(model, max_rows=2).open(params) as requests:
        requests.add(many)
        requests.step()
        requests.add([attrs.evolve(many[0], name="one", row=99, owner="one")])
        ended = []
        while "one" not in ended:
            ended += [one.name for one in requests.step().finished]
    assert len(ended) <= 4
