"""A whole federation on this machine, as real processes with TLS and keys: for tests/deploy and for soak."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from protofed.data import Dataset
from protofed.deploy.keys import make_keys, server_keys
from protofed.deploy.link import SuperLink
from protofed.deploy.programs import free_port
from protofed.errors import UserError
from protofed.testing import results_of

_TERMINATION_SECONDS = 20.0
_PAUSE = 0.05


class Loopback:
    """Folders and processes of a federation in which every domain of a data set is a site; end it when done."""

    def __init__(self, folder: Path, dataset: Dataset, images: int | None = None) -> None:
        self.folder = folder
        self.sites = tuple(dataset.domains)
        self.address = f"127.0.0.1:{free_port()}"
        self.keys, self.data, self.out = folder / "keys", folder / "data", folder / "run"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        make_keys(self.keys, self.address, self.sites)
        self.data.mkdir()
        for name in self.sites:
            _write(dataset, name, self.data / f"{name}.npz", images)

    def start_server(self, *arguments: str) -> None:
        """Arguments are those of `deploy server`."""
        fixed = ["--keys", str(self.keys / "server"), "--address", self.address, "--out", str(self.out)]
        self._start("server", ["server", *fixed, *arguments])

    def start_site(self, name: str, *arguments: str) -> None:
        """Arguments are those of `deploy site`."""
        fixed = ["--data", str(self.data / f"{name}.npz"), "--keys", str(self.keys / "sites" / name)]
        self._start(name, ["site", *fixed, "--state", str(self.state(name)), "--once", *arguments])

    def state(self, name: str) -> Path:
        """What a site remembers."""
        return self.folder / "state" / name

    def log(self, name: str) -> str:
        """What a party has said."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def runs(self, name: str) -> bool:
        """Whether a party is at work."""
        return name in self._processes and self._processes[name].poll() is None

    def pid(self, name: str) -> int:
        """The process of a party."""
        return self._processes[name].pid

    def kill(self, name: str) -> None:
        """As a power failure would."""
        self._processes[name].send_signal(signal.SIGKILL)
        self._processes[name].wait()

    def rounds(self) -> int:
        """Rounds that are complete."""
        file = self.out / "rounds.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def wait_for_rounds(self, number: int, seconds: float) -> None:
        """Until so many rounds are complete."""
        self.wait_until(lambda: self.rounds() >= number, seconds)

    def wait_until(self, happened: Callable[[], bool], seconds: float) -> None:
        """Until something has happened while the server is at work."""
        deadline = time.monotonic() + seconds
        while not happened():
            if not self.runs("server") or time.monotonic() > deadline:
                raise UserError(f"the server has come to round {self.rounds()}: {self.log('server')}")
            time.sleep(_PAUSE)

    def online(self, name: str) -> bool:
        """Whether the server counts a site among those that are connected."""
        nodes = SuperLink(server_keys(self.keys), self.address).nodes()
        return any(node.online for node in nodes if node.name == name)

    def wait(self, name: str, seconds: float) -> int:
        """The exit code of a party, when it has ended by itself."""
        try:
            return self._processes[name].wait(seconds)
        except subprocess.TimeoutExpired:
            raise UserError(f"{name} does not end: {self.log(name)}") from None

    def results(self) -> dict[str, Any]:
        """What the run has left behind, with the clients' states at the sites, as a run in one process leaves it."""
        results = results_of(self.out)
        for state in (self.folder / "state").glob("*/runs/*/clients/*.safetensors"):
            results[f"clients/{state.name}"] = state.read_bytes()
        return results

    def end(self) -> None:
        """End all that is still running."""
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(_TERMINATION_SECONDS)
            if process.poll() is None:
                process.kill()
                process.wait()

    def _start(self, name: str, arguments: list[str]) -> None:
        command = [sys.executable, "-c", "import sys; from protofed.cli import main; sys.exit(main())", "deploy"]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*command, *arguments], stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )


def _write(dataset: Dataset, name: str, path: Path, images: int | None) -> None:
    """A domain, or some images of it, evenly spaced, as a file of the form that `--data` takes."""
    domain = dataset.domains[name]
    arrays: dict[str, Any] = {"classes": np.array(dataset.classes)}
    for part, held in (("train", domain.train), ("test", domain.test)):
        count = min(images or len(held), len(held))
        some = held.take(torch.arange(count) * len(held) // count)
        arrays[f"x_{part}"], arrays[f"y_{part}"] = some.x.permute(0, 2, 3, 1).numpy(), some.y.numpy()
    np.savez(path, **arrays)
