"""Real processes on loopback, with TLS and keys: a SuperLink, the server, and sites with their SuperNodes."""

import importlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import protofed
from protofed.data import load
from protofed.testing import results_of

pytest.importorskip("flwr")

from protofed.deploy.keys import make_keys, revoke

if TYPE_CHECKING:
    from benchmarks.loopback import Loopback

ROOT = Path(__file__).parents[2]
OPTIONS = ["--model", "mlp", "--set", "model.hidden=32"]
DOMAINS = ("mnist", "optdigits", "syn_generated")
IMAGES = 120
SECONDS = 800
"""For what takes a few on an idle machine."""


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT))
    loopback = importlib.import_module("benchmarks.loopback")
    made: list[Loopback] = []

    def make(*sites: str) -> "Loopback":
        made.append(loopback.Loopback(tmp_path, load("digits", domains=",".join(sites)), images=IMAGES))
        return made[-1]

    yield make
    for each in made:
        each.end()


def reference(federation: "Loopback", method: str, **options: Any) -> dict[str, Any]:
    """The same run in one process."""
    given = {"model": "mlp", "set": {"model.hidden": 32}, "engine": "loop", "rounds": 2, **options}
    return results_of(protofed.run(method, str(federation.data), out=federation.folder / "reference", **given).path)


def start_server_and_stranger(federation: "Loopback", *arguments: str) -> None:
    """The stranger has a good key, of which nobody has told the server."""
    make_keys(federation.keys, federation.address, ["stranger"])
    (federation.keys / "server/sites/stranger.pub").unlink()
    federation.start_server(*arguments)
    # Beside the others' data, where the run in one process does not see it.
    shutil.copy(federation.data / "mnist.npz", federation.folder / "stranger.npz")
    federation.start_site("stranger", "--data", str(federation.folder / "stranger.npz"))


@pytest.mark.timeout(1200)
def test_two_sites_equal_a_run_in_one_process_and_an_unknown_key_is_refused(deployment: Any) -> None:
    federation = deployment(*DOMAINS[:2])
    start_server_and_stranger(federation, "i2pfl", "--rounds", "2", *OPTIONS)
    federation.start_site(DOMAINS[0])
    expected = reference(federation, "i2pfl")
    refusal = federation.state("stranger") / "supernode.log"
    federation.wait_until(lambda: refusal.exists() and "Failed to activate SuperNode" in refusal.read_text(), SECONDS)
    federation.kill("stranger")
    federation.start_site(DOMAINS[1])
    assert federation.wait("server", SECONDS) == 0, federation.log("server")
    for name in DOMAINS[:2]:
        assert federation.wait(name, SECONDS) == 0, federation.log(name)
    results = federation.results()
    assert results["rounds.jsonl"] == expected["rounds.jsonl"]
    assert sorted(results) == sorted(expected)
    assert [name for name in expected if results[name] != expected[name]] == []
    sent = (federation.state("mnist") / "sent.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["kind"] == "train" for line in sent) == 2
    assert not (federation.state("stranger") / "sent.jsonl").exists()


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_stranger_is_told_that_it_is_one(deployment: Any) -> None:
    federation = deployment("mnist")
    start_server_and_stranger(federation, "i2pfl", "--rounds", "1", *OPTIONS)
    assert federation.wait("stranger", SECONDS) == 2
    assert "does not know this site's key" in federation.log("stranger")


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_site_killed_in_the_first_round(deployment: Any, tmp_path: Path) -> None:
    """As in a run in one process in which that client is left out of that round; it is back with the next."""
    plugin = tmp_path / "ordeal.py"
    plugin.write_text(ORDEAL)
    federation = deployment(*DOMAINS)
    federation.start_server("ordeal", "--rounds", "3", "--plugin", str(plugin), *OPTIONS)
    for name in DOMAINS:
        federation.start_site(name, "--plugin", str(plugin))
    federation.wait_until(lambda: "optdigits-0 trains" in federation.log("optdigits"), SECONDS)
    federation.kill("optdigits")
    federation.wait_until(lambda: not federation.online("optdigits"), SECONDS)
    federation.start_site("optdigits", "--plugin", str(plugin))
    federation.wait_until(lambda: federation.online("optdigits"), SECONDS)
    (tmp_path / "back").touch()
    assert federation.wait("server", SECONDS) == 0, federation.log("server")
    for name in DOMAINS:
        assert federation.wait(name, SECONDS) == 0, federation.log(name)
    results = federation.results()
    settings = {"model.hidden": 32, "dies": "off"}
    expected = reference(federation, "ordeal", rounds=3, plugin=[str(plugin)], set=settings)
    rounds, wanted = results.pop("rounds.jsonl"), expected.pop("rounds.jsonl")
    events = [[(event["client"], event["event"]) for event in line.pop("events")] for line in rounds]
    assert events == [[("optdigits-0", "left out")], [], []]
    assert events == [[(event["client"], event["event"]) for event in line.pop("events")] for line in wanted]
    assert rounds == wanted
    assert [name for name in expected if results[name] != expected[name]] == []


ORDEAL = '''
import time
from pathlib import Path

from protofed import register
from protofed.method import knob
from protofed.methods.i2pfl import I2PFL


@register("ordeal")
class Ordeal(I2PFL):
    """I2PFL that in the first round waits at one client to be killed, at the others for its return; or fails there."""

    paper = "for a test"
    dies: bool = knob("whether it waits to be killed", default=True)

    def upload(self, net, data, at):
        if at.round == 0 and len(data.y) > 2:
            if at.client == "optdigits-0":
                assert self.dies
                print("optdigits-0 trains", flush=True)
                time.sleep(3600)
            while self.dies and not Path(__file__).with_name("back").exists():
                time.sleep(0.1)
        return super().upload(net, data, at)
'''


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_server_is_killed_and_resumed(deployment: Any) -> None:
    federation = deployment(*DOMAINS[:2])
    federation.start_server("i2pfl", "--rounds", "4", *OPTIONS)
    for name in DOMAINS[:2]:
        federation.start_site(name)
    federation.wait_for_rounds(2, SECONDS)
    federation.kill("server")
    federation.start_server("--resume")
    assert federation.wait("server", SECONDS) == 0, federation.log("server")
    expected = reference(federation, "i2pfl", rounds=4)
    results = federation.results()
    assert results["rounds.jsonl"] == expected["rounds.jsonl"]
    assert [name for name in expected if results[name] != expected[name]] == []


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_revoked_site_is_shut_out(deployment: Any) -> None:
    federation = deployment(*DOMAINS[:2])
    federation.start_server("i2pfl", "--rounds", "4", "--round-timeout", "60", *OPTIONS)
    for name in DOMAINS[:2]:
        federation.start_site(name)
    federation.wait_for_rounds(1, SECONDS)
    revoke(federation.keys, "optdigits")
    assert federation.wait("server", SECONDS) == 0, federation.log("server")
    reasons = [event["reason"] for line in protofed.Run(federation.out).rounds for event in line["events"]]
    assert "it is no longer a member of the federation" in reasons
    sent = [json.loads(line) for line in (federation.state("optdigits") / "sent.jsonl").read_text().splitlines()]
    assert max(line["round"] or 0 for line in sent) < 4
