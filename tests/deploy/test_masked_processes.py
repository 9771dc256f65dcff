"""Secure sums between real processes: the server's memory, disk and log hold nobody's upload, and sites may die."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import protofed
from protofed.data import load
from protofed.testing import results_of

pytest.importorskip("flwr")

ROOT = Path(__file__).parents[2]
OPTIONS = ["--model", "mlp", "--set", "model.hidden=32"]
HERE: dict[str, Any] = {"model": "mlp", "set": {"model.hidden": 32}, "engine": "loop"}
SECONDS = 800
WINDOW = 48
"""Bytes that are searched for: a dozen weights in a row."""


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT))
    loopback = importlib.import_module("benchmarks.loopback")
    soak = importlib.import_module("benchmarks.soak")
    made = []

    def make(sites: int) -> Any:
        dataset = load("digits", domains="mnist,optdigits,syn_generated") if sites == 3 else soak.many_sites(sites)
        made.append(loopback.Loopback(tmp_path, dataset, images=120))
        return made[-1]

    yield make
    for each in made:
        each.end()


def processes_below(pid: int) -> list[int]:
    """A process and all that it has started."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # ended meanwhile
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def found_in_memory(pid: int, needles: list[bytes]) -> set[bytes]:
    """Which of the needles the process has in its memory."""
    found: set[bytes] = set()
    regions = Path(f"/proc/{pid}/maps").read_text().splitlines()
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for region in regions:
            span, modes, *_ = region.split()
            begin, end = (int(part, 16) for part in span.split("-"))
            if not modes.startswith("rw"):
                continue
            try:
                memory.seek(begin)
                content = memory.read(end - begin)
            except (OSError, ValueError, OverflowError):
                continue  # unmapped meanwhile, or the kernel's own
            found |= {needle for needle in needles if needle in content}
    return found


def found_on_disk(folders: list[Path], needles: list[bytes]) -> set[bytes]:
    found: set[bytes] = set()
    for path in (file for folder in folders for file in [folder, *folder.rglob("*")] if file.is_file()):
        try:
            content = path.read_bytes()
        except OSError:
            continue
        found |= {needle for needle in needles if needle in content}
    return found


