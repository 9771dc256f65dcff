"""Flower's simulation: bit for bit what the loop gives. Ray opens ports, so it runs where there is only loopback."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from protofed.testing import results_of

pytest.importorskip("ray")

METHODS = ["i2pfl", "fedavg", "conffedproto", "protoridge", "fedcof"]
SCRIPT = """
import json, sys, protofed
for name, method in json.loads(sys.argv[1]).items():
    options = json.loads(sys.argv[2])
    for engine in ("loop", "flower"):
        protofed.run(method, sys.argv[3], out=f"{sys.argv[4]}/{name}-{engine}", engine=engine, **options)
"""


def apart(command: list[str]) -> list[str]:
    """The command in a network of its own, where this user may make one."""
    inside = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    possible = shutil.which("unshare") and not subprocess.run([*inside, "true"], capture_output=True).returncode
    return [*inside, *command] if possible else command


def run_both(methods: dict[str, str], options: dict[str, Any], data: str, out: Path) -> None:
    """Each method, under a name of ours, on both engines."""
    command = [sys.executable, "-c", SCRIPT, json.dumps(methods), json.dumps(options), data, str(out)]
    done = subprocess.run(apart(command), capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_equals_the_loop_on_digits(tmp_path: Path, same_results: Any) -> None:
    options = {"rounds": 2, "model": "mlp", "set": {"model.hidden": 32}, "samples_per_client": 100, "workers": 2}
    run_both({method: method for method in METHODS}, options, "digits", tmp_path)
    for method in METHODS:
        same_results(tmp_path / f"{method}-loop", tmp_path / f"{method}-flower")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_equals_the_loop_where_clients_are_added_up_in_groups(tmp_path: Path, same_results: Any) -> None:
    """The loop adds each group up as it trains it; here every upload travels alone."""
    options = {"rounds": 2, "model": "mlp", "set": {"model.hidden": 8}, "protocol": "iid=200", "workers": 2}
    run_both({"fedavg": "fedavg"}, {**options, "evaluate_every": 2}, "digits", tmp_path)
    same_results(tmp_path / "fedavg-loop", tmp_path / "fedavg-flower")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_plugin_and_a_client_that_fails(tmp_path: Path, tiny_data: str) -> None:
    """The processes of the simulation load the plugin themselves, and a failure is told with its reason."""
    misbehaving = f"{Path(__file__).parents[1] / 'federation' / 'misbehaving.py'}:Breaks"
    options = {"rounds": 2, "model": "mlp", "batch": 8, "set": {"model.hidden": 16, "since": 1}}
    run_both({"breaks": misbehaving}, options, tiny_data, tmp_path)
    loop, flower = (results_of(tmp_path / f"breaks-{engine}") for engine in ("loop", "flower"))
    assert loop == flower
    assert "no luck at b-0" in str(flower["rounds.jsonl"][1]["events"])
