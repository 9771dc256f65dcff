"""Sweeps: what is tried, that only validation data decides, and that nothing is done twice."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import protofed
from protofed import sweep as start_sweep
from protofed.cli import main
from protofed.errors import UserError
from protofed.studies import Sweep
from protofed.studies.sweep import _grid, _parse_axis, _random_trials

TINY: dict[str, Any] = {"model": "mlp", "rounds": 2, "batch": 8, "engine": "loop", "set": {"model.hidden": 16}}


@pytest.fixture
def sweep(tmp_path: Path, tiny_data: str):
    def start(method: str, over: Any, *, name: str = "sweep", **options: Any) -> Sweep:
        settings = {**TINY["set"], **options.pop("set", {})}
        given = {"data": tiny_data, **TINY, **options, "set": settings}
        return start_sweep(method, over, out=tmp_path / name, **given)

    return start


def runs_in(folder: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("*/summary.json")}


# What is tried


def test_a_grid_is_every_combination():
    axes = [_parse_axis("tau=0.1,0.2"), _parse_axis("plan=30,60;10"), _parse_axis("lr=1")]
    assert _grid(axes) == [
        {"tau": "0.1", "plan": "30,60", "lr": "1"},
        {"tau": "0.1", "plan": "10", "lr": "1"},
        {"tau": "0.2", "plan": "30,60", "lr": "1"},
        {"tau": "0.2", "plan": "10", "lr": "1"},
    ]
    with pytest.raises(UserError, match="give --random N"):
        _grid([_parse_axis("lr=0.1..0.2")])


def test_draws_from_ranges():
    axes = [
        _parse_axis("lr=0.001..0.1:log"),
        _parse_axis("beta=-1..1"),
        _parse_axis("batch=8..10:int"),
        _parse_axis("n=1..1000:log:int"),
    ]
    drawn = _random_trials(axes, 300, seed=0)
    rates = [float(trial["lr"]) for trial in drawn]
    assert all(0.001 <= rate <= 0.1 for rate in rates)
    assert 0.35 < np.mean(np.array(rates) < 0.01) < 0.65, "half of them below the geometric middle"
    assert abs(np.mean([float(trial["beta"]) for trial in drawn])) < 0.15
    assert {trial["batch"] for trial in drawn} == {"8", "9", "10"}
    assert 0.35 < np.mean([int(trial["n"]) < math.sqrt(1000) for trial in drawn]) < 0.65


def test_draws_are_repeatable_different_and_begin_alike():
    axes = [_parse_axis("lr=0.001..0.1:log"), _parse_axis("optimizer=sgd,adam")]
    assert _random_trials(axes, 5, seed=0) == _random_trials(axes, 5, seed=0) == _random_trials(axes, 20, seed=0)[:5]
    assert _random_trials(axes, 5, seed=0) != _random_trials(axes, 5, seed=1)
    few = _random_trials([_parse_axis("a=1,2"), _parse_axis("b=1,2")], 10, seed=0)
    assert len(few) == 4, "no combination twice"
    # A hyper-parameter that is added leaves the draws of the others alone.
    more = _random_trials([*axes, _parse_axis("momentum=0..0.9")], 5, seed=0)
    assert [trial["lr"] for trial in more] == [trial["lr"] for trial in _random_trials(axes, 5, seed=0)]


@pytest.mark.parametrize(
    ("over", "options", "text"),
    [
        ([], {}, "nothing to sweep over"),
        (["lam"], {}, "--over takes KEY=V1,V2"),
        (["lam=1,,2"], {}, "is empty"),
        (["nosuch=1,2"], {}, "unknown hyper-parameter"),
        (["seed=1,2"], {}, "unknown hyper-parameter"),
        (["data=a,b"], {}, "unknown hyper-parameter"),
        (["protocol=iid=2"], {}, "unknown hyper-parameter"),
        (["lam=1,x"], {}, "lam=x is not valid"),
        (["lr=0.1,-1"], {}, "lr=-1 is not valid"),
        (["model.nosuch=1,2"], {}, "nosuch"),
        (["data.validation=0.1,0.2"], {}, "judged on the same images"),
        (["lam=1", "lam=2"], {}, "more than once"),
        (["lr=0.1,0.2"], {"lr": 0.1}, "cannot have a fixed value"),
        (["lam=1,2"], {"set": {"lam": 1}}, "cannot have a fixed value"),
        (["lam=1..2"], {}, "give --random N"),
        (["lam=2..1"], {"random": 2}, "larger than the first"),
        (["lam=0..1:log"], {"random": 2}, "above 0"),
        (["lam=a..b"], {"random": 2}, "two numbers"),
        (["batch=1.5..3:int"], {"random": 2}, "whole numbers"),
        (["lam=1,2"], {"random": 0}, "at least 1"),
        (["lam=-1..1"], {"random": 2}, "lam=-1 is not valid"),
        (["lam=1,2"], {"score": "test"}, "unknown score"),
        (["lam=1,2"], {"set": {"data.validation": 0}}, "needs validation data"),
    ],
)
def test_mistakes_show_before_anything_starts(over, options, text, sweep, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=text):
        sweep("fedproto", over, **options)
    assert not (tmp_path / "sweep").exists()


# What decides


def test_a_sweep(sweep, tmp_path: Path) -> None:
    over = {"lam": [0.5, 1], "lr": [0.0001, 0.05], "model.hidden": [8, 16]}
    options = {"rounds": 6, "set": {}}
    with pytest.raises(UserError, match="fixed value"):
        sweep("fedproto", over, **options)
    del over["model.hidden"]
    result = sweep("fedproto", over, **options)
    content = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert content == result.content
    assert content["complete"]
    assert content["validation"] == "0.2"
    assert len(content["trials"]) == 4
    assert sorted(trial["rank"] for trial in content["trials"]) == [1, 2, 3, 4]
    for trial in content["trials"]:
        run = protofed.Run(tmp_path / "sweep" / trial["runs"][0])
        validated = [record["validation"] for record in run.rounds]
        assert trial["validation"]["mean"] == pytest.approx(sum(validated[-5:]) / 5)
        assert run.config["method"]["knobs"]["lam"] == float(trial["settings"]["lam"])
        assert run.config["plan"]["lr"] == float(trial["settings"]["lr"])
        assert set(trial) == {"settings", "validation", "rank", "runs"}, "nothing of the test data"
    best = content["best"]
    assert best["settings"]["lr"] == "0.05"
    tested = protofed.Run(tmp_path / "sweep" / best["runs"][0]).summary["accuracy"]
    assert best["test"]["personal"]["average"]["mean"] == tested["personal"]["average"]
    assert best["test"]["global"] is None
    assert result.table().rows[0][:3] == ["1", best["settings"]["lam"], "0.05"]
    text = (tmp_path / "sweep" / "sweep.md").read_text()
    assert text.count("test data") == 1

    before = runs_in(tmp_path / "sweep")
    by_best = sweep("fedproto", {"lam": [0.5, 1, 2], "lr": [0.0001, 0.05]}, score="best", **options).content
    after = runs_in(tmp_path / "sweep")
    assert before.items() <= after.items()
    assert len(after) == 6
    run = protofed.Run(tmp_path / "sweep" / by_best["best"]["runs"][0])
    assert by_best["best"]["validation"]["mean"] == max(record["validation"] for record in run.rounds)
    expected = run.summary["accuracy_best_validation"]["personal"]["average"]
    assert by_best["best"]["test"]["personal"]["average"]["mean"] == expected


def test_test_data_has_no_say(sweep, make_data) -> None:
    def trials(folder: str, name: str) -> Any:
        found = sweep("fedavg", {"lr": [0.001, 0.02, 0.1]}, data=folder, name=name, rounds=3).content
        return [{**trial, "runs": None} for trial in found["trials"]], found["best"]

    data = make_data()
    honest, best = trials(data, "one")
    for file in Path(data).glob("*.npz"):
        arrays = dict(np.load(file))
        arrays["y_test"] = (arrays["y_test"] + 1) % 4
        np.savez(file, **arrays)
    fooled, fooled_best = trials(data, "two")
    assert fooled == honest
    assert fooled_best["settings"] == best["settings"]
    assert fooled_best["test"] != best["test"]


def test_several_seeds(sweep) -> None:
    content = sweep("fedavg", ["lr=0.001,0.05"], seeds=[0, 1], set={"data.validation": 0.3}).content
    assert content["validation"] == "0.3"
    assert [len(trial["validation"]["seeds"]) for trial in content["trials"]] == [2, 2]
    assert len(content["best"]["test"]["global"]["average"]["seeds"]) == 2


def test_random_search_goes_on_where_it_stopped(sweep, tmp_path: Path) -> None:
    over = ["lr=0.001..0.1:log", "epochs=1,2"]
    first = sweep("fedavg", over, random=2)
    before = runs_in(tmp_path / "sweep")
    second = sweep("fedavg", over, random=3)
    assert [trial["settings"] for trial in second.content["trials"]][:2] == [
        trial["settings"] for trial in first.content["trials"]
    ]
    assert before.items() <= runs_in(tmp_path / "sweep").items()
    assert len(runs_in(tmp_path / "sweep")) == 3


def test_no_winner_before_all_trials_are_done(sweep) -> None:
    first = sweep("fedavg", ["lr=0.001,0.05"], shard="1/2")
    assert first.content["best"] is None
    assert "no winner yet" in first.winner()
    assert first.missing() == ["lr=0.05, seed 0: not done yet"]
    assert sweep("fedavg", ["lr=0.001,0.05"], shard="2/2").content["best"] is not None


def test_a_trial_that_fails_loses(tiny_data: str, tmp_path: Path, capfd) -> None:
    (tmp_path / "fragile.py").write_text(
        "from protofed import knob\n"
        "from protofed.methods.fedavg import FedAvg\n"
        "class Fragile(FedAvg):\n"
        "    '''Fails where it is asked to.'''\n"
        "    fails: bool = knob('whether to fail', default=False)\n"
        "    def aggregate(self, server, total, at):\n"
        "        if self.fails and at.round == 1 and at.participants:\n"
        "            raise ZeroDivisionError('as asked')\n"
        "        return super().aggregate(server, total, at)\n"
    )
    words = ["sweep", f"{tmp_path}/fragile.py:Fragile", "--over", "fails=off,on", "--data", tiny_data, "--rounds", "2"]
    words += ["--model", "mlp", "--batch", "8", "--engine", "loop", "--out", str(tmp_path / "sweep")]
    assert main(words) == 1
    shown = capfd.readouterr()
    assert "error: fails=on, seed 0: ZeroDivisionError: as asked" in shown.err
    assert "best: fails=off; on test data" in shown.out
    assert "validation" in shown.out
    assert "accuracy" not in shown.out.split("Accuracy")[0], "test accuracy is not shown on the way"
    assert main([*words[:3], "fails=off", *words[4:], "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["best"]["settings"] == {"fails": "off"}