def needles_of(state: Path) -> list[bytes]:
    """What a site's upload looks like: rows of its weights, and of its words on the grid."""
    needles = []
    for path in state.glob("runs/*/clients/*-0.*"):
        tensors = load_file(path)
        needles += [tensor.tobytes() for tensor in tensors.values() if tensor.nbytes > 4 * WINDOW]
    needles += [path.read_bytes() for path in state.glob("runs/*/masked.words")]
    return [needle[len(needle) // 2 : len(needle) // 2 + WINDOW] for needle in needles]


def server_holds(federation: Any, needles: list[bytes]) -> tuple[set[bytes], set[bytes]]:
    """Which needles are in the memory of the server and its SuperLink, and which on its disk or in its log."""
    in_memory: set[bytes] = set()
    for pid in processes_below(federation.pid("server")):
        in_memory |= found_in_memory(pid, needles)
    folders = [federation.out, federation.keys / "server", federation.folder / "server.log"]
    return in_memory, found_on_disk(folders, needles)


def searched(federation: Any, guard: list[str], sites: tuple[str, ...]) -> tuple[set[bytes], set[bytes]]:
    """Two rounds; after the first the server is searched for one site's upload, and for the global model.

    What of the upload is in its memory, and what on its disk.
    """
    federation.start_server("fedavg", "--rounds", "2", *OPTIONS, *guard)
    for name in sites:
        federation.start_site(name)
    federation.wait_until(lambda: bool(list(federation.out.glob("checkpoint/server-*.safetensors"))), SECONDS)
    secret = needles_of(federation.state(sites[1]))
    model = load_file(next(federation.out.glob("checkpoint/server-*.safetensors")))
    public = [tensor.tobytes()[512 : 512 + WINDOW] for tensor in model.values() if tensor.nbytes > 2048]
    assert len(secret) >= 2
    memory, disk = server_holds(federation, [*secret, *public])
    assert memory & set(public), "the search finds what is there"
    assert federation.wait("server", SECONDS) == 0, federation.log("server")
    for name in sites:
        assert federation.wait(name, SECONDS) == 0, federation.log(name)
    return memory & set(secret), disk & set(secret)


@pytest.mark.timeout(1200)
def test_three_sites_equal_a_run_in_one_process_and_the_server_holds_no_upload(deployment: Any) -> None:
    federation = deployment(3)
    memory, disk = searched(federation, ["--guard", "secure=on"], federation.sites)
    assert memory == set()
    assert disk == set()
    given = {**HERE, "rounds": 2}
    alone = protofed.run("fedavg", str(federation.data), out=federation.folder / "alone", guard="secure=on", **given)
    results, expected = federation.results(), results_of(alone.path)
    assert results["model.safetensors"] == expected["model.safetensors"]
    plain = protofed.run("fedavg", str(federation.data), out=federation.folder / "plain", **given)
    mine, theirs = (load_file(run / "model.safetensors") for run in (federation.out, plain.path))
    for name, tensor in theirs.items():
        assert np.abs(mine[name] - tensor).max() < 1e-5  # two rounds on a grid of 32 x 3 / 2^30
    assert all(line["secure"]["up"] > 0 for line in protofed.Run(federation.out).rounds)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_five_sites_hide_from_the_server_what_it_sees_without(deployment: Any) -> None:
    federation = deployment(5)
    memory, disk = searched(federation, ["--guard", "secure=on"], federation.sites)
    assert (memory, disk) == (set(), set())


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_without_secure_sums_the_search_finds_the_upload(deployment: Any) -> None:
    federation = deployment(3)
    memory, disk = searched(federation, [], federation.sites)
    assert memory | disk


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_site_is_killed_at_each_stage(deployment: Any, tmp_path: Path) -> None:
    """A site kills itself at each stage in turn, and is started again each time; no round is lost."""
    federation = deployment(5)
    plugin = tmp_path / "mortal.py"
    plugin.write_text(MORTAL)
    victim, stages = federation.sites[2], ("train", "share", "mask", "unmask")
    federation.start_server("fedavg", "--rounds", "10", "--round-timeout", "25", *OPTIONS, "--guard", "secure=on")
    for name in federation.sites:
        federation.start_site(name, *(["--plugin", str(plugin)] if name == victim else []))
    for _ in stages:
        federation.wait(victim, SECONDS)
        federation.start_site(victim, "--plugin", str(plugin))
    assert federation.wait("server", SECONDS) == 0, federation.log("server")
    left_out = [
        {event["client"] for event in line["events"] if event["event"] == "left out"}
        for line in protofed.Run(federation.out).rounds
    ]
    died = {stage: int((tmp_path / f"died-{stage}").read_text()) for stage in stages}
    assert len(set(died.values())) == len(stages)
    for stage, round in died.items():
        # Whoever has sent its numbers is in the sum; whoever is back before it counts as gone trains after all.
        possible = {"unmask": [set()], "train": [set(), {f"{victim}-0"}]}.get(stage, [{f"{victim}-0"}])
        assert left_out[round] in possible, (stage, left_out)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_server_that_lies_gets_nothing(deployment: Any, tmp_path: Path) -> None:
    """It shows every site a list of that site and one other, whose sum would tell one from the other."""
    plugin = tmp_path / "liar.py"
    plugin.write_text(LIAR)
    federation = deployment(3)
    federation.start_server("fedavg", "--rounds", "1", "--plugin", str(plugin), *OPTIONS, "--guard", "secure=on")
    for name in federation.sites:
        federation.start_site(name)
    assert federation.wait("server", SECONDS) == 2
    assert "a secure sum of 2 sites hides too little" in federation.log("server").replace("\n", " ")
    for name in federation.sites:
        kinds = [json.loads(line)["kind"] for line in (federation.state(name) / "sent.jsonl").read_text().splitlines()]
        assert kinds[-2:] == ["masked train", "refusal"]


LIAR = """
from protofed.deploy import server
from protofed.guards.masking.messages import Roster
from protofed.guards.masking.server_party import ServerParty

server._TRIES = 1
honest = ServerParty.roster


def roster(self, names):
    content = Roster.read(honest(self, names), "liar")
    return content.model_copy(update={"adverts": content.adverts[:2]}).to_bytes()


ServerParty.roster = roster
"""

MORTAL = '''
import os
import signal
from pathlib import Path

from protofed.deploy.masked_site import MaskedUploads

STAGES = ("train", "share", "mask", "unmask")
MARKS = {stage: Path(__file__).with_name(f"died-{stage}") for stage in STAGES}


def mortal(action):
    """The same, but dead at the first stage, after a restart at the second, and so on; never twice in a round."""

    def act(self, request, *arguments):
        stage, round = request.stage, request.session.round
        earlier = STAGES[: STAGES.index(stage)]
        due = not MARKS[stage].exists() and all(MARKS[one].exists() for one in earlier)
        if due and round > 0 and all(int(MARKS[one].read_text()) < round for one in earlier):
            MARKS[stage].write_text(str(round))
            os.kill(os.getpid(), signal.SIGKILL)
        return action(self, request, *arguments)

    return act


MaskedUploads.train = mortal(MaskedUploads.train)
MaskedUploads.go_on = mortal(MaskedUploads.go_on)
'''
