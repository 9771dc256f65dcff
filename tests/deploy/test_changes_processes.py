"""Real processes on loopback: sites come and go while the server of a closed-form method stays."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file

import protofed
from protofed.cli.app import main
from protofed.data import load
from protofed.federation import RunFolder

pytest.importorskip("flwr")

if TYPE_CHECKING:
    from benchmarks.loopback import Loopback

ROOT = Path(__file__).parents[2]
OPTIONS = ["--model", "mlp", "--set", "model.hidden=32", "--dtype", "float64"]
DOMAINS = ("mnist", "optdigits", "syn_generated")
SECONDS = 800
"""For what takes a few on an idle machine."""


@pytest.fixture
def federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator["Loopback"]:
    """Three members, of whom two begin."""
    monkeypatch.syspath_prepend(str(ROOT))
    loopback = importlib.import_module("benchmarks.loopback")
    made: Loopback = loopback.Loopback(tmp_path, load("digits", domains=",".join(DOMAINS)), images=60)
    yield made
    made.end()


def begin(federation: "Loopback", method: str, *arguments: str) -> None:
    federation.start_server(method, "--min-sites", "2", "--stay", "3000", *OPTIONS, *arguments)
    for name in DOMAINS[:2]:
        federation.start_site(name)
    federation.wait_until(lambda: (federation.out / "summary.json").exists(), SECONDS)


def come(federation: "Loopback", name: str) -> None:
    federation.start_site(name)
    federation.wait_until(lambda: f"{name}-0" in RunFolder(federation.out).committed_clients(), SECONDS)
    federation.wait_until(lambda: (federation.out / "joined.json").exists(), SECONDS)


def go(federation: "Loopback", name: str, *arguments: str) -> int:
    return main(["forget", str(federation.out), "--client", f"{name}-0", *arguments])


def equals_a_run_of(federation: "Loopback", method: str, *sites: str) -> bool:
    clients = ",".join(f"{name}={int(name in sites)}" for name in DOMAINS)
    options: dict[str, Any] = {"model": "mlp", "set": {"model.hidden": 32}, "dtype": "float64", "engine": "loop"}
    run = protofed.run(
        method, str(federation.data), clients=clients, out=federation.folder / "-".join(sites), **options
    )
    one, other = (load_file(path / "model.safetensors") for path in (federation.out, run.path))
    return all(float((one[name] - other[name]).abs().max()) < 1e-9 for name in other)


@pytest.mark.timeout(2400)
def test_a_site_comes_and_another_is_forgotten_while_the_server_stays(
    federation: "Loopback", capsys: pytest.CaptureFixture[str]
) -> None:
    begin(federation, "protoridge")
    come(federation, "syn_generated")
    assert go(federation, "mnist") == 0
    assert "mnist-0 and its 60 images are removed from the result" in capsys.readouterr().out.replace("\n", " ")
    assert equals_a_run_of(federation, "protoridge", "optdigits", "syn_generated")
    (record,) = json.loads((federation.out / "forgotten.json").read_text())["forgotten"]
    assert record["left"] == ["optdigits-0", "syn_generated-0"]
    # It was told, and ends; the others are still there.
    assert federation.wait("mnist", SECONDS) == 0, federation.log("mnist")
    (told,) = federation.state("mnist").glob("runs/*/forgotten.json")
    assert json.loads(told.read_text())["model_sha256"] == record["model_sha256"]
    assert federation.runs("optdigits")
    assert go(federation, "mnist") == 2
    assert "has sent nothing that is part of the result" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", ["comes", "goes"])
def test_a_server_that_was_killed_goes_on_and_any_order_ends_in_the_same_head(
    federation: "Loopback", first: str
) -> None:
    begin(federation, "fedcof")
    if first == "comes":
        come(federation, "syn_generated")
    else:
        assert go(federation, "mnist") == 0
    federation.kill("server")
    federation.start_server("--resume", "--stay", "3000")
    federation.wait_until(
        lambda: "sites can still join" in federation.log("server").split("sites can still join", 1)[1], SECONDS
    )
    if first == "comes":
        assert go(federation, "mnist") == 0
    else:
        come(federation, "syn_generated")
    assert equals_a_run_of(federation, "fedcof", "optdigits", "syn_generated")
    # In the end everybody keeps what is then the model.
    federation.kill("server")
    federation.start_server("--resume", "--stay", "0")
    assert federation.wait("server", SECONDS) == 0, federation.log("server")
    for name in DOMAINS[1:]:
        assert federation.wait(name, SECONDS) == 0, federation.log(name)
        assert list(federation.state(name).glob("runs/*/model.safetensors"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_site_behind_a_secure_sum_is_not_subtracted(
    federation: "Loopback", capsys: pytest.CaptureFixture[str]
) -> None:
    federation.start_server("fedncm", "--stay", "3000", "--guard", "secure=on", *OPTIONS)
    for name in DOMAINS:
        federation.start_site(name)
    federation.wait_until(lambda: (federation.out / "summary.json").exists(), SECONDS)
    before = (federation.out / "model.safetensors").read_bytes()
    assert go(federation, "mnist") == 2
    assert "no single upload leaves a site" in capsys.readouterr().err.replace("\n", " ")
    assert (federation.out / "model.safetensors").read_bytes() == before
    (state,) = federation.state("mnist").glob("runs/*/clients/mnist-0.*")
    assert go(federation, "mnist", "--state", str(state)) == 0
    assert RunFolder(federation.out).committed_clients() == ["optdigits-0", "syn_generated-0"]
