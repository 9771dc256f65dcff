"""The live page: it follows a run, stops it so that it can be resumed, and listens to nobody else."""

import html
import http.client
import json
import signal
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
    for changes in ({"pid": int(process.stdout)}, {"host": "elsewhere"}, {"began": "1"}):
        (tmp_path / ".lock").write_text(json.dumps({**vars(here), **changes}))
        assert LockHolder.of(tmp_path) is None
    (tmp_path / ".lock").write_text(json.dumps(vars(here)))
    assert LockHolder.of(tmp_path) == here


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
