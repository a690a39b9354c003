"""Batches: every row once per epoch, the same stream from any cursor, left padding."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo import batch, data, tree
from fppo.batch import Column, Prompts, RowInputs
from fppo.data import DataCursor
from fppo.data.cursor import Learn, at_step
from fppo.key import Key
from fppo.runtime import checkpoint
from tests.data.rows import tokenizer


def prompts(count: int) -> data.PromptSet:
    return data.prompt_set(
        [[i % 7 + 1] * (i % 4 + 1) for i in range(count)],
        ground_truths=[{"n": i} for i in range(count)],
        extras=[{"i": i} for i in range(count)],
        pad_token_id=0,
    )


def stream(dataset, cursor, *, size, key, steps, shuffle=True):
    drawn = []
    for _ in range(steps):
        indices, cursor = data.next_batch(dataset, cursor, size=size, key=key, shuffle=shuffle)
        drawn.append(list(indices.ids))
    return drawn, cursor


sizes = {"count": st.integers(1, 12), "size": st.integers(1, 30), "seed": st.integers(0, 2**63)}


@given(**sizes, shuffle=st.booleans())
def test_every_row_comes_once_per_epoch(count, size, seed, shuffle):
    epochs = 4
    steps = -(-epochs * count // size)
    drawn, cursor = stream(prompts(count), DataCursor(), size=size, key=Key(seed), steps=steps, shuffle=shuffle)
    flat = [row for rows in drawn for row in rows]
    everything = {str(i) for i in range(count)}
    for epoch in range(epochs):
        assert Counter(flat[epoch * count : (epoch + 1) * count]) == Counter(everything)
    assert (cursor.epoch, cursor.position) == divmod(steps * size, count)


@given(**sizes, before=st.integers(0, 6), after=st.integers(1, 6))
def test_resuming_gives_the_same_stream(count, size, seed, before, after):
    dataset, key = prompts(count), Key(seed)
    whole, end = stream(dataset, DataCursor(), size=size, key=key, steps=before + after)
    first, cursor = stream(dataset, DataCursor(), size=size, key=key, steps=before)
    again = DataCursor(epoch=cursor.epoch, position=cursor.position)
    rest, resumed = stream(dataset, again, size=size, key=key, steps=after)
    assert first + rest == whole
    assert (resumed.epoch, resumed.position) == (end.epoch, end.position)


@given(count=st.integers(1, 40), position=st.integers(0, 10**6), size=st.integers(1, 7), seed=st.integers(0, 99))
def test_any_cursor_continues_the_one_stream(count, position, size, seed):
    epoch, start = divmod(position, count)
    picked, _ = data.next_indices(count, DataCursor(epoch=epoch, position=start), size=size, key=Key(seed))
    orders = {e: data.epoch_order(count, Key(seed), e) for e in range(epoch, epoch + size // count + 2)}
    assert picked == [orders[(position + i) // count][(position + i) % count] for i in range(size)]


def test_epochs_and_keys_have_their_own_orders():
    orders = [data.epoch_order(50, Key(s), e) for s in (0, 1) for e in (0, 1)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[i + 1 :])
    assert data.epoch_order(50, Key(0), 3, shuffle=False) == list(range(50))
    firsts = Counter(data.epoch_order(4, Key(0), e)[0] for e in range(2000))
    assert all(abs(n - 500) < 100 for n in firsts.values())


def test_a_cursor_survives_a_checkpoint(tmp_path):
    checkpoint.begin_save({"cursor": DataCursor(epoch=3, position=2)}, tmp_path, 1).wait()
    indices = checkpoint.load({"cursor": DataCursor()}, tmp_path, 1)["cursor"]
    assert (indices.epoch, indices.position) == (3, 2)


@pytest.mark.parametrize("cursor", [DataCursor(position=5), DataCursor(epoch=-1), DataCursor(position=-1)])
def test_a_cursor_of_other_data_is_refused(cursor):
    with pytest.raises(ValueError, match="the data set has 5 prompts"):
        data.next_batch(prompts(5), cursor, size=1, key=Key(0))
    with pytest.raises(ValueError, match="both must be 1 or more"):
        data.next_batch(prompts(5), DataCursor(), size=0, key=Key(0))


@given(st.integers(1, 12), st.integers(1, 13))
def test_evaluation_batches_hold_every_row_once_in_order(count, size):
    indices = list(data.batches(prompts(count), size))
    assert [i for b in indices for i in b.ids] == [str(i) for i in range(count)]
    assert torch.cat([b.row_ids for b in indices]).tolist() == list(range(count))
    assert all(len(a.tokens) == size for a, _ in pairwise(indices))


def test_collate_pads_on_the_left():
    indices = data.collate(prompts(6), [3, 0, 3], row_offset=10)
    assert indices.tokens.tolist() == [[4, 4, 4, 4], [0, 0, 0, 1], [4, 4, 4, 4]]
    assert indices.attention_mask.tolist() == [[True] * 4, [False] * 3 + [True], [True] * 4]
    assert indices.attention_mask.dtype == torch.bool
    assert indices.row_ids.tolist() == [10, 11, 12]
    assert indices.ids == batch.Column(["3", "0", "3"])
    assert indices.ground_truth == batch.Column([{"n": 3}, {"n": 0}, {"n": 3}])
    assert indices.extras[1] == {"i": 0}
    assert data.collate(prompts(6), [0], width=3).tokens.tolist() == [[0, 0, 1]]
    with pytest.raises(ValueError, match="4 tokens does not fit the width of 3"):
        data.collate(prompts(6), [3], width=3)


def test_prompt_sets_from_lists():
    words = data.prompt_set(["1 2", "3"], tokenizer(), ground_truths=["3", "3"], sources=["a", "b"], ids=["p", "q"])
    assert (words.tokens, words.ids, words.sources, words.pad_token_id) == (
        ((11, 12), (13,)),
        ("p", "q"),
        ("a", "b"),
        0,
    )
    assert data.select(words, [1]).tokens == ((13,),)
    for call, text in (
        (lambda: data.prompt_set("1 2", tokenizer()), "one string"),
        (lambda: data.prompt_set(["1"], pad_token_id=0), "need a tokenizer"),
        (lambda: data.prompt_set([[1]]), "no padding token"),
        (lambda: data.prompt_set([], pad_token_id=0), "holds no prompts"),
        (lambda: data.prompt_set([[1], []], pad_token_id=0), "1: the prompt has no tokens"),
        (lambda: data.prompt_set([[1]], pad_token_id=0, ground_truths=["a", "b"]), "differ in length"),
    ):
        with pytest.raises(ValueError, match=text):
            call()


def seen(number: int) -> RowInputs | None:
    """An image in two of three prompts."""
    pixels = torch.full((1, 2), float(number))
    shown = torch.zeros(1, 1, 1, 3, dtype=torch.uint8)
    return None if number % 3 == 0 else RowInputs({"pixel_values": pixels}, torch.tensor([0]), shown)


def written_out(rows, width, first, images) -> Prompts:
    """The record of these prompts of `whole`, column by column."""
    tokens = [[row % 7 + 1] * (row % 4 + 1) for row in rows]
    return Prompts(
        tokens=torch.tensor([[9] * (width - len(x)) + x for x in tokens]),
        attention_mask=torch.tensor([[False] * (width - len(x)) + [True] * len(x) for x in tokens]),
        row_ids=torch.arange(first, first + len(rows)),
        ids=Column([f"f:{row}" for row in rows]),
        ground_truth=Column([{"n": row} for row in rows]),
        source=Column([f"s{row % 2}" for row in rows]),
        extras=Column([{"i": row} for row in rows]),
        inputs=Column([seen(row) for row in rows]) if images else None,
    )


def whole(count: int, images: bool) -> data.PromptSet:
    return data.PromptSet(
        tokens=tuple((i % 7 + 1,) * (i % 4 + 1) for i in range(count)),
        ids=tuple(f"f:{i}" for i in range(count)),
        ground_truths=tuple({"n": i} for i in range(count)),
        sources=tuple(f"s{i % 2}" for i in range(count)),
        extras=tuple({"i": i} for i in range(count)),
        pad_token_id=9,
        inputs=tuple(map(seen, range(count))) if images else None,
    )


@settings(max_examples=50)
@given(
    count=st.integers(1, 6),
    start=st.integers(0, 12),
    size=st.integers(1, 9),
    room=st.sampled_from([None, 0, 2]),
    how=st.sampled_from(["in order", "shuffled", "own"]),
    images=st.booleans(),
)
def test_a_batch_has_every_column_of_the_next_prompts_whatever_their_order(count, start, size, room, how, images):
    key = Key(5)
    orders = {
        "in order": lambda epoch: list(range(count)),
        "shuffled": lambda epoch: data.epoch_order(count, key, epoch),
        "own": lambda epoch: [(epoch + 2 * i) % count for i in range(epoch % 3 + 1)],
    }
    stream = [(epoch, place, row) for epoch in range(24) for place, row in enumerate(orders[how](epoch))]
    rows = [row for _, _, row in stream[start : start + size]]
    longest = max(row % 4 + 1 for row in rows)
    width = None if room is None else longest + room
    (epoch, position, _), (after_epoch, after, _) = stream[start], stream[start + size]
    found, cursor = data.next_batch(
        whole(count, images),
        DataCursor(epoch=epoch, position=position),
        size=size,
        key=key,
        shuffle=how != "in order",
        width=width,
        order=orders["own"] if how == "own" else None,
    )
    assert tree.digest(found) == tree.digest(written_out(rows, longest if width is None else width, 0, images))
    assert tree.digest(cursor) == tree.digest(DataCursor(epoch=after_epoch, position=after))
    chosen = data.select(whole(count, images), rows)
    assert tree.digest(data.collate(chosen, range(len(rows)), width=width)) == tree.digest(found)
    assert (chosen.pad_token_id, len(chosen)) == (9, len(rows))


@settings(max_examples=25)
@given(st.integers(1, 9), st.integers(1, 10), st.sampled_from([None, 4, 6]), st.booleans())
def test_evaluation_batches_have_every_column(count, size, width, images):
    made = list(data.batches(whole(count, images), size, width=width))
    for start, found in zip(range(0, count, size), made, strict=True):
        rows = list(range(start, min(start + size, count)))
        longest = max(row % 4 + 1 for row in rows)
        expected = written_out(rows, longest if width is None else width, start, images)
        assert tree.digest(found) == tree.digest(expected)


@pytest.mark.parametrize("order", [[], [3], [-1], [0, 1, 2, 3]])
def test_an_order_of_other_prompts_is_refused_by_the_name_of_its_function(order):
    with pytest.raises(ValueError, match=r"mine gave .* of 3 prompts; an epoch is one or more of 0 to 2"):
        data.checked_order(order, 3, "mine")
    assert data.checked_order([2.0, 0, 2], 3, "mine") == [2, 0, 2]


def test_digests_of_prompts_are_of_tokens_and_of_what_rewards_read_each_apart():
    """Origins do not enter; every token, boundary, ground truth, source and other field does, and their order."""
    given = {
        "prompts": [[1, 2], [3]],
        "ground_truths": ["a", {"b": 1}],
        "sources": ["s", "t"],
        "extras": [{"x": 1}, {}],
    }
    first = data.digests_of(data.prompt_set(**given, pad_token_id=0))
    tokens = [[[1], [2, 3]], [[1, 2, 3], [3]], [[3], [1, 2]], [[1, 4], [3]]]
    rows = [
        {"ground_truths": ["a", {"b": 2}]},
        {"ground_truths": [{"b": 1}, "a"]},
        {"sources": ["s", "s"]},
        {"sources": ["t", "s"]},
        {"extras": [{"x": 2}, {}]},
        {"extras": [{"y": 1}, {}]},
        {"extras": [{}, {"x": 1}]},
    ]
    others = [data.digests_of(data.prompt_set(**given | {"prompts": each}, pad_token_id=0)) for each in tokens]
    changed = [data.digests_of(data.prompt_set(**given | each, pad_token_id=0)) for each in rows]
    assert {each["as rewards read them"] for each in others} == {first["as rewards read them"]}
    assert {each["as tokens"] for each in changed} == {first["as tokens"]}
    assert len({each["as tokens"] for each in [first, *others]}) == 1 + len(others)
    assert len({each["as rewards read them"] for each in [first, *changed]}) == 1 + len(changed)
    assert data.digests_of(data.prompt_set(**given, ids=["p", "q"], pad_token_id=5)) == first


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 9), st.integers(0, 9))
def test_a_curriculum_draws_by_all_that_was_drawn_before_and_at_the_step_of_the_run(drawn, begin, step):
    """Its position counts prompts, and each draw has a key of its own, whatever the step."""
    asked = []

    def choose(known, key, at, size):
        asked.append((known, key, at, size))
        return torch.arange(size) % 3

    made, key = data.Curriculum(init=lambda prompts: 7, choose=choose, update=None), Key(4)
    cursor = at_step(data.begin_course(made, whole(3, False)), step)
    cursor, position = tree.replace(cursor, position=begin), begin
    for size in drawn:
        batch, cursor = data.next_batch(whole(3, False), cursor, size=size, key=key, curriculum=made)
        assert list(batch.ids) == [f"f:{i % 3}" for i in range(size)]
        assert asked.pop() == (7, key.fold("draw", position), step, size)
        position += size
        assert (cursor.epoch, cursor.position, cursor.course.known, cursor.course.step) == (0, position, 7, step)


def test_what_responses_teach_a_curriculum_is_reported_at_the_step_that_they_are_of(monkeypatch):
    told = []

    def update(known, indices, scores):
        told.append((known, indices.tolist(), scores.tolist(), scores.dtype))
        return known + 1

    made = data.Curriculum(
        init=lambda prompts: 7, choose=None, update=update, report=lambda known, step: {"known": known, "step": step}
    )
    monkeypatch.setattr("fppo.data.cursor.joined", lambda scored: scored)
    learn = Learn.of(made, whole(3, False))
    cursor = at_step(data.begin_course(made, whole(3, False)), 5)
    scored = SimpleNamespace(ids=["f:2", "f:0", "f:2"], outcome=torch.tensor([0.5, 1.0, 0.0]), scores=None)
    after, report = learn(cursor, scored)
    assert told == [(7, [2, 0, 2], [0.5, 1.0, 0.0], torch.float64)]
    assert {name: x.total.item() / x.count.item() for name, x in report.items()} == {"known": 8.0, "step": 5.0}
    assert (after.course.known, after.course.step, after.position, cursor.course.known) == (8, 6, 0, 7)
