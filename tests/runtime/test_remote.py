"""Folders at a remote address: whole or not there, whatever ends an upload."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from fppo.runtime.remote import Remote, RemoteError, check_address, problem_of_place
from tests import dying

FILES = {"a.bin": b"a" * 100, "inner/b.bin": b"b" * 7}


def _get(remote, folder, target):
    whole = remote.folders("x")[folder]
    remote.get_folder(f"x/{folder}", whole, lambda name: target / name)
    return {path.relative_to(target).as_posix(): path.read_bytes() for path in target.rglob("*") if path.is_file()}


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_a_folder_comes_back_as_it_was_put(tmp_path, scheme):
    remote = Remote.at(f"{scheme}://{tmp_path}/place/")
    (tmp_path / "c").write_bytes(b"c" * 50)
    assert remote.folders("x") == {}
    assert remote.put_folder("x/one", FILES | {"c.bin": tmp_path / "c"}) == 157
    remote.put("x/file", b"12")
    assert list(remote.folders("x")) == ["one"]
    assert remote.sizes("x") == {"file": 2}
    assert _get(Remote.at(remote.address), "one", tmp_path / "got") == FILES | {"c.bin": b"c" * 50}
    remote.put_folder("x/one", {"d": b"d"})  # in its place
    assert _get(remote, "one", tmp_path / "again") == {"d": b"d"}
    remote.remove_folder("x/one")
    remote.remove_folder("x/one")  # which is gone
    assert remote.folders("x") == {}


def _died(work, *given):
    """Whether the work ended since the network was gone."""
    try:
        work(*given)
    except RemoteError as error:
        return "the network is gone" in str(error)
    return False


def test_wherever_an_upload_dies_a_folder_is_whole_or_not_there(tmp_path):
    """Also one that replaces a folder, and one that is removed."""
    for last in range(100):
        place = tmp_path / str(last)
        dying.remote(place).put_folder("x/old", FILES)
        remote = dying.remote(place, last)
        died = _died(remote.put_folder, "x/new", FILES), _died(remote.remove_folder, "x/old")
        found = {name: listed for name, listed in dying.remote(place).folders("x").items() if listed is not None}
        assert died[0] or "new" in found
        for name in found:
            assert _get(dying.remote(place), name, place / f"got_{name}") == FILES
        if not any(died):
            assert list(found) == ["new"]
            return
    pytest.fail("no upload was whole")


@pytest.mark.parametrize("cut", [0, 1, 40, -2])
def test_a_torn_marker_marks_nothing(tmp_path, cut):
    remote = dying.remote(tmp_path)
    remote.put_folder("x/one", FILES)
    marker = tmp_path / "x" / "one" / "complete.json"
    marker.write_bytes(marker.read_bytes()[:cut])
    assert remote.folders("x") == {"one": None}


def test_a_changed_marker_marks_nothing(tmp_path):
    remote = dying.remote(tmp_path)
    remote.put_folder("x/one", FILES)
    marker = tmp_path / "x" / "one" / "complete.json"
    marker.write_bytes(marker.read_bytes().replace(b"[100,", b"[101,"))
    assert remote.folders("x") == {"one": None}


@pytest.mark.parametrize("change", [b"", b"a" * 99, b"a" * 99 + b"b"])
def test_a_file_that_is_not_as_it_was_uploaded_is_refused(tmp_path, change):
    remote = dying.remote(tmp_path)
    remote.put_folder("x/one", FILES)
    (tmp_path / "x" / "one" / "a.bin").write_bytes(change)
    with pytest.raises(RemoteError, match=r"a\.bin"):
        _get(remote, "one", tmp_path / "got")
    assert not (tmp_path / "got" / "a.bin").exists()


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "a\\b", ""])
def test_no_marker_leads_out_of_its_folder(tmp_path, name):
    remote = dying.remote(tmp_path)
    remote.put_folder("x/one", FILES)
    with pytest.raises(RemoteError, match="no file of its folder"):
        remote.get_folder("x/one", {name: (1, "")}, lambda name: tmp_path / "got" / name)


def test_an_operation_that_fails_is_tried_again(tmp_path):
    class Flaky(LocalFileSystem):
        cachable, calls = False, 0

        def pipe_file(self, path, value, mode="overwrite", **how):
            self.calls += 1
            if self.calls <= 2:
                raise TimeoutError("later")
            super().pipe_file(path, value, mode, **how)

    remote = Remote("flaky://x", Flaky(), str(tmp_path), pauses=(0.0, 0.0))
    remote.put_folder("x/one", FILES)
    assert _get(remote, "one", tmp_path / "got") == FILES
    with pytest.raises(RemoteError, match=r"flaky://x: a cannot be written: TimeoutError: later"):
        Remote("flaky://x", Flaky(), str(tmp_path), pauses=(0.0,)).put("a", b"")


def test_no_bucket_is_made():
    class Buckets(MemoryFileSystem):
        cachable = False

        def pipe_file(self, path, value, mode="overwrite", **how):
            if not self.exists("/mine"):
                raise FileNotFoundError("no such bucket")
            super().pipe_file(path, value, mode, **how)

    buckets = Buckets()
    buckets.store, buckets.pseudo_dirs = {}, [""]
    with pytest.raises(RemoteError, match="no such bucket"):
        Remote("b://mine", buckets, "/mine", pauses=()).try_out()
    assert buckets.store == {}
    assert buckets.pseudo_dirs == [""]


def test_a_listing_that_fails_is_no_empty_place(tmp_path):
    with pytest.raises(RemoteError, match="x cannot be listed"):
        dying.remote(tmp_path, 0).folders("x")


def test_what_is_wrong_with_an_address_is_said(tmp_path):
    assert check_address(None) is None
    assert check_address("s3://bucket/run") is None
    assert "give one as s3://bucket/run" in str(check_address("bucket/run"))
    assert "not replaced" in str(check_address("s3://$BUCKET/run"))
    assert problem_of_place("ss3://x/y") == "fsspec knows no ss3://; did you mean s3://?"
    (tmp_path / "file").write_text("mine")
    assert "NotADirectoryError" in str(problem_of_place(f"file://{tmp_path}/file/run"))
    assert problem_of_place(f"file://{tmp_path}/run") is None
    assert list(Path(tmp_path / "run").iterdir()) == []


@pytest.mark.skipif(find_spec("s3fs") is not None, reason="s3fs is installed")
def test_a_missing_package_is_named():
    assert problem_of_place("s3://x/y") == "Install s3fs to access S3"


def test_a_marker_is_json_that_a_user_can_read(tmp_path):
    dying.remote(tmp_path).put_folder("x/one", FILES)
    marker = json.loads((tmp_path / "x" / "one" / "complete.json").read_text())
    assert {name: size for name, (size, _) in marker["files"].items()} == {"a.bin": 100, "inner/b.bin": 7}
