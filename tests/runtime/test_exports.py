"""Files and directories that are written whole: what is there at any moment, what is listed, and what is refused."""

from __future__ import annotations

import json
import os

import pytest

from fppo.runtime import exports
from fppo.runtime.exports import CONTENTS, adding, check_replaceable, draft_of, replacing, write_whole


def listed(directory):
    return json.loads((directory / CONTENTS).read_text())["files"]


def everything(directory):
    return {
        path.relative_to(directory).as_posix(): path.is_file() and path.read_bytes() for path in directory.rglob("*")
    }


def export(directory, **files):
    with replacing(directory) as draft:
        for name, text in files.items():
            path = draft / name.replace("__", "/").replace("_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def test_a_file_has_its_old_contents_until_it_has_the_new_ones(tmp_path, monkeypatch):
    file, seen = tmp_path / "a.txt", []
    write_whole(file, b"old")
    replace = os.replace

    def watched(draft, target):
        seen.append((file.read_bytes(), draft.read_bytes(), draft.parent == file.parent))
        replace(draft, target)

    monkeypatch.setattr(os, "replace", watched)
    write_whole(file, b"new")
    assert seen == [(b"old", b"new", True)]
    assert everything(tmp_path) == {"a.txt": b"new"}

    def full(draft, target):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        write_whole(file, b"newer")
    assert file.read_bytes() == b"new"


def test_files_of_an_export_may_be_read_by_whoever_may_read_new_files(tmp_path):
    """The library that wrote them may have given them other modes."""
    with replacing(tmp_path / "m") as draft:
        (draft / "sub").mkdir(parents=True)
        for name, mode in (("a.txt", 0o600), ("sub/b.txt", 0o700)):
            (draft / name).touch(mode)
    (tmp_path / "new").touch(0o666)
    mode = (tmp_path / "new").stat().st_mode
    assert {path.stat().st_mode for path in (tmp_path / "m").rglob("*") if path.is_file()} == {mode}


def test_an_export_replaces_an_export_as_a_whole_and_lists_its_files(tmp_path):
    target = tmp_path / "deep" / "m"
    export(target, config_json="1", sub__a_txt="2")
    assert everything(target).keys() == {"config.json", "sub", "sub/a.txt", CONTENTS}
    assert listed(target) == ["config.json", "sub/a.txt"]
    export(target, b_txt="3")
    assert everything(target).keys() == {"b.txt", CONTENTS}
    assert listed(target) == ["b.txt"]
    before = everything(target)

    def fails():
        with replacing(target) as draft:
            assert draft == draft_of(target)
            draft.mkdir()
            (draft / "c.txt").write_text("4")
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert everything(target) == before
    assert [path.name for path in target.parent.iterdir()] == ["m"]


def test_what_comes_meanwhile_is_not_deleted(tmp_path):
    target = tmp_path / "m"
    export(target, a_txt="1")

    def meets_another():
        with replacing(target) as draft:
            draft.mkdir()
            (target / "mine.txt").write_text("mine")

    with pytest.raises(ValueError, match=r"m holds mine\.txt, which saving a model would delete"):
        meets_another()
    assert everything(target).keys() == {"a.txt", "mine.txt", CONTENTS}
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_files_are_added_to_an_export_and_listed_before_they_are_there(tmp_path):
    target = tmp_path / "m"
    export(target, config_json="1")
    for text in ("a card", "another"):  # the second one replaces a file of the export
        with adding(target, ["README.md"]):
            assert listed(target) == ["README.md", "config.json"]
            (target / "README.md").write_text(text)
    assert listed(target) == ["README.md", "config.json"]
    check_replaceable(target)
    (target / "notes.txt").write_text("mine")
    before = everything(target)
    with pytest.raises(ValueError, match=r"m holds notes\.txt already; move that away"), adding(target, ["notes.txt"]):
        pass
    assert everything(target) == before
    with pytest.raises(ValueError, match=r"m holds notes\.txt, which"):
        check_replaceable(target)


def test_a_directory_of_others_is_not_replaced_and_the_first_of_its_files_are_named(tmp_path):
    check_replaceable(tmp_path / "new")
    check_replaceable(tmp_path)
    for name in "dbeac":
        (tmp_path / f"{name}.txt").write_text("")
    with pytest.raises(ValueError, match=r"holds a\.txt, b\.txt, c\.txt and 2 more, which saving"):
        check_replaceable(tmp_path)
    for left, shown in (("abcd", r"a\.txt, b\.txt, c\.txt and 1 more"), ("abc", r"a\.txt, b\.txt, c\.txt")):
        (tmp_path / f"{'abcde'[len(left)]}.txt").unlink()
        with pytest.raises(ValueError, match=rf"holds {shown}, which saving"):
            check_replaceable(tmp_path)
    with pytest.raises(ValueError, match=r"a\.txt is a file, which a model does not replace"):
        check_replaceable(tmp_path / "a.txt")


@pytest.mark.parametrize("text", ["{", "[]", '{"files": 3}', '{"files": [3]}', '{"other": []}'])
def test_where_the_list_is_damaged_files_of_an_export_are_known_by_their_names(tmp_path, text):
    target = tmp_path / "m"
    export(target, config_json="1", model_safetensors="2")
    (target / CONTENTS).write_text(text)
    check_replaceable(target)
    (target / "other.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds other\.txt, which"):
        check_replaceable(target)


def test_what_a_killed_export_left_in_its_draft_is_in_no_later_one(tmp_path):
    target = tmp_path / "m"
    draft_of(target).mkdir()
    (draft_of(target) / "torn.txt").write_text("torn")
    export(target, a_txt="1")
    assert everything(target).keys() == {"a.txt", CONTENTS}
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_link_within_an_export_is_anothers_and_leads_nowhere(tmp_path):
    target, elsewhere = tmp_path / "m", tmp_path / "elsewhere"
    export(target, a_txt="1")
    elsewhere.mkdir()
    (target / "link").symlink_to(elsewhere)
    with pytest.raises(ValueError, match=r"m holds link, which saving a model would delete"):
        check_replaceable(target)
    (target / "link").unlink()
    (target / "empty").mkdir()
    check_replaceable(target)


def test_a_directory_of_others_is_refused_before_anything_is_made(tmp_path):
    target, begun = tmp_path / "m", []
    target.mkdir()
    (target / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"m holds mine\.txt"), replacing(target):
        begun.append(1)
    assert begun == []
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_what_has_a_name_is_on_disk_before_it_and_the_name_after(tmp_path, monkeypatch):
    target, flushed, own = tmp_path / "m", [], os.fsync

    def watched(file):
        flushed.append((os.path.basename(os.readlink(f"/proc/self/fd/{file}")), target.exists()))
        own(file)

    monkeypatch.setattr(os, "fsync", watched)
    export(target, a_txt="1", sub__b_txt="2")
    assert sorted(flushed[:-1]) == [("a.txt", False), ("b.txt", False), (CONTENTS, False)]
    assert flushed[-1] == (tmp_path.name, True)
    flushed.clear()
    with adding(target, ["c.txt", "d.txt"]):
        for name in ("c.txt", "d.txt"):
            (target / name).write_text("3")
    names = [f".{CONTENTS}.new", "m", "c.txt", "d.txt", "m"]
    assert flushed == [(name, True) for name in names]
    opened = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    exports.sync(target)
    assert opened == (len(os.listdir("/proc/self/fd")) if opened else 0)
