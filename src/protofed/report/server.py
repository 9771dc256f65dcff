"""The page of a folder, live: a server for this machine only, which renders anew whenever the folder has changed."""

import secrets
from collections.abc import Callable
from functools import cached_property
from hashlib import blake2b
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from protofed.errors import UserError
from protofed.federation.lock_holder import LockHolder
from protofed.pages.frame import framed
from protofed.pages.markup import tag
from protofed.report.content import read
from protofed.report.page import Live, render
from protofed.text import printable

_HOST = "127.0.0.1"
_WATCHED = ("run.json", "rounds.jsonl", "summary.json", "comparison.json", ".lock")
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Whatever a page holds, it loads nothing and tells nobody."""
_NO_SCRIPT = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Of an answer that is not the page."""
_LARGEST_BODY = 2**16


class LiveReport:
    """What the server shows, and the one thing it can do: ask the runs to stop."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = secrets.token_urlsafe(24)
        """Known to the page only, so that no other page a browser has open can stop a run."""
        self._lock = Lock()
        self._page: tuple[str, bytes] = ("", b"")

    def page(self) -> tuple[str, bytes]:
        """The page and a tag that changes with it."""
        with self._lock:
            state = self._state()
            if state != self._page[0]:
                self._page = (state, self._render())
            return self._page

    def lock_holders(self) -> set[LockHolder]:
        """The processes that are at work in the folder."""
        holders = (LockHolder.of(path.parent) for path in self._files() if path.name == ".lock")
        return {holder for holder in holders if holder is not None}

    def stop(self) -> int:
        """Ask all running processes to stop; returns how many."""
        holders = {holder.answers: holder for holder in self.lock_holders()}
        for holder in holders.values():
            holder.stop()
        return len(holders)

    def _render(self) -> bytes:
        try:
            return render(read(self.folder), Live(self.token, bool(self.lock_holders()))).encode()
        except UserError as error:
            return _nothing_yet(printable(str(error))).encode()

    def _state(self) -> str:
        """Changes with every file that the page is made of, and when a process starts or stops."""
        digest = blake2b(digest_size=8)
        for path in self._files():
            try:
                about = path.stat()
            except OSError:
                continue
            digest.update(f"{path}|{about.st_size}|{about.st_mtime_ns};".encode())
        digest.update(repr(sorted(holder.pid for holder in self.lock_holders())).encode())
        return digest.hexdigest()

    def _files(self) -> list[Path]:
        """Of a run, of the runs of a comparison, of the comparisons of a reproduction."""
        levels = ("", "*/", "*/*/", "*/*/*/")
        return sorted(path for level in levels for name in _WATCHED for path in self.folder.glob(level + name))


def _nothing_yet(reason: str) -> str:
    """A page that looks again every other second."""
    body = [tag("section", tag("p", reason, class_="lead"), tag("p", "This page looks again every two seconds."))]
    return framed("watch", "Nothing to show yet", [], body, again=2)


class ReportServer(ThreadingHTTPServer):
    """Serves one folder on this machine."""

    daemon_threads = True

    def __init__(self, folder: str | Path, port: int = 0) -> None:
        self.report = LiveReport(Path(folder))
        try:
            super().__init__((_HOST, port), _Handler)
        except OSError as error:
            raise UserError(f"port {port} cannot be used ({error.strerror}); omit --port to get a free one") from None

    @cached_property
    def address(self) -> str:
        """Where a browser finds it."""
        return f"http://{_HOST}:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """The page, or that it has not changed."""
        self._answer(self._get)

    def do_POST(self) -> None:
        """Ask the runs to stop."""
        self._drain()
        self._answer(self._post)

    def _drain(self) -> None:
        """Read what comes with a request: it is of no use, but left unread it would be taken for the next request."""
        length = self.headers.get("Content-Length", "0")
        if length.isdecimal() and int(length) <= _LARGEST_BODY and "Transfer-Encoding" not in self.headers:
            self.rfile.read(int(length))
        else:
            self.close_connection = True

    def _get(self) -> tuple[HTTPStatus, bytes, str]:
        if self.path.partition("?")[0] != "/":
            return HTTPStatus.NOT_FOUND, b"not here", ""
        tag, page = self.server.report.page()
        if self.headers.get("If-None-Match") == f'"{tag}"':
            return HTTPStatus.NOT_MODIFIED, b"", tag
        return HTTPStatus.OK, page, tag

    def _post(self) -> tuple[HTTPStatus, bytes, str]:
        token = self.headers.get("X-Protofed-Token", "")
        if self.path != "/stop":
            return HTTPStatus.NOT_FOUND, b"not here", ""
        if not secrets.compare_digest(token.encode(), self.server.report.token.encode()):
            return HTTPStatus.FORBIDDEN, b"the token of the page is missing", ""
        stopped = self.server.report.stop()
        return (HTTPStatus.OK, b"asked to stop", "") if stopped else (HTTPStatus.CONFLICT, b"nothing is running", "")

    def _answer(self, make: Callable[[], tuple[HTTPStatus, bytes, str]]) -> None:
        # A page of another site may have its own name resolve to this machine; such requests name that site.
        port = self.server.server_address[1]
        if self.headers.get("Host") not in (f"{_HOST}:{port}", f"localhost:{port}"):
            status, content, tag = HTTPStatus.FORBIDDEN, b"ask for 127.0.0.1", ""
        else:
            status, content, tag = make()
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Content-Security-Policy", _POLICY if tag else _NO_SCRIPT)
        self.send_header("Referrer-Policy", "no-referrer")
        if self.close_connection:
            self.send_header("Connection", "close")
        if tag:
            self.send_header("ETag", f'"{tag}"')
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not news."""
