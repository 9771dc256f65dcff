"""The runbook is walked: its commands and those of the units, on loopback, with folders in the place of machines.

What only a machine has is left out (accounts, packages), and processes are started and stopped as systemd would.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import protofed
from protofed.data import load

pytest.importorskip("flwr")

from protofed.deploy.programs import free_port

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text()
ROUNDS = 50
STUDY = (
    f'method = "i2pfl"\nmodel = "mlp"\nrounds = {ROUNDS}\nepochs = 20\nbatch = 16\n# small\n[set.model]\nhidden = 32\n'
)
SITES = {"north": "mnist", "south": "optdigits", "west": "syn_generated"}
IMAGES = 120
SECONDS = 900
"""For what takes a few on an idle machine."""
WAITS = 0.1
SERVICE = r"sudo systemctl (start|stop) protofed-server$"


class Machines:
    """An organiser, a server and sites: a folder each, and their processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        self.run = folder / "server" / "run"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        commands = folder / "bin"
        commands.mkdir()
        (commands / "protofed").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m protofed "$@"\n')
        shutil.copy(DEPLOY / "start-server.sh", commands)
        for program in commands.iterdir():
            program.chmod(0o755)
        self._environment = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def here(self, command: str, site: str = "") -> str:
        """A command of the runbook or of a unit, for the folders of this test."""
        places = {
            "federation.example.org:9443": self.address,
            "0.0.0.0:9443": self.address,
            "/opt/protofed/bin/": "",
            "/etc/protofed/study.toml": str(self.folder / "study.toml"),
            "/etc/protofed/policy.toml": str(DEPLOY / "policy.toml"),
            "/etc/protofed/keys": f"keys/sites/{site}",
            "/var/lib/protofed/state": f"{site}/state",
            "/var/lib/protofed": "server",
            "/data/fundus": f"{site}/images.npz",
            "${IMAGES}": f"{site}/images.npz",
        }
        for place, ours in places.items():
            command = command.replace(place, ours)
        return command

    def commands(self, title: str) -> list[str]:
        """Those of a section, but for what only a machine has."""
        text = RUNBOOK.split(f"\n## {title}\n")[1].split("\n## ")[0]
        blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
        lines = [line.strip() for block in blocks for line in block.splitlines()]
        return [line for line in lines if line and (not line.startswith("sudo ") or re.match(SERVICE, line))]

    def give(self, command: str, site: str = "") -> str:
        """Its output; it must succeed."""
        if service := re.match(SERVICE, command):
            {"start": self.start, "stop": self.stop}[service[1]]("server")
            return ""
        words = shlex.split(self.here(command, site))
        done = subprocess.run(
            words, cwd=self.folder, env=self._environment, capture_output=True, text=True, timeout=SECONDS
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self, name: str) -> None:
        """By the command of its unit; as there, it does not wait."""
        unit = DEPLOY / f"protofed-{'server' if name == 'server' else 'site'}.service"
        line = re.search(r"^ExecStart=(.+)$", unit.read_text(), re.MULTILINE)
        assert line is not None
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                shlex.split(self.here(line[1], name)),
                cwd=self.folder,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def stop(self, name: str) -> None:
        """As `systemctl stop` does."""
        self._processes[name].send_signal(signal.SIGTERM)
        self._processes[name].wait(SECONDS)

    def ended(self, name: str) -> int:
        """The exit code of what ends by itself."""
        return self._processes[name].wait(SECONDS)

    def log(self, name: str) -> str:
        """What it has said."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def wait_until(self, happened: Callable[[], bool]) -> None:
        """Until something has happened, while the server is at work."""
        deadline = time.monotonic() + SECONDS
        while not happened():
            assert self._processes["server"].poll() is None, self.log("server")
            assert time.monotonic() < deadline, {name: self.log(name) for name in self._processes}
            time.sleep(WAITS)

    def took_part(self) -> list[set[str]]:
        """The sites whose answers are in every round."""
        rounds = protofed.Run(self.run).rounds if (self.run / "rounds.jsonl").exists() else []
        left_out = [{each["client"] for each in line["events"] if each["event"] == "left out"} for line in rounds]
        return [
            {client.removesuffix("-0") for client in {*line["participants"]} - out}
            for line, out in zip(rounds, left_out, strict=True)
        ]

    def end(self) -> None:
        """End all that is still running."""
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self._processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path)
    digits = load("digits", domains=",".join(SITES.values()))
    (tmp_path / "study.toml").write_text(STUDY)
    for site, domain in SITES.items():
        (tmp_path / site).mkdir()
        arrays = {"classes": np.array(digits.classes)}
        for part in ("train", "test"):
            held = getattr(digits.domains[domain], part)
            some = held.take(np.arange(IMAGES) * len(held) // IMAGES)
            arrays |= {f"x_{part}": some.x.permute(0, 2, 3, 1).numpy(), f"y_{part}": some.y.numpy()}
        np.savez(tmp_path / site / "images.npz", **arrays)
    yield made
    made.end()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_runbook_is_walked(machines: Machines) -> None:
    folder = machines.folder
    keys, check, status = machines.commands("Start")
    machines.give(keys)
    shutil.copytree(folder / "keys" / "server", folder / "server" / "keys")
    assert "Images of north" in machines.give(check, "north")
    for name in ("server", "north", "south"):
        machines.start(name)
    machines.wait_until(lambda: len(machines.took_part()) >= 2)
    assert machines.give(status).count(" yes ") == 2

    (again,) = machines.commands("Add a site")
    machines.give(again)
    shutil.copy(folder / "keys/server/sites/west.pub", folder / "server/keys/sites")
    machines.start("west")
    machines.wait_until(lambda: "west" in machines.took_part()[-1])

    (revoke,) = machines.commands("Revoke")
    machines.give(revoke)
    machines.wait_until(lambda: machines.took_part()[-1] == {"north", "west"})

    stop, copy, start = machines.commands("Back up")
    for command in (stop, copy, start):
        machines.give(command)
    done = len(machines.took_part())
    machines.wait_until(lambda: len(machines.took_part()) > done)

    # An upgrade, in which the disk is lost.
    machines.give(stop)
    machines.give(copy)
    done = len(machines.took_part())
    shutil.rmtree(machines.run)
    for command in machines.commands("Restore"):
        machines.give(command)
    assert machines.ended("server") == 0, machines.log("server")

    rounds = machines.took_part()
    assert (len(rounds), protofed.Run(machines.run).summary["status"]) == (ROUNDS, "complete")
    assert done < ROUNDS, "the run was over before it could be restored"
    assert all(each == {"north", "west"} for each in rounds[done:])
    assert "# small\n" in (machines.run / "config.toml").read_text()
