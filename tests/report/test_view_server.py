"""The viewer's server and its page: for the holder of the key, on loopback, and with nothing beside the runs."""

from __future__ import annotations

import base64
import hashlib
import http.client
import io
import json
import re
import socket
import struct
import threading
import urllib.request
from html import unescape
from html.parser import HTMLParser
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fppo.report
from fppo.commands import cli
from fppo.report import view_page, view_server, viewed
from fppo.report.view_server import Viewed, respond
from fppo.runs.sample_files import SAMPLES
from tests.report import view_runs
from tests.report.view_runs import MARKUP

KEY = "a-key"


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Viewed:
    top = tmp_path_factory.mktemp("runs")
    (top / "secret.txt").write_text("SECRET")
    runs = [view_runs.write_run(top / name, steps=3) for name in ("a", "b")]
    (runs[0] / "secret.txt").write_text("SECRET")
    (runs[0] / SAMPLES / "secret.parquet").write_text("SECRET")
    return Viewed(runs=runs, titles=["a", "b"], key=KEY)


@pytest.mark.parametrize(
    "target", ["/", "", f"/{KEY}", "/wrong/", "//", f"/{KEY}x/states", f"/x/{KEY}/", "/%00/", "http://[/"]
)
def test_nobody_without_the_key_is_served(served, target):
    reply = respond(served, target)
    assert reply.status in (HTTPStatus.FORBIDDEN, HTTPStatus.BAD_REQUEST)
    assert len(reply.body) < 100


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[", "localhost.evil"]
)
def test_a_name_that_leads_here_from_elsewhere_is_refused(served, host):
    assert respond(served, f"/{KEY}/", {"host": host}).status in (HTTPStatus.FORBIDDEN, HTTPStatus.BAD_REQUEST)


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "localhost:1", "[::1]:8000"])
def test_names_of_loopback_are_served(served, host):
    assert respond(served, f"/{KEY}/", {"host": host}).status == HTTPStatus.OK


HOSTILE = [
    *("../../secret.txt", "run/0/../../secret.txt", "run/0/secret.txt", "run/0/samples/../secret.txt"),
    *("run/0/samples/secret", "run/0/samples/000001.parquet/../../secret.txt", "run/0/samples/%2e%2e%2fsecret.txt"),
    *("run/2/index", "run/-1/index", "run/0/samples/1%00", "run/0/samples/\u0661", "run/\u0660/index", "/etc/passwd"),
    *("run/0/samples/", "page", "states/", "metrics.jsonl", "run/0/samples/99999999999999999999999"),
    "run/999999999999999999999/index",
]


@pytest.mark.parametrize("place", HOSTILE)
def test_nothing_but_the_record_is_served(served, place):
    for written in (place, quote(place)):
        reply = respond(served, f"/{KEY}/{written}")
        assert reply.status in (HTTPStatus.NOT_FOUND, HTTPStatus.BAD_REQUEST)
        assert b"SECRET" not in reply.body


@pytest.mark.slow
@given(st.text(max_size=40), st.sampled_from(["", "run/0/", "run/0/samples/", "run/0/index?steps=", "states?known="]))
def test_no_address_raises(served, text, before):
    reply = respond(served, f"/{KEY}/{before}{text}")
    assert b"SECRET" not in reply.body
    assert reply.status in (200, 400, 404)


@given(st.integers(0, 30_000), st.integers(0, 30_000))
def test_ranges_of_a_file_are_its_bytes(served, first, last):
    whole = (served.runs[0] / SAMPLES / "000001.parquet").read_bytes()
    reply = respond(served, f"/{KEY}/run/0/samples/1", {"range": f"bytes={first}-{last}"})
    if first > min(last, len(whole) - 1):
        assert (reply.status, reply.body) == (HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, b"")
    else:
        assert (reply.status, reply.body) == (HTTPStatus.PARTIAL_CONTENT, whole[first : last + 1])
        assert reply.headers["Content-Range"] == f"bytes {first}-{min(last, len(whole) - 1)}/{len(whole)}"


