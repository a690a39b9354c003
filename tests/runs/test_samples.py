"""Sampled rows: whole on disk, step by step, as the batch has them."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import fppo
from fppo.batch import Column, Experience, RowInputs
from fppo.data.pieces import pieces, pieces_of
from fppo.runs import sample_files, samples
from fppo.runs.jsonl import JsonLines
from fppo.runs.sample_files import SAMPLES, SampleFiles
from tests import tiny


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet)
    backend.train_from_iterator(["what is twelve plus seven, it is nineteen"] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


@given(st.lists(st.text(max_size=12), min_size=1, max_size=3), st.booleans())
def test_pieces_join_to_the_decoded_text(tokenizer, texts, swap):
    rows = [tokenizer.encode(text) for text in texts]
    rows = [row[::-1] if swap else row for row in rows]  # reversed they are no UTF-8
    decoded = [tokenizer.decode(row) for row in rows]
    found = pieces_of(tokenizer, rows, decoded)
    assert found == [pieces(tokenizer, row) for row in rows]
    assert [len(row) for row in found] == [len(row) for row in rows]
    assert ["".join(row) for row in found] == decoded


def test_a_character_of_several_tokens_stands_with_the_last(tokenizer):
    ids = tokenizer.encode("a€b")
    assert pieces(tokenizer, ids) == ["a", "", "", "€", "b"]


def test_pieces_keep_the_space_that_a_first_word_loses():
    words = ["two", " plus", " two"]
    decode = lambda ids, **options: "".join(words[i] for i in ids).removeprefix(" ")  # noqa: E731
    assert pieces(types.SimpleNamespace(decode=decode), [0, 1, 2]) == words


def experience(tokenizer: Any, *, critic: bool = True) -> Experience:
    """Two prompts, padded on the left; responses of 3 and 2 tokens; the first's second token is an observation."""
    pad = tokenizer.pad_token_id
    words = tokenizer.encode("abcdefgh")[:8]
    tokens = torch.tensor([[pad, *words[:2], *words[2:5]], [*words[:3], *words[3:5], pad]])
    attention = tokens != pad
    response = torch.tensor([[True, False, True], [True, True, False]])
    numbers = torch.arange(6.0).reshape(2, 3)
    numbers = numbers.masked_fill(~response, float("nan"))
    numbers[1, 1] = float("inf")
    return Experience(
        tokens=tokens,
        attention_mask=attention,
        response_mask=response,
        rollout_log_probs=-numbers,
        sampling_log_probs=-numbers,
        row_ids=torch.tensor([7, 8]),
        groups=torch.tensor([0, 1]),
        versions=torch.zeros(2, dtype=torch.int64),
        finish=Column(["stop", "length"]),
        ids=Column(["r0", 3]),
        ground_truth=Column(["19", {"answer": 4.0}]),
        source=Column(["sums", "sums"]),
        extras=Column([{}, {}]),
        scores=torch.tensor([1.0, float("nan")]),
        named_scores={"format": torch.tensor([0.5, 0.25])},
        old_log_probs=-numbers,
        token_rewards=numbers,
        advantages=numbers,
        returns=numbers,
        values=numbers if critic else None,
        turn_ids=numbers.int(),
        turn_rewards=numbers,
        process_rewards=numbers,
    )


def record(step: int, rows: Experience | None) -> Any:
    return types.SimpleNamespace(run=types.SimpleNamespace(step=step), experience=rows)


def write_record(directory: Path, step: int, tokenizer: Any) -> None:
    """Write the rows of a step."""
    files = SampleFiles(directory / SAMPLES, tokenizer, count=None, most_bytes=1e9)
    files(record(step, experience(tokenizer)))
    files.close()


@attrs.frozen(eq=False)
class Sized:
    """A file of so many bytes, for `thinned`."""

    size: int

    def stat(self) -> Any:
        return types.SimpleNamespace(st_size=self.size)


def test_a_file_has_what_the_batch_has(tokenizer, tmp_path):
    whole = experience(tokenizer)
    write_record(tmp_path, 5, tokenizer)
    table = fppo.open(tmp_path).arrow(5)
    columns = table.to_pydict()
    assert columns["tokens"] == [whole.tokens[0, 3:].tolist(), whole.tokens[1, 3:5].tolist()]
    assert columns["pieces"] == [["c", "d", "e"], ["d", "e"]]
    assert (columns["prompt"], columns["response"]) == (["ab", "abc"], ["cde", "de"])
    assert columns["mask"] == [[True, False, True], [True, True]]
    assert columns["length"] == [2, 2]
    assert (columns["id"], columns["ground_truth"]) == (["r0", "3"], ["19", '{"answer": 4.0}'])
    assert (columns["score"], columns["score.format"]) == ([1.0, None], [0.5, 0.25])
    assert (columns["step"], columns["row_id"], columns["group"]) == ([5, 5], [7, 8], [0, 1])
    for name in samples.LISTS:
        expected = getattr(whole, name)
        if expected is None:
            assert name not in columns
            continue
        for row, (got, kept) in enumerate(zip(columns[name], (slice(0, 3), slice(0, 2)), strict=True)):
            np.testing.assert_array_equal(np.array(got), expected[row, kept].numpy())


