import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import protofed
from protofed.errors import UserError
from protofed.explain import embed
from protofed.explain.embeddings import hausdorff_distance, manifold_distances, mixing, silhouette
from protofed.runs.opened import OpenRun, snapshots_of


def clouds(gap_of_classes: float, gap_of_domains: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    y, domain = np.repeat([0, 1], 60), np.tile(np.repeat([0, 1], 30), 2)
    h = rng.standard_normal((120, 3))
    h[:, 0] += gap_of_classes * y
    h[:, 1] += gap_of_domains * domain
    return h, y, domain


def test_scores_tell_separation_and_mixing() -> None:
    apart, y, domain = clouds(20.0, 0.0)
    assert silhouette(apart, y) > 0.7
    assert mixing(apart, y, domain) == pytest.approx(1.0, abs=0.1)
    split, y, domain = clouds(0.0, 20.0)
    assert silhouette(split, y) < 0.1
    assert mixing(split, y, domain) == 0.0
    assert silhouette(apart, np.zeros(120, dtype=int)) is None
    assert mixing(apart, y, np.zeros(120, dtype=int)) is None


@pytest.mark.parametrize("gap", [0.0, 2.0, 4.0])
def test_mixing_does_not_depend_on_the_number_of_images(gap: float) -> None:
    """A score of nearest neighbours would say 1 as soon as the neighbourhood is the whole class."""
    rng = np.random.default_rng(0)

    def score(each: int) -> float:
        domain = np.arange(2 * each) % 2
        h = rng.normal(size=(2 * each, 3))
        h[:, 0] += gap * domain
        value = mixing(h, np.zeros(2 * each, dtype=int), domain)
        assert value is not None
        return value

    few, many = np.mean([score(4) for _ in range(300)]), np.mean([score(60) for _ in range(5)])
    assert few == pytest.approx(many, abs=0.06)  # three standard errors of the mean of 300
    assert many == pytest.approx(1.0, abs=0.03) if gap == 0 else many < 0.9


def test_mixing_by_hand() -> None:
    """Points at 0, 1 (one domain) and 3, 4 (the other) of a class, and one at 2 of the first domain."""
    h, domain = np.array([[0.0], [1.0], [2.0], [3.0], [4.0]]), np.array([0, 0, 0, 1, 1])
    # 0: own 1, 2, others 3, 4: none nearer. 1: own 1, 1, others 2, 3: none. 2: own 2, 1, others 1, 2: of four pairs one
    # is nearer and two are equal. 3: own 1, others 3, 2, 1: one equal. 4: own 1, others 4, 3, 2: none.
    expected = 2 * (0 + 0 + (1 + 2 / 2) / 4 + (1 / 2) / 3 + 0) / 5
    assert mixing(h, np.zeros(5, dtype=int), domain) == pytest.approx(expected)
    assert mixing(h[[0, 3]], np.zeros(2, dtype=int), domain[[0, 3]]) is None, "nobody has company of its own domain"


def test_hausdorff_distance() -> None:
    one, other = np.array([[0.0, 0.0], [1.0, 0.0]]), np.array([[0.0, 0.0], [4.0, 0.0]])
    assert hausdorff_distance(one, other) == 3.0
    assert hausdorff_distance(other, one) == 3.0
    assert hausdorff_distance(one, one) == 0.0


def test_completion_brings_a_client_nearer_to_the_union(fedmp_run: Path) -> None:
    """FedMP's first lemma, in the smallest: what a client receives are points of the others."""
    found = manifold_distances(OpenRun(fedmp_run, with_data=True))
    entries = [entry for classes in found.values() for entry in classes.values() if entry["after"] is not None]
    assert len(entries) == 8
    assert all(entry["after"] <= entry["before"] for entry in entries)
    assert sum(entry["after"] for entry in entries) < sum(entry["before"] for entry in entries)
    assert found["a-0"]["class2"] == {"before": None, "after": None}  # the client lacks the class


def test_nothing_is_received_before_the_first_round(fedmp_run: Path) -> None:
    found = manifold_distances(OpenRun(fedmp_run, done=0, with_data=True))
    assert all(entry == {"before": None, "after": None} for classes in found.values() for entry in classes.values())


def test_a_folder_of_embeddings(fedmp_run: Path, tmp_path: Path) -> None:
    content = embed([fedmp_run], out=tmp_path / "maps", samples=30, hausdorff=True)
    stored = json.loads((tmp_path / "maps" / "embeddings.json").read_text())
    assert stored == json.loads(json.dumps(content))
    assert [panel["round"] for panel in stored["panels"]] == [0, 1, 2]
    for panel in stored["panels"]:
        assert len(panel["points"]) == len(panel["y"]) == len(panel["domain"]) == stored["samples"]
        assert -1 <= panel["silhouette"] <= 1
    (distances,) = stored["hausdorff"].values()
    assert distances["rounds"] == [0, 1, 2]
    assert distances["after"][0] is None
    assert distances["after"][1] is not None
    for item in stored["items"]:
        assert (tmp_path / "maps" / item["image"]).stat().st_size > 1000
    page = (tmp_path / "maps" / "index.html").read_text()
    assert page.count("<img") == len(stored["items"])
    assert "does not depend on how many images are drawn" in page
    assert [len(table["rows"]) for table in stored["tables"]] == [3, 3]


def test_one_class_by_name_or_number(fedmp_run: Path, tmp_path: Path) -> None:
    named = embed([fedmp_run], out=tmp_path / "a", rounds=[1], label="class1", samples=20)
    numbered = embed([fedmp_run], out=tmp_path / "b", rounds=[1], label="1", samples=20)
    assert set(named["panels"][0]["y"]) == {1}
    assert named["panels"][0]["y"] == numbered["panels"][0]["y"]
    with pytest.raises(UserError, match="unknown class '7'"):
        embed([fedmp_run], out=tmp_path / "c", label="7")


def test_rounds_without_a_snapshot_are_refused(fedmp_run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no snapshot of round 7 \(it has: 0, 1\)"):
        embed([fedmp_run], out=tmp_path / "maps", rounds=[7])


def test_snapshots_are_what_a_shorter_run_leaves(parts_run: Path, tiny_run: Any) -> None:
    assert snapshots_of(parts_run) == [0, 1, 2]
    options = {"snapshot_rounds": "0,1,2", "schedule": "none"}
    long = tiny_run("fedproto_avg", rounds=2, **options)
    short = tiny_run("fedproto_avg", rounds=1)
    for name in ("model.safetensors", "prototypes.safetensors"):
        snapshot = long.path / "snapshots" / "round-1"
        assert (snapshot / name).read_bytes() == (short.path / name).read_bytes()
        assert (long.path / "snapshots" / "round-2" / name).read_bytes() == (long.path / name).read_bytes()
    for client in ("a-0", "b-0", "c-0"):
        left, right = OpenRun(long.path, done=1).model_of(client), OpenRun(short.path).model_of(client)
        for name, tensor in left[0].params().items():
            assert torch.equal(tensor, right[0].params()[name])
    assert not list((long.path / "snapshots" / "round-0" / "clients").iterdir())


def test_snapshots_survive_an_interruption(tiny_run: Any, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    class AfterFirst:
        def round_end(self, run: Any, record: Any) -> None:
            raise Stop

    with pytest.raises(Stop):
        tiny_run("fedavg", rounds=3, snapshot_rounds="0,1,3", name="stopped", callbacks=[AfterFirst()])
    import shutil

    shutil.rmtree(tmp_path / "stopped" / "snapshots" / "round-1")  # as if killed between commit and snapshot
    protofed.run(out=tmp_path / "stopped", resume=True)
    straight = tiny_run("fedavg", rounds=3, snapshot_rounds="0,1,3")
    assert snapshots_of(tmp_path / "stopped") == snapshots_of(straight.path) == [0, 1, 3]
    for done in (0, 1, 3):
        file = f"snapshots/round-{done}/model.safetensors"
        assert (tmp_path / "stopped" / file).read_bytes() == (straight.path / file).read_bytes()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"snapshot_rounds": "0,x"}, "snapshot_rounds=0,x is not valid"),
        ({"snapshot_rounds": "5"}, "names round 5, but there are only 1"),
        ({"project": True}, "moves part prototypes, and fedavg has none"),
    ],
)
def test_impossible_wishes_are_refused(tiny_run: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        tiny_run("fedavg", rounds=1, **options)
