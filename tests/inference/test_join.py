"""Joining: a newcomer against the broadcast of a complete run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from protofed.errors import UserError
from protofed.inference.addition import AdditionResult
from protofed.inference.forget import forget
from protofed.inference.join import join


@pytest.fixture
def newcomer(make_data: Any) -> str:
    return str(make_data(["d"], name="newcomer"))


def test_a_newcomer_fine_tunes_the_global_model(tiny_run: Any, newcomer: str, tmp_path: Path) -> None:
    run = tiny_run("i2pfl", rounds=4, lr=0.05)
    joined = join(run.path, newcomer, out=tmp_path / "joined", rounds=6)
    assert joined.client == "d-0"
    assert joined.start == "the global model"
    assert joined.target == run.summary["accuracy_final"]["personal"]["average"]
    told = json.loads((tmp_path / "joined/join.json").read_text())
    assert told["rounds"][0]["down"] == (run.path / "broadcast.safetensors").stat().st_size
    assert told["rounds"][0]["up"] > 0
    assert (tmp_path / "joined/model.safetensors").exists()
    if joined.reached is not None:
        assert joined.rounds[-1].round == joined.reached
        assert joined.rounds[-1].accuracy >= joined.target


def test_its_model_goes_on_from_round_to_round(tiny_run: Any, newcomer: str, tmp_path: Path, monkeypatch: Any) -> None:
    """It is not thrown back to the global model, as a client in a round of the run would be."""
    monkeypatch.setattr("protofed.inference.join._average_accuracy", lambda _: 2.0)  # never reached
    run = tiny_run("fedavg", rounds=1)
    one, three = (join(run.path, newcomer, out=tmp_path / f"joined{n}", rounds=n) for n in (1, 3))
    assert one.rounds[0] == three.rounds[0]
    assert one.reached is None
    assert len(three.rounds) == 3
    first, last = ((tmp_path / f"joined{n}/model.safetensors").read_bytes() for n in (1, 3))
    assert first != last


def test_it_stops_when_it_is_as_good_unless_it_goes_to_the_end(
    tiny_run: Any, newcomer: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("protofed.inference.join._average_accuracy", lambda _: 0.0)  # reached at once
    run = tiny_run("fedavg", rounds=1)
    stopped = join(run.path, newcomer, out=tmp_path / "stopped", rounds=3)
    whole = join(run.path, newcomer, out=tmp_path / "whole", rounds=3, to_the_end=True)
    assert [len(stopped.rounds), len(whole.rounds)] == [1, 3]
    assert stopped.reached == whole.reached == 1


def test_snapshots_of_the_run_say_nothing_about_a_newcomer(tiny_run: Any, newcomer: str, tmp_path: Path) -> None:
    run = tiny_run("fedavg", rounds=3, snapshot_rounds="3")
    assert join(run.path, newcomer, out=tmp_path / "joined", rounds=1).rounds


def test_an_architecture_of_its_own(tiny_run: Any, newcomer: str, tmp_path: Path) -> None:
    run = tiny_run("conffedproto", model="mlp,cnn")
    joined = join(run.path, newcomer, out=tmp_path / "joined", model="cnn", rounds=2)
    assert joined.start == "a fresh model"
    with pytest.raises(UserError, match="exchanges weights"):
        join(tiny_run("fedavg").path, newcomer, out=tmp_path / "other", model="cnn")


def test_a_backbone_and_a_fresh_head(tiny_run: Any, newcomer: str, tmp_path: Path) -> None:
    run = tiny_run("i2pfl")
    joined = join(run.path, newcomer, out=tmp_path / "joined", weights=str(run.path / "model.safetensors"), rounds=1)
    assert joined.start == "the given weights"


def test_refusals(tiny_run: Any, make_data: Any, newcomer: str, tmp_path: Path) -> None:
    run = tiny_run("i2pfl")
    with pytest.raises(UserError, match="pick it with --domains"):
        join(run.path, make_data(["d", "e"], name="two"), out=tmp_path / "joined")
    with pytest.raises(UserError, match="the newcomer has the classes"):
        join(run.path, make_data(["d"], name="more", classes=5), out=tmp_path / "joined")
    with pytest.raises(UserError, match="nobody can join this run"):
        join(tiny_run("copa").path, newcomer, out=tmp_path / "joined")
    assert not (tmp_path / "joined").exists()


# Sums


@pytest.fixture
def split_data(make_data: Any, tmp_path: Path) -> tuple[str, str, str]:
    """Three sites, the first two alone, and the third alone: the same images."""
    everybody = Path(make_data(["a", "b", "c"], name="everybody", absent={"c": [0]}))
    folders = []
    for name, domains in (("two", "ab"), ("one", "c")):
        folder = tmp_path / name
        folder.mkdir()
        for domain in domains:
            shutil.copyfile(everybody / f"{domain}.npz", folder / f"{domain}.npz")
        folders.append(str(folder))
    return str(everybody), folders[0], folders[1]


def head_in(folder: Path) -> torch.Tensor:
    model = load_file(folder / "model.safetensors")
    return torch.cat([model[name].flatten() for name in ("fc.weight", "fc.bias")])


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedncm", {}),
        ("fed3r", {}),
        ("fedcgs", {}),
        ("fedcof", {"parts": 2}),
        ("protoridge", {}),
        ("protoridge", {"project": 5, "gram": "none"}),
        ("protoridge", {"balance": "domain"}),
        ("protoridge", {"balance": "site", "gram": "sketch"}),
    ],
)
def test_a_site_that_is_added_was_there_from_the_start(
    method: str, settings: dict[str, Any], split_data: tuple[str, str, str], tiny_run: Any, tmp_path: Path
) -> None:
    everybody, two, third = split_data
    options: dict[str, Any] = {"set": {"data.normalise": "half", **settings}, "dtype": "float64"}
    from_the_start = tiny_run(method, data=everybody, **options)
    host = tiny_run(method, data=two, **options)
    joined = join(host.path, third, out=tmp_path / "joined")
    assert isinstance(joined, AdditionResult)
    assert joined.sites == ("a-0", "b-0", "c-0")
    torch.testing.assert_close(head_in(tmp_path / "joined"), head_in(from_the_start.path), atol=1e-9, rtol=1e-9)
    record = json.loads((tmp_path / "joined" / "joined.json").read_text())["joined"]
    assert [entry["client"] for entry in record] == ["c-0"]
    assert record[0]["model_sha256"]["before"] != record[0]["model_sha256"]["after"]
    # And out again, and in again.
    forget(tmp_path / "joined", "c-0", out=tmp_path / "left")
    torch.testing.assert_close(head_in(tmp_path / "left"), head_in(host.path), atol=1e-9, rtol=1e-9)
    join(tmp_path / "left", third, out=tmp_path / "again")
    torch.testing.assert_close(head_in(tmp_path / "again"), head_in(from_the_start.path), atol=1e-9, rtol=1e-9)
    with pytest.raises(UserError, match="is already in the result"):
        join(tmp_path / "again", third, out=tmp_path / "twice")


def test_what_is_no_sum_refuses_a_site(split_data: tuple[str, str, str], tiny_run: Any, tmp_path: Path) -> None:
    _, two, third = split_data
    for method, settings, reason in (("protoridge", {"tune": "lam"}, "tune"), ("fedncm", {"finetune": 1}, "finetune")):
        host = tiny_run(method, data=two, set=settings)
        with pytest.raises(UserError, match=reason):
            join(host.path, third, out=tmp_path / "joined")
        assert not (tmp_path / "joined").exists()


def test_the_state_of_a_deployed_site_is_handed_over_to_be_forgotten(tiny_run: Any, tmp_path: Path) -> None:
    """The server of a deployment has no states of sites."""
    run = tiny_run("protoridge", dtype="float64")
    forget(run.path, "a-0", out=tmp_path / "left")
    kept = tmp_path / "a-0.safetensors"
    (run.path / "clients" / "a-0.safetensors").rename(kept)
    with pytest.raises(UserError, match="--state"):
        forget(run.path, "a-0", out=tmp_path / "other")
    forget(run.path, "a-0", out=tmp_path / "other", state=kept)
    assert torch.equal(head_in(tmp_path / "other"), head_in(tmp_path / "left"))
    with pytest.raises(UserError, match="not the state of a site"):
        forget(run.path, "a-0", out=tmp_path / "third", state=run.path / "run.json")
