"""Batch records: functions on rows hold on any record, and files bring back what was saved."""

from __future__ import annotations

import pickle

import attrs
import pytest
import torch
from hypothesis import given
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
