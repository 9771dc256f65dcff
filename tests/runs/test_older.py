"""Runs that an earlier version has begun go on as it would have gone on with them."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import protofed
from protofed.clients import ClientState
from protofed.records import Nothing, Weights, encode
from protofed.studies.compare import compare


class Stop:
    """Ends a run after its first round."""

    def round_end(self, _run: protofed.Run, _record: dict[str, Any]) -> None:
        raise KeyboardInterrupt


def without_stride(path: Path) -> None:
    """A client's state as it was kept before the optimiser's stride was."""
    tensors = load_file(path)
    kept = {name: value for name, value in tensors.items() if not name.endswith("stride")}
    assert len(kept) < len(tensors)
    named = {part: {} for part in ("params", "stats")}
    for name, value in kept.items():
        if name.startswith("model/"):
            _, part, key = name.split("/", 2)
            named[part][key] = value
    optimizer = {name.removeprefix("optimizer/"): value for name, value in kept.items() if name.startswith("optimizer")}
    path.write_bytes(encode(ClientState(Weights(**named), Nothing(), optimizer), "client").blob)


def test_a_kept_velocity_without_a_stride_goes_on(tiny_run: Any, tmp_path: Path) -> None:
    settings = {"set": {"persist_optimizer": "true"}, "rounds": 3}
    straight = tiny_run("fedavg", **settings)
    with pytest.raises(KeyboardInterrupt):
        tiny_run("fedavg", **settings, callbacks=[Stop()], name="begun")
    for path in (tmp_path / "begun" / "clients").glob("*.safetensors"):
        without_stride(path)
    resumed = protofed.run(out=tmp_path / "begun", resume=True)
    # The stride says nothing about where SGD goes.
    for name, tensor in load_file(straight.path / "model.safetensors").items():
        assert tensor.equal(load_file(resumed.path / "model.safetensors")[name])
    assert resumed.rounds[-1]["accuracy"] == straight.rounds[-1]["accuracy"]


def test_what_is_damaged_otherwise_is_still_refused(tiny_run: Any, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        tiny_run("fedavg", set={"persist_optimizer": "true"}, callbacks=[Stop()], name="begun")
    (first, *_) = sorted((tmp_path / "begun" / "clients").glob("*.safetensors"))
    tensors = load_file(first)
    save_file({name: value for name, value in tensors.items() if "momentum" not in name}, first)
    resumed = protofed.run(out=tmp_path / "begun", resume=True)
    assert [event["client"] for event in resumed.rounds[-1]["events"]] == [first.name.removesuffix(".safetensors")]


@pytest.mark.parametrize("written", ["absent", "null"])
def test_a_run_that_names_no_metric_was_judged_by_accuracy(written: str, tiny_data: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": tiny_data, "rounds": 2, "model": "mlp", "batch": 8, "engine": "loop"}
    compare(["fedavg"], seeds=[0], out=tmp_path / "all", **options)
    (description,) = (tmp_path / "all").glob("**/run.json")
    config = json.loads(description.read_text())
    config["options"].pop("metric")
    if written == "null":
        config["options"]["metric"] = None
    description.write_text(json.dumps(config))
    (description.parent / "summary.json").unlink()
    compare(["fedavg"], seeds=[0], out=tmp_path / "all", **options)
    assert protofed.Run(description.parent).complete
    protofed.run(out=description.parent, resume=True, metric="accuracy")
    with pytest.raises(protofed.UserError, match=r"metric \(was accuracy, now macro_f1\)"):
        protofed.run(out=description.parent, resume=True, metric="macro_f1")
