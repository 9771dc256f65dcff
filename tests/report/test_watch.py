"""The live page: it follows a run, stops it so that it can be resumed, and listens to nobody else."""

import html
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from browser import PROGRAM, WHY_NOT, Tab, started

import protofed
from protofed.federation.lock_holder import LockHolder
from protofed.report.server import ReportServer
from protofed.system import FileLock

LONG = ["--model", "mlp", "--rounds", "100000", "--engine", "loop", "--quiet"]


@contextmanager
def serving(folder: Path) -> Iterator[ReportServer]:
    with ReportServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


@contextmanager
def running(words: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-m", "protofed", *words], stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for_rounds(folder: Path, pattern: str = "rounds.jsonl") -> None:
    deadline = time.monotonic() + 90
    while not any(path.stat().st_size for path in folder.glob(pattern)):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def ask(server: ReportServer, method: str, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=30)
    connection.request(method, path, headers={key.replace("_", "-"): value for key, value in headers.items()})
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), dict(answer.headers)


def test_stopping_leaves_a_run_that_goes_on(tiny_data: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with (
        running(["run", "fedavg", "--data", tiny_data, *LONG, "--out", str(out)]) as process,
        serving(tmp_path) as server,
    ):
        wait_for_rounds(out)
        server.report.folder = out
        status, page, _ = ask(server, "GET", "/")
        assert status == 200
        assert 'id="stop"' in page
        assert f"Finished rounds are kept; protofed run --resume --out {out} continues from there." in page
        assert LockHolder.of(out) is not None
        assert ask(server, "POST", "/stop")[0] == 403, "without the page's token"
        assert ask(server, "POST", "/stop", X_Protofed_Token="guess")[0] == 403
        assert process.poll() is None
        assert ask(server, "POST", "/stop", X_Protofed_Token=server.report.token)[0] == 200
        assert process.wait(60) == 128 + signal.SIGTERM
        status, page, _ = ask(server, "GET", "/")
        assert 'id="stop"' not in page
        assert "--resume" in page
        assert ask(server, "POST", "/stop", X_Protofed_Token=server.report.token)[0] == 409
    done = len(protofed.Run(out).rounds)

    class Enough(Exception):
        pass

    class Once:
        def round_end(self, _run: protofed.Run, record: dict[str, object]) -> None:
            # A round stopped between its line and its checkpoint is done again.
            assert record["round"] in (done, done + 1)
            raise Enough

    with pytest.raises(Enough):
        protofed.run(out=out, resume=True, callbacks=[Once()])


@pytest.mark.slow
def test_stopping_a_comparison_stops_all_of_it(tiny_data: str, tmp_path: Path) -> None:
    out = tmp_path / "cmp"
    words = ["compare", "fedavg", "fedprox", "--data", tiny_data, *LONG, "--out", str(out)]
    with running(words) as process, serving(tmp_path) as server:
        wait_for_rounds(out, "*/rounds.jsonl")
        server.report.folder = out
        page = ask(server, "GET", "/")[1]
        assert "fedavg, seed 0" in page
        assert server.report.stop() == 1
        assert process.wait(60) == 128 + signal.SIGTERM
    assert json.loads((out / "comparison.json").read_text())["complete"] is False


def test_it_listens_to_this_machine_only(tiny_run) -> None:
    run = tiny_run("fedavg")
    with serving(run.path) as server:
        assert server.server_address[0] == "127.0.0.1"
        status, page, headers = ask(server, "GET", "/")
        assert status == 200
        assert "connect-src 'self'" in html.unescape(page)
        assert ask(server, "GET", "/", If_None_Match=headers["ETag"])[0] == 304
        assert ask(server, "GET", "/", Host="evil.example")[0] == 403
        assert ask(server, "POST", "/stop", Host="evil.example", X_Protofed_Token=server.report.token)[0] == 403
        assert ask(server, "GET", "/run.json")[0] == 404
        assert ask(server, "GET", "/../run.json")[0] == 404


def test_a_folder_in_which_nothing_has_begun(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert "Nothing to show yet" in ask(server, "GET", "/")[1]


def test_a_lock_of_the_past_is_nobody(tmp_path: Path) -> None:
    process = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    here = LockHolder.here()
    (tmp_path / ".lock").write_text(here.note())
    assert LockHolder.of(tmp_path) is None, "nobody holds the lock"
    lock = FileLock(tmp_path / ".lock")
    lock.acquire("busy", note=here.note())
    assert LockHolder.of(tmp_path) == here
    for changes in ({"pid": int(process.stdout)}, {"host": "elsewhere"}, {"began": "1"}):
        (tmp_path / ".lock").write_text(json.dumps({**vars(here), **changes}))
        assert LockHolder.of(tmp_path) is None
    lock.release()


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """Somebody else's work, in a group of its own."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("aim", ["group", "process", "parent", "text", "init"])
def test_stop_cannot_be_aimed_at_others(tmp_path: Path, aim: str, bystander: subprocess.Popen[bytes]) -> None:
    """Whoever may write into a shared run folder may not have its reader kill anything."""
    number: object = {"group": -bystander.pid, "text": "1", "init": 1}.get(aim, bystander.pid)
    claim = {"pid": os.getpid() if aim != "process" else number, "answers": number, "host": socket.gethostname()}
    lock = FileLock(tmp_path / ".lock")
    began = Path(f"/proc/{bystander.pid}/stat").read_text().rpartition(")")[2].split()[19]
    for since in ("", began):
        lock.acquire("busy", note=json.dumps({**claim, "began": since}))
        assert LockHolder.of(tmp_path) is None
        with ReportServer(tmp_path) as server:
            assert server.report.stop() == 0
        lock.release()
    assert bystander.poll() is None


def answer_of(server: ReportServer, request: bytes, answers: int = 1) -> bytes:
    """What comes back for raw bytes on one connection."""
    host, port = server.server_address[:2]
    with socket.create_connection((str(host), int(port)), timeout=10) as connection:
        connection.sendall(request.replace(b"PORT", str(port).encode()))
        got = b""
        while got.count(b"HTTP/1.1") < answers or b"\r\n\r\n" not in got:
            piece = connection.recv(65536)
            if not piece:
                break
            got += piece
    return got


@pytest.fixture
def oddly_named(tmp_path: Path) -> Iterator[ReportServer]:
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    folder.mkdir()
    with serving(folder) as server:
        yield server


def test_the_name_of_a_folder_is_text(oddly_named: ReportServer) -> None:
    got = answer_of(oddly_named, b"GET / HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\nConnection: close\r\n\r\n")
    assert b"<img" not in got
    assert b"Content-Security-Policy: default-src 'none'" in got


def test_the_body_of_a_request_is_no_request(oddly_named: ReportServer) -> None:
    """A page elsewhere could else send a second request in the body of the first, with headers of its choice."""
    inner = b"GET / HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\n\r\n"
    port = str(oddly_named.server_address[1]).encode()
    body = inner.replace(b"PORT", port)
    head = b"POST /stop HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\nContent-Length: %d\r\n\r\n" % len(body)
    got = answer_of(oddly_named, head + body + b"GET /end HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 3)
    assert got.count(b"HTTP/1.1 403") == 2
    assert b"HTTP/1.1 200" not in got
    longer = b"POST /stop HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\nContent-Length: 999999999\r\n\r\n"
    assert answer_of(oddly_named, longer + body, 2).count(b"HTTP/1.1") == 1


def test_the_address_is_told_at_once_into_a_pipe(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "protofed", "watch", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], 120)
            assert ready
            assert process.stdout.readline().startswith("http://127.0.0.1:")
        finally:
            process.terminate()


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason=WHY_NOT)
def test_curves_grow_in_the_browser(tiny_data: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with running(["run", "fedavg", "--data", tiny_data, *LONG, "--out", str(out)]) as process:
        wait_for_rounds(out)
        with serving(out) as server, started() as browser:
            tab = Tab(browser)
            tab.open(server.address)
            done = "+document.querySelector('progress').value"
            first = tab.run(done)
            tab.until(f"{done} > {first}")
            tab.until("!!document.querySelector('[data-chart=curves] .line')")
            assert tab.complaints() == []
            assert all(address.startswith(server.address) for address in tab.requests())
            tab.run("document.getElementById('stop').click()")
            assert process.wait(60) == 128 + signal.SIGTERM
            tab.until("!document.getElementById('stop')")
