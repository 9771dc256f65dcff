"""The result without a site equals a run without it; what is no sum is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from protofed.cli.app import main
from protofed.errors import UserError
from protofed.inference.forget import forget


def difference(left: Path, right: Path) -> float:
    one, other = load_file(left / "model.safetensors"), load_file(right / "model.safetensors")
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedncm", {}),
        ("fed3r", {}),
        ("fedcgs", {}),
        ("fedcof", {"parts": 2}),
        ("protoridge", {}),
        ("protoridge", {"balance": "domain"}),
        ("protoridge", {"balance": "site", "gram": "sketch"}),
    ],
)
def test_forgetting_equals_a_run_without_the_site(
    method: str, settings: dict[str, Any], make_data: Any, tiny_run: Any, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"set": settings, "dtype": "float64", "data": make_data(absent={"b": [0]})}
    everybody = tiny_run(method, **options)
    others = tiny_run(method, **{**options, "clients": "a=1,b=0,c=1"})
    result = forget(everybody.path, "b-0", out=tmp_path / "left")
    assert difference(tmp_path / "left", others.path) < 1e-9
    assert result.left == ("a-0", "c-0")
    assert result.before != result.after
    theirs = others.summary["accuracy_final"]["global"]
    assert all(result.accuracy["global"][domain] == theirs[domain] for domain in ("a", "c"))
    assert not (tmp_path / "left" / "clients" / "b-0.safetensors").exists()
    record = json.loads((tmp_path / "left" / "forgotten.json").read_text())["forgotten"]
    assert [entry["client"] for entry in record] == ["b-0"]


def test_two_sites_are_forgotten_one_after_the_other(tiny_run: Any, tmp_path: Path) -> None:
    run = tiny_run("protoridge", dtype="float64")
    forget(run.path, "a-0", out=tmp_path / "one")
    forget(tmp_path / "one", "b-0", out=tmp_path / "two")
    forget(run.path, "b-0", out=tmp_path / "three")
    forget(tmp_path / "three", "a-0", out=tmp_path / "four")
    assert difference(tmp_path / "two", tmp_path / "four") < 1e-9
    record = json.loads((tmp_path / "two" / "forgotten.json").read_text())["forgotten"]
    assert [entry["client"] for entry in record] == ["a-0", "b-0"]
    with pytest.raises(UserError, match="sent nothing"):
        forget(tmp_path / "two", "a-0", out=tmp_path / "five")
    with pytest.raises(UserError, match="nobody is left"):
        forget(tmp_path / "two", "c-0", out=tmp_path / "five")


@pytest.mark.parametrize(
    ("method", "options", "reason"),
    [
        ("fedavg", {}, "not a sum over clients.*train again without it"),
        ("fedncm", {"set": {"finetune": 1}}, "finetune=0"),
        ("protoridge", {"set": {"tune": "lam"}}, "tune"),
        ("protoridge", {"robust": "median"}, "is not a sum"),
    ],
)
def test_others_refuse(method: str, options: dict[str, Any], reason: str, tiny_run: Any, tmp_path: Path) -> None:
    run = tiny_run(method, **options)
    with pytest.raises(UserError, match=reason):
        forget(run.path, "a-0", out=tmp_path / "left")
    assert not (tmp_path / "left").exists()


def test_command(tiny_run: Any, tmp_path: Path, capsys: Any) -> None:
    run = tiny_run("fedncm")
    assert main(["forget", str(run.path), "--client", "a-0", "--out", str(tmp_path / "left"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["client"] == "a-0"
    assert record["model_sha256"]["before"] != record["model_sha256"]["after"]
    assert torch.isfinite(load_file(tmp_path / "left" / "model.safetensors")["fc.weight"]).all()
