"""The server of the viewer: on loopback alone, for whoever has its key, and with nothing but the record of its runs."""

from __future__ import annotations

import contextlib
import hmac
import json
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import attrs

from fppo._errors import json_of, printable, words_of
from fppo.report import view_page, viewed

LOOPBACK = "127.0.0.1"
_HOSTS = ("127.0.0.1", "localhost", "::1")
_RUN = re.compile(r"run/(\d{1,6})/(index|samples/(\d{1,18}))", re.ASCII)
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})", re.ASCII)
_SILENT = 60  # seconds that a connection may stay without a request
_MOST = 64  # connections
_NONE: Mapping[str, str] = MappingProxyType({})
# no other page may read, frame or embed what is served, and no copy of it stays in the browser
_ALWAYS: Mapping[str, str] = MappingProxyType(
    {
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Content-Security-Policy": "frame-ancestors 'none'",
    }
)


@attrs.frozen
class HttpReply:
    """An answer to a request: its status, the type of its body, and the body."""

    status: HTTPStatus
    kind: str
    body: bytes
    headers: Mapping[str, str] = _NONE


@attrs.frozen(kw_only=True)
class Viewed:
    """The runs that a server shows, and the key that its addresses begin with."""

    runs: Sequence[Path]
    titles: Sequence[str]
    key: str


def respond(served: Viewed, target: str, headers: Mapping[str, str] = _NONE) -> HttpReply:
    """Answer a GET request of `target`, the path and query of an address, with `headers` by their lower-case names.

    Below /KEY/ lie the page, `states` (JSON, what changed since `known`), `run/N/index` (Parquet, the rows of some
    `steps`) and `run/N/samples/STEP` (the file of a step, whole or a range of it); all else is refused.
    """
    try:
        host, address = urlsplit(f"//{headers.get('host', LOOPBACK)}").hostname, urlsplit(target)
    except ValueError:
        return _refused(HTTPStatus.BAD_REQUEST, "not an address")
    if host not in _HOSTS:
        return _refused(HTTPStatus.FORBIDDEN, "this server answers on loopback alone")
    key, slash, place = address.path.removeprefix("/").partition("/")
    if not slash or not hmac.compare_digest(key.encode(), served.key.encode()):
        return _refused(HTTPStatus.FORBIDDEN, "open the address that fppo view printed: it holds a key")
    query = {name: values[-1] for name, values in parse_qs(address.query).items()}
    try:
        return _found(served, place, query, headers)
    except (OSError, ValueError) as error:
        return _refused(HTTPStatus.BAD_REQUEST, printable(str(error), 500))


def _found(served: Viewed, place: str, query: Mapping[str, str], headers: Mapping[str, str]) -> HttpReply:
    if not place:
        return HttpReply(HTTPStatus.OK, "text/html; charset=utf-8", view_page.page(", ".join(served.titles), live=True))
    if place == "states":
        return _states(served, query.get("known", "[]"))
    match = _RUN.fullmatch(place)
    if match is None or int(match[1]) >= len(served.runs):
        return _refused(HTTPStatus.NOT_FOUND, "no such page")
    run = served.runs[int(match[1])]
    if match[3] is None:
        steps = [int(step) for step in query.get("steps", "").split(",") if step]
        if len(steps) > viewed.MOST_STEPS:
            raise ValueError(f"steps: {len(steps)} of them; an index holds up to {viewed.MOST_STEPS}")
        return HttpReply(HTTPStatus.OK, "application/octet-stream", viewed.index_of(run, steps))
    path = viewed.sample_file(run, int(match[3]))
    if path is None:
        return _refused(HTTPStatus.NOT_FOUND, f"the rows of step {int(match[3])} are not kept")
    return _file(path, headers.get("range"))


def _states(served: Viewed, known: str) -> HttpReply:
    """The states of all runs, null where nothing has changed; `known` is a JSON list of (stamp, number of lines) by
    run."""
    before = json_of(known)
    if not isinstance(before, list) or not all(_is_known(each) for each in before):
        raise ValueError("known: not a list of stamps with numbers of lines")
    pairs: list[Any] = [*before, *[None] * len(served.runs)][: len(served.runs)]
    states = [
        viewed.state_of(run, title, None if each is None else (each[0], each[1]))
        for run, title, each in zip(served.runs, served.titles, pairs, strict=True)
    ]
    return HttpReply(HTTPStatus.OK, "application/json", json.dumps(states).encode())


