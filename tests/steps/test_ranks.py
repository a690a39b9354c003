"""Which rows are a mini-batch follows from the rows, and from the key."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo.key import Key
from fppo.steps.ranks import mini_batches


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=12, unique=True), st.integers(1, 12), st.data())
def test_mini_batches_follow_the_rows_and_not_their_places(ids, size, data):
    mixed = data.draw(st.permutations(ids))

    def drawn(rows):
        return [[rows[i] for i in numbers.tolist()] for numbers in mini_batches(torch.tensor(rows), size, key=Key(5))]

    assert drawn(ids) == drawn(mixed)
    assert sorted(row for rows in drawn(ids) for row in rows) == sorted(ids)