def test_files_indices_and_states(served):
    whole = (served.runs[1] / SAMPLES / "000002.parquet").read_bytes()
    assert respond(served, f"/{KEY}/run/1/samples/2").body == whole
    assert respond(served, f"/{KEY}/run/1/samples/2", {"range": "lines=1-2"}).body == whole
    assert respond(served, f"/{KEY}/run/1/samples/2", {"range": f"bytes={len(whole) - 8}-"}).body == whole[-8:]
    assert respond(served, f"/{KEY}/run/1/samples/9").status == HTTPStatus.NOT_FOUND
    index = pq.read_table(io.BytesIO(respond(served, f"/{KEY}/run/0/index?steps=1,3,9").body))
    assert set(index.column("step").to_pylist()) == {1, 3}
    assert respond(served, f"/{KEY}/run/0/index?steps=1,x").status == HTTPStatus.BAD_REQUEST
    assert respond(served, f"/{KEY}/run/0/index?steps={','.join(map(str, range(65)))}").status == HTTPStatus.BAD_REQUEST
    states = json.loads(respond(served, f"/{KEY}/states").body)
    assert [state["title"] for state in states] == ["a", "b"]
    known = [[states[0]["lines"]["stamp"], 4], None]
    assert respond(served, f"/{KEY}/states?known={quote(json.dumps(known))}").status == HTTPStatus.BAD_REQUEST
    known = json.dumps([[state["lines"]["stamp"], 4] for state in states])
    assert json.loads(respond(served, f"/{KEY}/states?known={quote(known)}").body) == [None, None]


FORBIDDING = {  # of every answer: copies, frames, and other pages
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'",
}


def test_the_server_answers_on_loopback(served):
    running = view_server.server(served, 0)
    thread = threading.Thread(target=running.serve_forever, args=(0.01,))
    thread.start()
    try:
        host, port = running.server_address[:2]
        assert host == "127.0.0.1"
        assert view_server.address_of(served, running) == f"http://127.0.0.1:{port}/{KEY}/"
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", f"/{KEY}/run/0/samples/1", headers={"Range": "bytes=0-3"})
        reply = connection.getresponse()
        assert (reply.status, reply.read(), reply.headers["Content-Length"]) == (206, b"PAR1", "4")
        assert re.fullmatch(r"bytes 0-3/\d+", reply.headers["Content-Range"])
        assert FORBIDDING.items() <= {**reply.headers}.items()
        assert "Access-Control-Allow-Origin" not in reply.headers
        connection.request("GET", "/favicon.ico")  # on the same connection
        reply = connection.getresponse()
        assert (reply.status, len(reply.read()) < 100) == (403, True)
        assert FORBIDDING.items() <= {**reply.headers}.items()
        assert reply.headers["Content-Type"] == "text/plain; charset=utf-8"
        connection.request("POST", f"/{KEY}/states")
        assert connection.getresponse().status == 501
        connection.close()
    finally:
        running.shutdown()
        thread.join()
        running.server_close()