def test_log_probs_and_rewards_are_not_rounded_to_halves(tokenizer, tmp_path):
    """Differences of log-probs are looked at, and those are small."""
    fine = torch.tensor([[-1.0001, -2.00003, 0.12345], [-1e-5, -7.00007, 0.0]])
    names = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "teacher_log_probs")
    names += ("token_rewards", "turn_rewards", "process_rewards", "correction_weights")
    whole = attrs.evolve(experience(tokenizer), **dict.fromkeys(names, fine))
    files = SampleFiles(tmp_path, tokenizer, count=None, most_bytes=1e9)
    files(record(1, whole))
    files.close()
    columns = sample_files.read(sample_files.files(tmp_path)[1]).to_pydict()
    for name in names:
        assert np.array_equal(np.array(columns[name][0], np.float32), fine[0].numpy()), name


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=6, max_size=6))
def test_numbers_are_rounded_to_halves_only_where_they_fit(numbers):
    x = np.array(numbers, np.float32)
    kept = samples._narrow(x, np.float16).astype(np.float32)
    finite = np.isfinite(x)
    assert (np.isfinite(kept) == finite).all()
    np.testing.assert_allclose(kept[finite], x[finite], rtol=2**-10, atol=2**-24)


def test_images_stand_once_in_a_group(tokenizer, tmp_path):
    shown = torch.arange(24, dtype=torch.uint8).reshape(2, 2, 2, 3)
    inputs = RowInputs({}, torch.tensor([0]), shown, shown_of=torch.tensor([0, 0]))
    plain = experience(tokenizer)
    whole = attrs.evolve(plain, groups=torch.tensor([4, 4]), inputs=Column([inputs, inputs]))
    files = SampleFiles(tmp_path, tokenizer, count=None, most_bytes=1e9)
    files(record(1, whole))
    files.close()
    table = sample_files.read(sample_files.files(tmp_path)[1])
    assert [x is not None for x in table.column("images").to_pylist()] == [True, False]
    (frames,) = table.column("images")[0].as_py()
    assert len(frames) == 2
    assert all(frame.startswith(b"\x89PNG") for frame in frames)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(0, 600))
