"""Logs: what was added is there, a torn end is cut off, and other damage is an error."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo.serve.tinker.journal import Journal, JournalError, JournalRecord, packed, read, records_of

RECORDS = st.lists(
    st.builds(
        JournalRecord, st.integers(0, 2**60), st.sampled_from(["pass", "optim_step", "refused"]), st.binary(max_size=40)
    ),
    max_size=5,
)


@settings(max_examples=40)
@given(RECORDS, st.data())
def test_a_log_cut_anywhere_has_the_records_before_the_cut_and_goes_on_behind_them(records, data):
    whole = b"".join(map(packed, records))
    cut = data.draw(st.integers(0, len(whole)))
    ends = [len(b"".join(map(packed, records[:n]))) for n in range(len(records) + 1)]
    kept = sum(end <= cut for end in ends) - 1
    more = JournalRecord(7, "more", b"!")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "log"
        path.write_bytes(whole[:cut])
        assert read(path) == records[:kept]
        journal = Journal(path)
        journal.append(more)
        assert journal.size == path.stat().st_size
        journal.close()
        assert read(path) == [*records[:kept], more]


@settings(max_examples=40)
@given(RECORDS.filter(bool), st.data())
def test_a_changed_byte_is_noticed(records, data):
    whole = bytearray(b"".join(map(packed, records)))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    try:
        found, _ = records_of(bytes(whole))
    except JournalError:
        return
    assert len(found) < len(records)
    assert found == records[: len(found)]


def test_damage_with_records_behind_it_is_an_error(tmp_path):
    first, second = (packed(JournalRecord(n, "pass", b"body")) for n in (1, 2))
    path = tmp_path / "log"
    path.write_bytes(first[:-1] + b"?" + second)
    with pytest.raises(JournalError, match=r"byte 0 .* bytes follow"):
        Journal(path)


def test_compacting_drops_records_at_once(tmp_path):
    path = tmp_path / "log"
    journal = Journal(path)
    records = [JournalRecord(n, "pass", b"x" * n) for n in range(6)]
    for record in records:
        journal.append(record)
    before = journal.size
    journal.compact(lambda record: record.number > 3)
    journal.append(JournalRecord(9, "pass", b""))
    journal.close()
    assert [record.number for record in read(path)] == [4, 5, 9]
    assert journal.size < before
    assert [each.name for each in tmp_path.iterdir()] == ["log"]


def test_a_kind_is_short_and_a_log_may_be_missing(tmp_path):
    with pytest.raises(ValueError, match="at most 24"):
        packed(JournalRecord(1, "k" * 25, b""))
    assert read(tmp_path / "none") == []


def test_a_full_disk_leaves_no_half_record(tmp_path, monkeypatch):
    path = tmp_path / "log"
    journal = Journal(path)
    journal.append(JournalRecord(1, "pass", b"one"))
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", _full)
        with pytest.raises(OSError, match="full"):
            journal.append(JournalRecord(2, "pass", b"two"))
    journal.append(JournalRecord(3, "pass", b"three"))
    journal.close()
    assert [record.number for record in read(path)] == [1, 3]


def _full(handle):
    raise OSError("the disk is full")
