"""A pretrained backbone between machines: the server says which, every site takes it from its own package."""

from pathlib import Path
from typing import Any

import pytest
import torch
from local_sites import Federation
from safetensors.torch import load_file

import protofed
from protofed.deploy.census import Census
from protofed.deploy.protocol import RunTerms, fingerprint
from protofed.engines.flower import prepare_flower
from protofed.errors import UserError
from protofed.models.pretrained import PRETRAINED, WeightsPackage, pretrained_hash, read_pretrained
from protofed.runs.options import make_options
from protofed.testing import results_of, toy_data

PACKAGED = {"model": "efficientnet_lite0", "image_size": 32, "rounds": 1, "set": {}}


@pytest.fixture
def hospitals(tmp_path: Path) -> Federation:
    """Two sites with colour images of 32 pixels."""
    pytest.importorskip("flwr")
    prepare_flower()
    federation = Federation(tmp_path, toy_data(tmp_path / "data", ("a", "b"), size=32, channels=3))
    for name in ("a", "b"):
        federation.add(name)
    return federation


def test_equals_a_run_in_one_process_and_only_the_head_travels(hospitals: Federation) -> None:
    run = hospitals.run("fedavg", **PACKAGED)
    here = protofed.run("fedavg", hospitals.data, out=hospitals.folder / "here", engine="loop", batch=8, **PACKAGED)
    expected = {name: value for name, value in results_of(here.path).items() if not name.startswith("clients/")}
    results = results_of(run.path)
    assert [name for name in expected if results[name] != expected[name]] == []
    assert max(map(len, hospitals.grid.carried)) < 30_000
    package = read_pretrained("efficientnet_lite0")
    for path in (hospitals.folder / "state").glob("*/runs/*/model.safetensors"):
        assert torch.equal(load_file(path)["stem.conv.weight"], package["_conv_stem.weight"])
    start = run.config["model"]["start"]
    assert (start["from"], start["train"]) == ("imagenet", "head")
    assert run.options["weights"] == "imagenet"


def test_the_server_resolves_the_network_and_its_size(tmp_path: Path) -> None:
    """Sites with images of different shapes are brought to one by the network that fits the smallest."""
    pytest.importorskip("flwr")
    prepare_flower()
    federation = Federation(tmp_path, str(tmp_path / "data"))
    for name, size, channels in (("a", 48, 1), ("b", 56, 3)):
        toy_data(tmp_path / "data", (name,), size=size, channels=channels, train=4, test=4)
        federation.add(name)
    run = federation.run("fedavg", model=None, rounds=1, set={}, views=1)
    assert run.config["model"]["name"] == "efficientnet_lite0"
    assert run.config["data"]["image_shape"] == [3, 128, 128]
    assert [run.options[name] for name in ("model", "train", "image_size")] == ["efficientnet_lite0", "head", 128]


@pytest.mark.parametrize("problem", ["missing", "damaged", "of another release"])
def test_a_site_whose_package_is_not_the_servers_refuses(
    problem: str, hospitals: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site answers in another world than the server's."""
    package = PRETRAINED["efficientnet_lite0"]
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_weights").mkdir()
    (tmp_path / "broken_weights/weights.pth").write_bytes(b"rubbish")
    stand_in = {
        "missing": WeightsPackage("no_such_weights", "1", "weights.pth", package.sha256),
        "damaged": WeightsPackage("broken_weights", "1", "weights.pth", package.sha256),
        "of another release": WeightsPackage(package.name, package.version, package.file, "0" * 64),
    }[problem]
    told = {"missing": "are missing", "damaged": "are damaged", "of another release": "same --weights"}[problem]

    def elsewhere(envelope: bytes, answer: Any) -> Any:
        with monkeypatch.context() as there:
            there.setattr("protofed.models.pretrained.PRETRAINED", {"efficientnet_lite0": stand_in})
            return answer(envelope)

    hospitals.between("b", elsewhere)
    with pytest.raises(UserError, match=f"the run does not start; b: .*{told}"):
        hospitals.run("fedavg", **PACKAGED)
    assert not (hospitals.folder / "run").exists()


def test_what_is_compared_of_the_weights(tmp_path: Path) -> None:
    file = tmp_path / "own.safetensors"
    file.write_bytes(b"some weights")
    named = make_options({"model": "efficientnet_lite0,efficientnet_lite1", "weights": "imagenet"})
    assert fingerprint(named) == ",".join(map(pretrained_hash, ("efficientnet_lite0", "efficientnet_lite1")))
    assert fingerprint(make_options({"weights": "none"})) is None
    assert fingerprint(make_options({})) is None
    assert len(fingerprint(make_options({"weights": str(file)})) or "") == 64
    with pytest.raises(UserError, match="cannot read the weights"):
        fingerprint(make_options({"weights": str(tmp_path / "absent.safetensors")}))


def test_a_file_of_the_servers_is_never_opened_at_a_site() -> None:
    """Only names of weights that everybody has are taken from the terms."""
    census = Census(("x",), (1, 8, 8), {})
    for sent, taken in (("imagenet", "imagenet"), ("none", "none"), ("/etc/passwd", None)):
        terms = RunTerms("0" * 32, {"weights": sent, "model": "cnn"}, census, None, "0")
        assert terms.options_here().weights == taken
        assert terms.options_here(weights="own.pth").weights == "own.pth"