def test_the_budget_keeps_the_newest_and_multiples_of_one_power_of_2(sizes, most):
    found = {step: Sized(size) for step, size in enumerate(sizes, start=1)}
    removed = sample_files.thinned(found, most)
    kept = {step: x for step, x in found.items() if x not in removed}
    total = sum(x.size for x in kept.values())
    assert len(sizes) in kept
    assert total <= most or len(kept) == 1
    older = [step for step in kept if step != len(sizes)]
    largest = max(2**k for k in range(8) if all(step % 2**k == 0 for step in older)) if older else None
    if largest is not None:
        assert older == [step for step in range(1, len(sizes)) if step % largest == 0]
        halved = [step for step in range(1, len(sizes)) if step % max(largest // 2, 1) == 0]
        more = sum(found[step].size for step in {*halved, len(sizes)})
        assert largest == 1 or halved == older or more > most


def test_only_the_steps_of_the_past_stay_when_a_run_goes_on(tokenizer, tmp_path):
    files = SampleFiles(tmp_path, tokenizer, count=1, most_bytes=1e9)
    for step in (1, 2, 3):
        files(record(step, experience(tokenizer)))
    files.close()
    (tmp_path / ".000004.new").write_bytes(b"half of a file")
    again = SampleFiles(tmp_path, tokenizer, count=1, most_bytes=1e9, first_step=3)
    assert list(sample_files.files(tmp_path)) == [1, 2]
    again(record(3, None))
    again.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000001.parquet", "000002.parquet"]
    assert {sample_files.read(path).num_rows for path in sample_files.files(tmp_path).values()} == {1}


def test_a_file_that_cannot_be_written_is_raised_at_the_next_step_and_at_the_end(tokenizer, tmp_path):
    for call in (lambda files: files(record(2, None)), SampleFiles.close):
        files = SampleFiles(tmp_path / "full", tokenizer, count=None, most_bytes=1e9)
        (tmp_path / "full").rmdir()
        files(record(1, experience(tokenizer)))
        with pytest.raises(OSError, match="full"):
            call(files)


def test_a_record_is_opened_whole_or_by_column(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"no record of a run; give the output_dir of one"):
        fppo.open(tmp_path)
    files = SampleFiles(tmp_path / SAMPLES, tokenizer, count=None, most_bytes=1e9)
    log = JsonLines(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        files(record(step, experience(tokenizer, critic=step == 1)))
        log.log(step, {"a": float(step)} if step == 1 else {"b": 0.5})
    files.close()
    log.close()
    run = fppo.open(tmp_path)
    assert run.sampled == (1, 2)
    assert run.metrics()["a"].tolist()[0] == 1.0
    assert run.metrics().loc[2, "b"] == 0.5
    assert run.samples(columns=["step", "score"]).shape == (4, 2)
    assert run.samples([2, 1])["step"].tolist() == [2, 2, 1, 1]
    assert run.arrow().column("values").null_count == 2
    assert run.arrow(columns=["values"]).schema.field("values").type == pa.list_(pa.float32())
    with pytest.raises(ValueError, match=r"rows of step 3 are not kept; 2 steps are, 1 to 2"):
        run.samples(3)
    with pytest.raises(ValueError, match=r"unknown column 'scores'; step 2 has step, row_id"):
        run.samples(columns=["scores"])
    next(iter(sample_files.files(tmp_path / SAMPLES).values())).write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"000001\.parquet: damaged"):
        run.samples()


@pytest.mark.parametrize(
    ("count", "chosen"), [(2, [0, 3]), (4, [0, 1, 3, 4]), (6, [0, 1, 2, 3, 4, 5]), (None, [*range(6)])]
)
def test_some_rows_lie_all_over_the_batch(count, chosen):
    assert samples.spread(tiny.experience(0, 6), count).row_ids.tolist() == chosen


def every_list(tokenizer: Any) -> Experience:
    """A batch with a value of its own in every column of lists, and in all that files leave out."""
    whole = experience(tokenizer)
    width = whole.response_mask.shape[1]
    numbers = {name: torch.arange(2.0 * width).reshape(2, width) + i for i, name in enumerate(samples.LISTS)}
    columns = {name: x.to(torch.int32) if "ids" in name or "versions" in name else x for name, x in numbers.items()}
    large = {"routed": torch.ones(2, 6, 1, 1, dtype=torch.uint8), "hidden": torch.ones(2, width, 4)}
    large |= {"truth_signs": torch.ones(2, width, 2), "sum_squared_probs": numbers["values"]}
    return attrs.evolve(whole, **columns, **large, disagreement=numbers["values"], episodes=torch.tensor([3, 4]))


def test_what_is_copied_to_the_host_has_all_that_a_file_holds(tokenizer):
    whole = every_list(tokenizer)
    table = samples.table_of(whole, tokenizer, 3)
    assert {*samples.LISTS} <= {*table.column_names}
    assert samples.table_of(samples.on_host(whole), tokenizer, 3).equals(table)
    columns = table.to_pydict()
    for name, kind in samples.LISTS.items():
        kept = getattr(whole, name)
        assert columns[name] == [kept[0, :3].tolist(), kept[1, :2].tolist()], name
        assert table.schema.field(name).type.value_type == pa.from_numpy_dtype(kind)
    host = samples.on_host(whole)
    for name in ("routed", "hidden", "truth_signs", "sum_squared_probs", "disagreement"):
        assert getattr(host, name) is None
    assert len(samples.scored_lines(host, tokenizer, 3)) == 2


def test_prompts_with_images_and_videos_have_one_mark_for_each(tokenizer):
    """And one list of pictures for each, in the first row of a group that has any."""
    ids = tokenizer.encode("abcdefgh")[:8]
    tokens = torch.tensor([[ids[0], ids[1], ids[1], ids[2], ids[3], ids[3], *ids[4:6]]] * 3)
    shown = torch.arange(3 * 12, dtype=torch.uint8).reshape(3, 2, 2, 3)
    pictured = RowInputs(
        {}, torch.tensor([1, 2]), shown, video_places=torch.tensor([4, 5]), shown_of=torch.tensor([0, 1, 1])
    )
    plain = attrs.evolve(
        tiny.experience(0, 3, prompt=6, response=2),
        tokens=tokens,
        attention_mask=torch.ones(3, 8, dtype=torch.bool),
        response_mask=torch.ones(3, 2, dtype=torch.bool),
        groups=torch.tensor([1, 2, 2]),
        named_scores={},
    )
    lists = {name: torch.zeros(3, 2) for name in samples.LISTS if getattr(plain, name) is not None}
    whole = attrs.evolve(plain, **lists, inputs=Column([None, pictured, pictured]))
    columns = samples.table_of(whole, tokenizer, 1).to_pydict()
    assert columns["prompt"] == ["abbcdd", "abcd", "abcd"]
    assert columns["response"] == ["ef"] * 3
    assert [x and [len(frames) for frames in x] for x in columns["images"]] == [None, [1, 2], None]
    assert "images" not in samples.table_of(attrs.evolve(whole, inputs=None), tokenizer, 1).column_names
