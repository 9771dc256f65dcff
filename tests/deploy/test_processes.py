"""Real processes on loopback, with TLS and keys: a SuperLink, the server, and sites with their SuperNodes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import protofed
from protofed.data import load
from protofed.testing import results_of

pytest.importorskip("flwr")

from protofed.deploy.keys import make_keys, revoke
from protofed.deploy.programs import free_port

OPTIONS = ["--model", "mlp", "--set", "model.hidden=32"]
DOMAINS = ("mnist", "optdigits", "syn_generated")
IMAGES = 120
SECONDS = 280


class Deployment:
    """A federation's folders and processes; all of them are ended by their ids."""

    def __init__(self, folder: Path, sites: tuple[str, ...]) -> None:
        self.folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        self.keys = folder / "keys"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        make_keys(self.keys, self.address, sites)
        digits = load("digits", domains=",".join(sites))
        (folder / "data").mkdir()
        for name, domain in digits.domains.items():
            parts = {"train": domain.train, "test": domain.test}
            arrays = {f"x_{key}": part.x[:IMAGES].permute(0, 2, 3, 1).numpy() for key, part in parts.items()}
            arrays |= {f"y_{key}": part.y[:IMAGES].numpy() for key, part in parts.items()}
            np.savez(folder / "data" / f"{name}.npz", **arrays, classes=np.array(digits.classes))
            (folder / name).mkdir()
            shutil.copy(folder / "data" / f"{name}.npz", folder / name)

    @property
    def out(self) -> Path:
        return self.folder / "run"

    def server(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = ["server", "--keys", str(self.keys / "server"), "--address", self.address, "--out", str(self.out)]
        return self._start("server", [*command, "--wait", "200", *arguments])

    def site(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = ["site", "--data", str(self.folder / name), "--keys", str(self.keys / "sites" / name)]
        return self._start(name, [*command, "--state", str(self.folder / "state" / name), "--once", *arguments])

    def reference(self, method: str, **options: Any) -> dict[str, Any]:
        given = {"model": "mlp", "set": {"model.hidden": 32}, "engine": "loop", "rounds": 2, **options}
        return results_of(protofed.run(method, str(self.folder / "data"), out=self.folder / "reference", **given).path)

    def results(self) -> dict[str, Any]:
        found = results_of(self.out)
        for state in (self.folder / "state").glob("*/runs/*/clients/*.safetensors"):
            found[f"clients/{state.name}"] = state.read_bytes()
        return found

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def kill(self, name: str) -> None:
        process = self._processes[name]
        process.send_signal(signal.SIGKILL)
        process.wait()

    def wait_for_rounds(self, number: int) -> None:
        file = self.out / "rounds.jsonl"
        deadline = time.monotonic() + SECONDS
        while not file.exists() or file.read_bytes().count(b"\n") < number:
            assert self._processes["server"].poll() is None, self.log("server")
            assert time.monotonic() < deadline, self.log("server")
            time.sleep(0.05)

    def wait(self, name: str) -> int:
        try:
            return self._processes[name].wait(SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{name} does not end:\n{self.log(name)}")

    def end(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            if process.poll() is None:
                process.kill()
                process.wait()

    def _start(self, name: str, arguments: list[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "import sys; from protofed.cli import main; sys.exit(main())", "deploy"]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*command, *arguments], stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
        return self._processes[name]


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Any]:
    made: list[Deployment] = []

    def make(*sites: str) -> Deployment:
        made.append(Deployment(tmp_path, sites))
        return made[-1]

    yield make
    for each in made:
        each.end()


@pytest.mark.timeout(600)
def test_two_sites_equal_a_run_in_one_process_and_an_unknown_key_is_refused(deployment: Any) -> None:
    federation = deployment(*DOMAINS[:2])
    federation.server("i2pfl", "--rounds", "2", *OPTIONS)
    for name in DOMAINS[:2]:
        federation.site(name)
    make_keys(federation.keys, federation.address, ["stranger"])
    (federation.keys / "server/sites/stranger.pub").unlink()  # nobody has told the server
    shutil.copytree(federation.folder / "mnist", federation.folder / "stranger")
    federation.site("stranger")
    expected = federation.reference("i2pfl")
    assert federation.wait("server") == 0, federation.log("server")
    for name in DOMAINS[:2]:
        assert federation.wait(name) == 0, federation.log(name)
    found = federation.results()
    assert found["rounds.jsonl"] == expected["rounds.jsonl"]
    assert sorted(found) == sorted(expected)
    assert [name for name in expected if found[name] != expected[name]] == []
    sent = (federation.folder / "state/mnist/sent.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["kind"] == "train" for line in sent) == 2
    assert not (federation.folder / "state/stranger/sent.jsonl").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_stranger_is_told_that_it_is_one(deployment: Any) -> None:
    federation = deployment("mnist")
    make_keys(federation.keys, federation.address, ["stranger"])
    (federation.keys / "server/sites/stranger.pub").unlink()
    shutil.copytree(federation.folder / "mnist", federation.folder / "stranger")
    federation.server("i2pfl", "--rounds", "1", *OPTIONS)
    federation.site("stranger")
    assert federation.wait("stranger") == 2
    assert "does not know this site's key" in federation.log("stranger")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_site_killed_in_the_first_round(deployment: Any, tmp_path: Path) -> None:
    """As in a run in one process in which that client is left out of that round; then it is back with its memory."""
    plugin = tmp_path / "slowly.py"
    plugin.write_text(SLOWLY)
    federation = deployment(*DOMAINS)
    options = ["--rounds", "3", "--round-timeout", "60", "--plugin", str(plugin), *OPTIONS]
    federation.server("slowly", *options)
    for name in DOMAINS:
        federation.site(name, "--plugin", str(plugin))
    deadline = time.monotonic() + SECONDS
    while "optdigits-0 trains" not in federation.log("optdigits"):
        assert time.monotonic() < deadline, federation.log("server")
        time.sleep(0.05)
    federation.kill("optdigits")
    federation.wait_for_rounds(1)
    federation.site("optdigits", "--plugin", str(plugin))
    assert federation.wait("server") == 0, federation.log("server")
    for name in DOMAINS:
        assert federation.wait(name) == 0, federation.log(name)
    rounds = protofed.Run(federation.out).rounds
    assert [event["client"] for event in rounds[0]["events"] if event["event"] == "left out"] == ["optdigits-0"]
    expected = federation.reference("slowly", rounds=3, plugin=[str(plugin)], set={"model.hidden": 32, "breaks": "on"})
    found = federation.results()
    lines = ("participants", "train_loss", "samples")
    for line, wanted in zip(found["rounds.jsonl"], expected["rounds.jsonl"], strict=True):
        assert [line[key] for key in lines] == [wanted[key] for key in lines]
    differ = [name for name in expected if name != "rounds.jsonl" and found[name] != expected[name]]
    assert differ == []


SLOWLY = '''
import time

from protofed import register
from protofed.method import knob
from protofed.methods.i2pfl import I2PFL


@register("slowly")
class Slowly(I2PFL):
    """I2PFL that takes its time at one client in the first round, or fails there."""

    paper = "for a test"
    breaks: bool = knob("fail instead of taking time", default=False)

    def upload(self, net, data, at):
        if at.client == "optdigits-0" and at.round == 0 and len(data.y) > 2:
            if self.breaks:
                raise ValueError("no luck")
            print("optdigits-0 trains", flush=True)
            time.sleep(20)
        return super().upload(net, data, at)
'''


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_server_is_killed_and_resumed(deployment: Any) -> None:
    federation = deployment(*DOMAINS[:2])
    federation.server("i2pfl", "--rounds", "4", *OPTIONS)
    for name in DOMAINS[:2]:
        federation.site(name)
    federation.wait_for_rounds(2)
    federation.kill("server")
    federation.server("--resume")
    assert federation.wait("server") == 0, federation.log("server")
    expected = federation.reference("i2pfl", rounds=4)
    found = federation.results()
    assert found["rounds.jsonl"] == expected["rounds.jsonl"]
    assert [name for name in expected if found[name] != expected[name]] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_revoked_site_is_shut_out(deployment: Any) -> None:
    federation = deployment(*DOMAINS[:2])
    federation.server("i2pfl", "--rounds", "4", "--round-timeout", "60", *OPTIONS)
    for name in DOMAINS[:2]:
        federation.site(name)
    federation.wait_for_rounds(1)
    revoke(federation.keys, "optdigits")
    assert federation.wait("server") == 0, federation.log("server")
    reasons = [event["reason"] for line in protofed.Run(federation.out).rounds for event in line["events"]]
    assert "it is no member of the federation any more" in reasons
    assert federation.wait("optdigits") == 2