class Scripts(HTMLParser):
    """The scripts of a page by their ids, the other tags, and everything that an attribute could load."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.scripts: dict[str, str] = {}
        self.tags: list[str] = []
        self.loads: list[str] = []
        self._id: str | None = None
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append(tag)
        self.loads += [
            value or "" for name, value in attrs if name in ("src", "href", "action", "style") or name[:2] == "on"
        ]
        if tag == "script":
            self._id = values.get("id") or "main"
            self.scripts[self._id] = ""

    def handle_endtag(self, tag: str) -> None:
        self._id = None if tag == "script" else self._id

    def handle_data(self, data: str) -> None:
        if self._id is not None:
            self.scripts[self._id] += data


def test_an_exported_page_holds_its_runs_and_loads_nothing(tmp_path):
    runs = [view_runs.write_run(tmp_path / name, steps=3) for name in ("a", "<b>&")]
    html = view_page.export(runs, tmp_path / "new" / "page.html", most_bytes=1e9).read_text()
    page = Scripts(html)
    assert page.loads == []
    assert set(page.tags) == {"html", "head", "meta", "title", "style", "body", "noscript", "script"}
    assert MARKUP not in html
    states = json.loads(page.scripts["state"])
    assert [state["title"] for state in states] == ["a", "<b>&"]
    assert states[1] == viewed.state_of(runs[1], "<b>&")
    for number, run in enumerate(runs):
        for step in (1, 2, 3):
            content = base64.b64decode(page.scripts[f"rows-{number}-{step}"])
            assert content == (run / SAMPLES / f"{step:06d}.parquet").read_bytes()
        index = pq.read_table(io.BytesIO(base64.b64decode(page.scripts[f"index-{number}-1"])))
        assert index.num_rows == 24
    policy = unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1])
    digest = base64.b64encode(hashlib.sha256(page.scripts["main"].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    assert "unsafe" not in policy


def test_a_large_run_is_thinned_to_the_megabytes(tmp_path):
    run = view_runs.write_run(tmp_path, steps=9)
    size = max(path.stat().st_size for path in (run / SAMPLES).iterdir())
    page = Scripts(view_page.export([run], tmp_path / "page.html", most_bytes=5 * size).read_text())
    state = json.loads(page.scripts["state"])[0]
    assert [step for step, _ in state["samples"]] == [2, 4, 6, 8, 9]
    assert "this page holds the rows of 5 of 9 steps" in state["notes"]
    assert {name for name in page.scripts if name.startswith("rows")} == {f"rows-0-{step}" for step in (2, 4, 6, 8, 9)}


def test_the_live_page_holds_no_data_and_asks_its_server_alone(served):
    html = respond(served, f"/{KEY}/").body.decode()
    page = Scripts(html)
    assert list(page.scripts) == ["main"]
    assert page.loads == []
    assert "connect-src 'self'" in unescape(html)


def test_the_script_is_built_from_the_sources():
    """`npm run check` compares the bytes; without npm this notices sources that changed since the last build."""
    root = Path(__file__).parent.parent.parent / "viewer"
    built = Path(fppo.report.__file__).parent / "viewer"
    digest = hashlib.sha256()
    for path in sorted(
        [*(root / "src").iterdir(), root / "build.mjs", root / "package-lock.json"], key=lambda x: x.name
    ):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    assert (built / "SOURCES.txt").read_text().split()[0] == digest.hexdigest(), "run `npm run build` in viewer"
    assert "</script" not in (built / "viewer.js").read_text().lower()
    assert "<!--" not in (built / "viewer.js").read_text()
    assert "</style" not in (built / "viewer.css").read_text().lower()
    text = (built / "THIRD_PARTY.txt").read_text()
    for name in ("uplot", "hyparquet", "fzstd", "@tanstack/virtual-core"):
        assert name in text
    for path in (root / "src").iterdir():
        assert len(path.read_text().splitlines()) <= 600, path


def test_no_source_makes_markup_of_text():
    for path in (Path(__file__).parent.parent.parent / "viewer" / "src").glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function", path.read_text()
        ), path


def test_the_command_exports_a_page(tmp_path, capsys):
    run = view_runs.write_run(tmp_path / "run", steps=2)
    page = tmp_path / "page.html"
    assert cli.main(["view", str(run), "--export", str(page)]) == 0
    assert str(page) in capsys.readouterr().out
    assert "rows-0-2" in Scripts(page.read_text()).scripts


def test_ctrl_c_is_the_regular_end_of_the_command(tmp_path, capsys, monkeypatch):
    def interrupted(self: ThreadingHTTPServer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", interrupted)
    run = view_runs.write_run(tmp_path / "run", steps=1)
    keys = set()
    for _ in range(2):
        assert cli.main(["view", str(run)]) == 0
        address = capsys.readouterr().out.split()[0]
        keys |= {re.fullmatch(r"http://127\.0\.0\.1:\d+/([\w-]{24})/", address)[1]}
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give the output_dir of a run"),
        (["nowhere"], "no record of a run"),
        (["{run}", "--export", "{run}"], "is a directory; give the name of a file"),
        (["{run}", "--export", "x.html", "--port", "3"], "has no server"),
        (["{run}", "--export", "x.html", "--export-mb", "-1"], "--export-mb -1.0: must be 0 or more"),
        (["{run}", "--port", "99999999"], "--port 99999999: must be 65535 or less"),
    ],
)
def test_the_command_says_what_is_wrong(tmp_path, capsys, words, said):
    run = view_runs.write_run(tmp_path / "run", steps=1)
    assert cli.main(["view", *(word.format(run=run) for word in words)]) == 2
    assert said in capsys.readouterr().err


def test_a_browser_that_resets_its_connection_is_no_error(served, capfd):
    running = view_server.server(served, 0)
    thread = threading.Thread(target=running.serve_forever, args=(0.01,))
    thread.start()
    try:
        address = running.server_address[:2]
        for sent in (b"", b"GET /", f"GET /{served.key}/ HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()):
            with socket.create_connection(address, 30) as raw:
                raw.sendall(sent)
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets it
        idle = [socket.create_connection(address, 30) for _ in range(80)]
        assert [each.recv(1) for each in idle[:16]] == [b""] * 16  # there are at most 64
        url = view_server.address_of(served, running)
        with urllib.request.urlopen(url, timeout=30) as answer:
            assert answer.status == 200
        for each in idle:
            each.close()
    finally:
        running.shutdown()
        thread.join()
        running.server_close()
    assert capfd.readouterr().err == ""
