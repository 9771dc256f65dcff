"""The same work in Flower's simulation (https://flower.ai, on Ray): a process that does a round whenever it is told to.

It trains with the very function of the bare loop. Where Linux allows it, it runs in a network namespace of its own
with nothing but a loopback, so that it cannot talk to anybody.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.bare import train_locally
from protofed.seeding import generator

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_WORK = "PROTOFED_BENCHMARK_WORK"
_ROOT = Path(__file__).parents[1]
_MARK = "@@"


def installed() -> bool:
    """Whether Flower and Ray are here."""
    return find_spec("flwr") is not None and find_spec("ray") is not None


class FlowerSide:
    """The parent's end of a simulation that stays up between rounds, and stands still unless it is its turn.

    Ray's services take about a twentieth of two cores for themselves also when there is nothing to do.
    """

    def __init__(self, work: Path, processes: int) -> None:
        self.start: float = time.perf_counter()
        program = f"from benchmarks.flower import simulate; simulate({processes})"
        environment = {**os.environ, **QUIET, _WORK: str(work), "PYTHONPATH": _search_path()}
        self.process = subprocess.Popen(
            _alone([sys.executable, "-c", program]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        self._round = 0

    def __enter__(self) -> "FlowerSide":
        return self

    def __exit__(self, *_: object) -> None:
        """Closing its input ends it, with everything it has started."""
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        self.process.stdin.close()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def run(self, rounds: int) -> Path:
        """The next rounds; where the model lies after them."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._signal(signal.SIGCONT)
        for _ in range(rounds):
            self.process.stdin.write(f"{self._round}\n")
            self.process.stdin.flush()
            self._round += 1
            for line in self.process.stdout:
                if line.startswith(_MARK):
                    answer = Path(json.loads(line.removeprefix(_MARK))["weights"])
                    break
            else:
                raise RuntimeError("Flower's simulation ended before its round was done")
        self._signal(signal.SIGSTOP)
        return answer

    def _signal(self, number: signal.Signals) -> None:
        """To all its processes; one that has ended meanwhile needs none."""
        for pid in [self.process.pid, *_descendants(self.process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def simulate(processes: int) -> None:
    """The life of the simulation: one round for every line that comes in."""
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client_app, server_app = ClientApp(), ServerApp()

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        return _visit(message, int(context.node_config["partition-id"]))

    @server_app.main()
    def main(grid: Grid, _: Context) -> None:
        work = _work()
        clients = len(work["clients"])
        strategy = FedAvg(
            fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients
        )
        arrays = ArrayRecord(work["model"].state_dict())
        weights = Path(os.environ[_WORK]).with_suffix(".weights")
        for line in sys.stdin:
            config = ConfigRecord({"round": int(line)})
            arrays = strategy.start(grid, arrays, num_rounds=1, train_config=config).arrays
            torch.save(arrays.to_torch_state_dict(), weights)
            print(_MARK + json.dumps({"weights": str(weights)}), flush=True)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": processes}}
    run_simulation(server_app, client_app, len(_work()["clients"]), backend_config=resources)


def _visit(message: Any, position: int) -> Any:
    """What one client does in a round."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    torch.set_num_threads(1)
    work = _work()
    client, indices = list(work["clients"].items())[position]
    x, y = work["normalise"](work["x"][indices], torch.float32), work["y"][indices]
    model = work["model"]
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    order = generator(work["seed"], "order", message.content["config"]["round"], client)
    train_locally(model, x, y, work["epochs"], work["batch"], order, **work["optimizer"])
    answer = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(content=RecordDict(answer), reply_to=message)


def weights_of(path: Path) -> dict[str, Tensor]:
    """The model that the simulation left after a round."""
    return dict(torch.load(path))


def _descendants(parent: int) -> list[int]:
    """All processes that a process has started, and those that they have."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name of the program stands in brackets and may hold anything.
            _, above, *_ = entry.read_text().rpartition(")")[2].split()
            children.setdefault(int(above), []).append(int(entry.parent.name))
    found = children.get(parent, [])
    for child in found:
        found.extend(children.get(child, []))
    return found


@cache
def _work() -> dict[str, Any]:
    """Read once in every process; the images stay in the file's pages, which all processes share."""
    return dict(torch.load(os.environ[_WORK], weights_only=False, mmap=True))


def _alone(command: Sequence[str]) -> list[str]:
    """The command without a network, where that can be had."""
    if not shutil.which("unshare") or not shutil.which("ip"):
        return list(command)
    private = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]
    shell = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    works = subprocess.run([*private, *shell, "true"], capture_output=True, check=False).returncode == 0
    return [*private, *shell, *command] if works else list(command)


def _search_path() -> str:
    return os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