def _is_known(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) and isinstance(entry[1], int)


def _file(path: Path, range_header: str | None) -> HttpReply:
    """A file, or the range of its bytes that a Range header wants."""
    kind = "application/octet-stream"
    with path.open("rb") as file:
        size = file.seek(0, 2)
        match = None if range_header is None else _RANGE.fullmatch(range_header)
        if match is None:  # or a kind of range that is unknown here
            file.seek(0)
            return HttpReply(HTTPStatus.OK, kind, file.read(), {"Accept-Ranges": "bytes"})
        first, last = int(match[1]), min(int(match[2] or size), size - 1)
        if first > last:
            nothing = {"Content-Range": f"bytes */{size}"}
            return HttpReply(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, kind, b"", nothing)
        file.seek(first)
        body = file.read(last - first + 1)
    return HttpReply(HTTPStatus.PARTIAL_CONTENT, kind, body, {"Content-Range": f"bytes {first}-{last}/{size}"})


def _refused(status: HTTPStatus, text: str) -> HttpReply:
    return HttpReply(status, "text/plain; charset=utf-8", f"{text}\n".encode("utf-8", "replace"))


def server(served: Viewed, port: int) -> ThreadingHTTPServer:
    """A server on loopback at `port`; 0: any free one. Raises OSError for a port in use."""

    def answer(target: str, headers: Mapping[str, str]) -> HttpReply:
        return respond(served, target, headers)

    return _Server((LOOPBACK, port), _handler(answer))


class _Server(ThreadingHTTPServer):
    """A server with at most `_MOST` connections, each without a request for at most `_SILENT` seconds.

    For one too many, the connection that has been silent longest is closed. A browser that goes away is no error.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._since: dict[socket.socket, float] = {}  # each connection's last request, the oldest connection first
        self._said = False
        super().__init__(address, handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            request, client = super().get_request()
        except OSError as error:
            if not self._said:
                print(f"no connection can be accepted: {printable(str(error))}", file=sys.stderr, flush=True)
            self._said = True
            time.sleep(0.2)  # else the loop would try again at once
            raise
        self.heard(request)
        return request, client

    def heard(self, request: socket.socket) -> None:
        """Note a new connection, or a request on one."""
        self._since[request] = time.monotonic()

    def service_actions(self) -> None:
        """Close connections that have been silent for too long, or are too many; called between connections."""
        waiting = sorted(self._since.copy().items(), key=lambda each: each[1])
        late = [request for request, since in waiting if time.monotonic() - since > _SILENT]
        for request in {*late, *(request for request, _ in waiting[: max(0, len(waiting) - _MOST)])}:
            self._since.pop(request, None)
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)  # its thread ends then

    def shutdown_request(self, request: Any) -> None:
        self._since.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print a failure on one line, but not that a connection was reset or timed out."""
        error = sys.exception()
        if error is not None and not isinstance(error, ConnectionError | TimeoutError):
            print(f"a request failed: {words_of(error)}", file=sys.stderr, flush=True)


def _handler(answer: Callable[[str, Mapping[str, str]], HttpReply]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        server_version, sys_version = "fppo", ""
        timeout = _SILENT

        def do_GET(self) -> None:
            cast(_Server, self.server).heard(self.connection)
            reply = answer(self.path, {name.lower(): value for name, value in self.headers.items()})
            self.send_response(reply.status)
            for name, value in {**_ALWAYS, **reply.headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Type", reply.kind)
            self.send_header("Content-Length", str(len(reply.body)))
            self.end_headers()
            self.wfile.write(reply.body)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing: an address holds the key."""

    return Handler


def address_of(served: Viewed, running: ThreadingHTTPServer) -> str:
    """The address of the page, with its key."""
    return f"http://{LOOPBACK}:{running.server_address[1]}/{served.key}/"
