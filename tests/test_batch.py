"""Batch records: functions on rows hold on any record, and files bring back what was saved."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from fppo import batch, tree
from fppo.batch import Annotated, Column, Experience, Prompts, Rollout, RowInputs, Scored
from tests import tiny


def inputs(number: int) -> RowInputs | None:
    """Images of a size of their own, and in every other row a video, shown by two frames; every third row has none."""
    pixels = torch.arange(number * 6, dtype=torch.float32).view(number, 3, 2) / 7
    grid = torch.ones(number, 3, dtype=torch.int64)
    shown = torch.full((number, 2, 2, 3), number, dtype=torch.uint8)
    named = {"pixel_values": pixels, "image_grid_thw": grid}
    if number % 3 == 0:
        return None
    if number % 2 == 0:
        return RowInputs(named, torch.arange(2 * number), shown)
    named |= {"pixel_values_videos": pixels + 1, "video_grid_thw": grid}
    places = torch.arange(2 * number)
    return RowInputs(named, places, torch.cat([shown] * 2), places + 50, torch.arange(2 * number) // 2)


def prompts(count: int, width: int = 3) -> Prompts:
    numbers = torch.arange(count)
    return Prompts(
        tokens=numbers[:, None] * 10 + torch.arange(width),
        attention_mask=torch.ones(count, width, dtype=torch.bool),
        row_ids=numbers,
        ids=Column([f"row {i}" for i in range(count)]),
        ground_truth=Column([{"answer": i} for i in range(count)]),
        source=Column(["a"] * count),
        extras=Column([{"trace": [i, None]} for i in range(count)]),
        inputs=Column([inputs(i) for i in range(count)]),
    )


def scored(count: int, width: int = 3, names: tuple[str, ...] = ("exact", "format.strict")) -> Scored:
    asked = prompts(count, width)
    rollout = batch.extend(
        Rollout,
        asked,
        response_mask=torch.ones(count, 2, dtype=torch.bool),
        rollout_log_probs=torch.randn(count, 2),
        sampling_log_probs=torch.randn(count, 2),
        groups=torch.arange(count),
        versions=torch.zeros(count, dtype=torch.int64),
        finish=Column(["stop"] * count),
    )
    named = {name: torch.arange(count).float() for name in names}
    return batch.extend(Scored, rollout, scores=torch.arange(count).float(), named_scores=named)


def same(a, b) -> bool:
    return type(a) is type(b) and tree.digest(a) == tree.digest(b)


def row_names(record) -> list[str]:
    return list(record.ids)


@given(st.integers(1, 9), st.integers(0, 9), st.integers(0, 99))
def test_concat_undoes_a_cut(count, place, seed):
    record = tiny.experience(seed, count)
    first, rest = range(min(place, count)), range(min(place, count), count)
    assert same(batch.concat([batch.rows(record, first), batch.rows(record, rest)]), record)


@given(st.integers(0, 9), st.integers(0, 99))
def test_another_order_and_its_inverse(count, seed):
    record = prompts(count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    shuffled = batch.rows(record, order)
    assert shuffled.row_ids.tolist() == order.tolist()
    assert row_names(shuffled) == [f"row {i}" for i in order.tolist()]
    assert same(batch.rows(shuffled, batch.inverse(order)), record)


def test_rows_moves_tensors_and_objects_together():
    record = scored(4)
    for index in (torch.tensor([2, 0]), [2, 0], torch.tensor([-2, 0])):
        picked = batch.rows(record, index)
        assert picked.tokens[:, 0].tolist() == [20, 0]
        assert row_names(picked) == ["row 2", "row 0"]
        assert picked.named_scores["exact"].tolist() == [2.0, 0.0]
        assert picked.ground_truth == Column([{"answer": 2}, {"answer": 0}])
    kept = batch.rows(record, torch.tensor([True, False, False, True]))
    assert row_names(kept) == ["row 0", "row 3"]
    assert batch.num_rows(batch.rows(record, [])) == 0


@pytest.mark.parametrize("index", [torch.tensor([True, False]), [0.5]])
def test_rows_refuses_what_is_no_index(index):
    with pytest.raises(ValueError, match=r"index|integers"):
        batch.rows(prompts(3), index)


def test_repeat_interleaved_or_not():
    assert row_names(batch.repeat(prompts(2), 2)) == ["row 0", "row 0", "row 1", "row 1"]
    assert row_names(batch.repeat(prompts(2), 2, interleave=False)) == ["row 0", "row 1", "row 0", "row 1"]


def test_functions_leave_their_argument_alone():
    record = scored(3)
    before = tree.digest(record)
    batch.rows(record, [2, 1, 0])
    batch.repeat(record, 2)
    batch.concat([record, record])
    assert tree.digest(record) == before


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: batch.repeat(prompts(2), 0), "1 or more"),
        (lambda: batch.concat([]), "no records"),
        (lambda: batch.concat([prompts(1), scored(1)]), "unlike"),
        (lambda: batch.concat([prompts(1, 3), prompts(1, 4)]), "tokens differs in dtype or width"),
        (lambda: batch.concat([scored(1, names=("a",)), scored(1, names=("b",))]), "unlike"),
        (lambda: batch.extend(Rollout, prompts(2)), "missing fields .*response_mask"),
        (lambda: batch.extend(Prompts, prompts(2), colour=1), "unknown fields .*colour"),
        (lambda: batch.extend(Prompts, prompts(2), ids=Column(["a"])), "differ in length"),
    ],
)
def test_bad_calls_say_what_is_wrong(call, text):
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.parametrize("names", [(), ("exact",), ("exact", "format.strict")])
def test_save_and_load_are_the_identity(tmp_path, names):
    record = scored(3, names=names)
    batch.save(record, tmp_path / "batch.safetensors")
    assert same(batch.load(Scored, tmp_path / "batch.safetensors"), record)


def test_rows_that_share_inputs_share_them_on_disk(tmp_path):
    record = batch.repeat(prompts(5), 4)
    batch.save(record, tmp_path / "four")
    batch.save(prompts(5), tmp_path / "one")
    files = [load_file(tmp_path / name) for name in ("one", "four")]
    assert [sum("/" in name for name in file) for file in files] == [2 * 6 + 8, 2 * 6 + 8]
    loaded = batch.load(Prompts, tmp_path / "four")
    assert same(loaded, record)
    assert loaded.inputs is not None
    assert len({id(x) for x in loaded.inputs}) == 4  # of three rows, and None
    assert inputs(1) == inputs(1) != inputs(2)


def test_inputs_are_hashed_once_and_again_where_they_were_written_to(monkeypatch):
    hashed = list[dict[str, torch.Tensor]]()
    digest = tree.digest
    monkeypatch.setattr(tree, "digest", lambda x: (isinstance(x, dict) and hashed.append(x)) or digest(x))
    own, other = inputs(1), inputs(2)
    rows = attrs.evolve(prompts(6), inputs=Column([own, own, other, None, own, own]))
    first = digest(rows)
    assert digest(batch.rows(rows, torch.arange(6))) == first
    assert [len(x["places"]) for x in hashed] == [2, 4]
    for copied in (pickle.loads(pickle.dumps(own)), inputs(1)):
        assert copied == own
        copied.tensors["pixel_values"].add_(1)
        assert copied != own
        assert repr(copied) != repr(own)
    own.shown.zero_()
    assert digest(rows) != first
    with torch.inference_mode():
        made = inputs(1)
        before = made.digest()
        made.places.add_(1)
        assert made.digest() != before


def test_a_record_with_one_tensor_in_two_fields_is_saved(tmp_path):
    record = scored(3)
    record = batch.extend(
        Annotated, record, old_log_probs=record.rollout_log_probs, values=record.rollout_log_probs.T.T
    )
    batch.save(record, tmp_path / "batch.safetensors")
    assert same(batch.load(Annotated, tmp_path / "batch.safetensors"), record)


def test_an_experience_of_no_rows_is_saved(tmp_path):
    record = batch.rows(tiny.experience(0, 3), [])
    batch.save(record, tmp_path / "batch.safetensors")
    assert same(batch.load(Experience, tmp_path / "batch.safetensors"), record)


def test_loading_says_what_is_wrong_with_a_file(tmp_path):
    path = tmp_path / "batch.safetensors"
    batch.save(prompts(3), path)
    with pytest.raises(ValueError, match="holds a Prompts, not a Rollout"):
        batch.load(Rollout, path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        batch.load(Prompts, path)


@pytest.mark.parametrize("item", [{"when": object()}, {"pair": (1, 2)}, {1: "a"}])
def test_objects_that_json_would_change_are_refused(tmp_path, item):
    record = tree.replace(prompts(1), extras=Column([item]))
    with pytest.raises(ValueError, match="JSON"):
        batch.save(record, tmp_path / "batch.safetensors")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 0.1 + 0.2, -0.0, 2**70])
def test_numbers_of_objects_come_back_as_they_are(tmp_path, number):
    """Also those that are none, as rows of data may hold, deep in their objects."""
    rows = attrs.evolve(prompts(2), inputs=None, extras=Column([{"a": [{"b": number}, 1]}, {}]))
    batch.save(rows, tmp_path / "rows.safetensors")
    again = batch.load(Prompts, tmp_path / "rows.safetensors")
    assert repr(again.extras) == repr(rows.extras)


def test_column_is_an_immutable_sequence():
    column = Column(x for x in "abc")
    assert list(column) == ["a", "b", "c"]
    assert column[1:] == Column("bc")
    assert column[-1] == "c"
    assert hash(column) == hash(Column("abc"))
    assert column != ["a", "b", "c"]
    with pytest.raises(TypeError):
        column[0] = "z"  # type: ignore[index]


def test_a_record_extends_that_of_the_stage_before():
    record = tiny.experience(0, 3)
    assert isinstance(record, Rollout)
    rollout = batch.narrow(Rollout, record)
    assert type(rollout) is Rollout
    assert tree.digest(rollout).items() <= tree.digest(record).items()
    assert same(tree.map(torch.clone, record), record)


OPTIONAL = ("inputs", "routed", "token_versions", "turn_ids", "turn_rewards", "episodes", "observed")
OPTIONAL = (*OPTIONAL, "baselines", "process_rewards", "drafts")
KINDS = (Prompts, Rollout, Scored, Annotated, Experience)


def full(count: int, left_out: tuple[str, ...] = ()) -> Experience:
    """A record with a value of its own in every entry of every column, but for those that are left out."""
    base, g = tiny.experience(4, count), torch.Generator().manual_seed(9)
    length, width = base.response_mask.shape[1], base.tokens.shape[1]
    fields = {
        "inputs": Column([inputs(i) for i in range(count)]),
        "extras": Column([{"i": [i, None, "é"]} for i in range(count)]),
        "routed": torch.randint(0, 250, (count, width, 2, 2), generator=g).to(torch.uint8),
        "token_versions": torch.randint(0, 9, (count, length), generator=g).to(torch.int32),
        "turn_ids": torch.randint(-1, 3, (count, length), generator=g).to(torch.int32),
        "turn_rewards": torch.full((count, length), torch.nan),
        "process_rewards": torch.full((count, length), torch.nan),
        "episodes": torch.arange(count) // 2 + 5,
        "drafts": torch.randint(0, 9, (count, 2), generator=g),
        "teacher_top_ids": torch.randint(0, 250, (count, length, 3), generator=g).to(torch.int32),
        "teacher_top_log_probs": torch.randn(count, length, 3, generator=g),
        "taught": torch.rand(count, generator=g) < 0.5,
        "observed": Column([list(range(i)) for i in range(count)]),
        "earlier": Column([[list(range(i)), [7]] for i in range(count)]),
        "named_scores": {"a": torch.randn(count, generator=g), "b.c": torch.randn(count, generator=g)},
        "entropy_mask": torch.rand(count, length, generator=g) < 0.5,
        "entropy_coef": torch.rand(count, generator=g).double(),
        "hidden": torch.randn(count, length, 3, generator=g),
        "truth_signs": torch.randn(count, length, 2, generator=g),
    }
    for name in ("baselines", "outcomes"):
        fields[name] = torch.randn(count, generator=g)
    for name in ("teacher_log_probs", "disagreement", "sum_squared_probs", "entropy", "correction_weights"):
        fields[name] = torch.randn(count, length, generator=g)
    return tree.replace(base, **fields | dict.fromkeys(left_out))


@pytest.mark.slow
@settings(max_examples=40)
@given(
    st.sampled_from(KINDS),
    st.integers(0, 4),
    st.sets(st.sampled_from(OPTIONAL)),
    st.data(),
)
def test_every_column_goes_along_whatever_is_done_with_rows(kind, count, left_out, data):
    """Narrowed, saved and loaded, taken apart into columns and put together, cut and concatenated, repeated: all
    columns are those of rows taken one by one."""
    record = batch.narrow(kind, full(count, tuple(left_out)))
    named = batch.columns(record)
    expected = {field.name for field in attrs.fields(kind)} - left_out - {"named_scores"}
    if "named_scores" in {field.name for field in attrs.fields(kind)}:
        expected |= {"named_scores.a", "named_scores.b.c"}
    assert set(named) == expected
    assert same(batch.record(kind, named), record)
    with tempfile.TemporaryDirectory() as place:
        batch.save(record, Path(place) / "x")
        assert same(batch.load(kind, Path(place) / "x"), record)
    index = data.draw(st.lists(st.integers(0, count - 1), max_size=5)) if count else []
    taken = batch.columns(batch.rows(record, index))
    assert set(taken) == expected
    for name, column in named.items():
        if isinstance(column, torch.Tensor):
            assert torch.equal(taken[name].nan_to_num(7), column[index].nan_to_num(7))
            assert (taken[name].dtype, taken[name].shape[1:]) == (column.dtype, column.shape[1:])
        else:
            assert list(taken[name]) == [column[i] for i in index]
    keep = torch.tensor([i in index for i in range(count)], dtype=torch.bool)
    assert same(batch.rows(record, keep), batch.rows(record, sorted(set(index))))
    assert batch.num_rows(record) == count
    assert same(
        batch.concat([record, batch.rows(record, index), record]),
        batch.rows(record, [*range(count), *index, *range(count)]),
    )
    assert same(batch.repeat(record, 2), batch.rows(record, [i for i in range(count) for _ in range(2)]))
    assert same(batch.repeat(record, 2, interleave=False), batch.rows(record, [*range(count)] * 2))


@given(st.lists(st.integers(0, 9), max_size=6))
def test_an_index_of_several_kinds_selects_the_same(index):
    record = prompts(10)
    expected = tree.digest(batch.rows(record, index))
    for other in (torch.tensor(index), torch.tensor(index, dtype=torch.int32), [i - 10 for i in index]):
        assert tree.digest(batch.rows(record, other)) == expected


def test_scores_by_name_are_those_of_all_records_and_nan_where_a_record_has_none():
    one, other = scored(2, names=("a", "b")), scored(3, names=("c", "a"))
    for first, second in ((one, other), (other, one)):
        made = batch.same_scores([first, second])
        assert [list(x.named_scores) for x in made] == [
            list(dict.fromkeys([*first.named_scores, *second.named_scores]))
        ] * 2
        for before, after in zip((first, second), made, strict=True):
            for name, x in after.named_scores.items():
                expected = before.named_scores.get(name, torch.full_like(before.scores, torch.nan))
                assert torch.equal(x.nan_to_num(-3), expected.nan_to_num(-3))
            assert same(tree.replace(after, named_scores=before.named_scores), before)
    assert len(batch.concat(batch.same_scores([one, other])).tokens) == 5


def test_a_row_has_a_score_where_neither_it_nor_its_baseline_is_missing():
    nan = float("nan")
    rows = tree.replace(scored(4), scores=torch.tensor([1.0, nan, 2.0, nan]))
    assert rows.has_score.tolist() == [True, False, True, False]
    assert rows.outcome is rows.scores
    rows = tree.replace(rows, baselines=torch.tensor([0.0, 0.0, nan, nan]), outcomes=torch.tensor([5.0, 6.0, 7.0, 8.0]))
    assert rows.has_score.tolist() == [True, False, False, False]
    assert rows.outcome.tolist() == [5.0, 6.0, 7.0, 8.0]


def test_inputs_differ_by_each_of_their_tensors():
    named = inputs(1).named()
    others = []
    for name, x in named.items():
        others.append(RowInputs.of({**named, name: x + 1}))
    found = [RowInputs.of(named), *others, RowInputs.of({**named, "extra": torch.ones(1)})]
    assert len({x.digest() for x in found}) == len(found) == len(named) + 2
    assert all(x != y for i, x in enumerate(found) for y in found[:i])
    assert {hash(x) for x in (found[0], inputs(1))} == {hash(inputs(1))}
    assert found[0] == inputs(1)
    plain = RowInputs({}, torch.tensor([3]), torch.zeros(3, 1, 1, 3, dtype=torch.uint8))
    assert (plain.video_places.tolist(), plain.shown_of.tolist()) == ([], [0, 1, 2])


def test_records_of_other_dtypes_are_not_joined():
    record = scored(2)
    for name, dtype in (("scores", torch.float64), ("groups", torch.int32), ("response_mask", torch.uint8)):
        other = tree.replace(record, **{name: getattr(record, name).to(dtype)})
        with pytest.raises(ValueError, match=rf"\.{name} differs in dtype or width"):
            batch.concat([record, other])
    narrower = tree.replace(record, response_mask=record.response_mask[:, :1])
    with pytest.raises(ValueError, match=r"\.response_mask differs in dtype or width"):
        batch.concat([record, narrower])


def test_many_inputs_come_back_to_their_own_rows(tmp_path):
    record = batch.rows(prompts(30), list(range(29, -1, -1)) * 2)
    batch.save(record, tmp_path / "x")
    loaded = batch.load(Prompts, tmp_path / "x")
    assert same(loaded, record)
    assert loaded.inputs is not None
    assert [len(x.places) if x else 0 for x in loaded.inputs[:3]] == [58, 56, 0]


def test_inputs_some_of_whose_tensors_count_no_versions_have_a_digest():
    own, plain = inputs(1), inputs(1)
    with torch.inference_mode():
        shown = own.shown.clone()
    mixed = RowInputs.of({**own.named(), "shown": shown})
    assert mixed == plain
    mixed.places.add_(1)
    assert mixed != plain


def test_equal_inputs_of_two_rows_stay_two(tmp_path):
    """Rows share inputs where they were given the same, not where they look alike."""
    made = tree.replace(prompts(2), inputs=Column([inputs(1), inputs(1)]))
    assert len(batch.Shared.of(made.inputs).inputs) == 2
    batch.save(made, tmp_path / "x")
    one, other = batch.load(Prompts, tmp_path / "x").inputs
    assert one == other
    assert one is not other


def test_empty_indices_of_any_kind_select_nothing_and_unknown_values_are_refused():
    record = scored(3)
    for index in ([], torch.zeros(0), torch.zeros(0, dtype=torch.int64), torch.zeros(3, dtype=torch.bool)):
        assert batch.num_rows(batch.rows(record, index)) == 0
    for value in (0, "", torch.zeros(3), Column([])):
        with pytest.raises(ValueError, match=r"unknown fields .*colour"):
            batch.extend(Scored, record, colour=value)
    assert same(batch.extend(Scored, record, colour=None), record)
