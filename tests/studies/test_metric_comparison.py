"""Comparisons and sweeps by a chosen metric."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import protofed
from protofed.cli import main
from protofed.errors import UserError
from protofed.metrics import METRICS, compare_on_images, mcnemar_p
from protofed.runs.opened import Run
from protofed.studies import Comparison

TINY: dict[str, Any] = {"model": "mlp", "rounds": 2, "batch": 8, "engine": "loop", "lr": 0.003}
SETTINGS = {"model.hidden": 16}


@pytest.fixture(scope="module")
def compared(noisy_data: str, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    out = tmp_path_factory.mktemp("by-area") / "cmp"
    return protofed.compare(
        ["fedavg", "i2pfl", "fedproto"],
        out=out, seeds=[0, 1], data=noisy_data, metric="auc", set=SETTINGS, **TINY,
    )  # fmt: skip


def area(run: Run, view: str, part: str) -> float:
    kept = run.predictions()
    assert kept is not None
    own = kept.views[view][part]
    return float(roc_auc_score(own.labels, own.probabilities[:, 1]))


def runs_of(compared: Comparison, method: str) -> list[Run]:
    return [Run(compared.path / name) for name in compared.content["methods"][method]["runs"]]


def test_figures_are_those_of_the_predictions(compared: Comparison) -> None:
    entry = compared.content["methods"]["i2pfl"]["by_metric"]["global"]
    areas = [{part: area(run, "global", part) for part in ("a", "b", "c")} for run in runs_of(compared, "i2pfl")]
    assert entry["average"]["seeds"] == pytest.approx([np.mean(list(each.values())) for each in areas])
    assert entry["parts"]["b"]["mean"] == pytest.approx(np.mean([each["b"] for each in areas]))
    assert entry["parts"]["b"]["interval"][0] <= entry["parts"]["b"]["mean"] <= entry["parts"]["b"]["interval"][1]
    assert entry["worst"]["seeds"] == pytest.approx([min(each.values()) for each in areas])
    assert entry["gap"]["seeds"] == pytest.approx([max(each.values()) - min(each.values()) for each in areas])
    assert compared.content["methods"]["fedproto"]["by_metric"]["global"] is None
    assert compared.content["metric"] == "auc"


def test_the_tests_are_on_the_same_images(compared: Comparison) -> None:
    panels = []
    for method in ("i2pfl", "fedavg"):
        kept = [run.predictions().views["global"] for run in runs_of(compared, method)]
        panels.append({part: [each[part] for each in kept] for part in ("a", "b", "c")})
    entry = compared.content["methods"]["i2pfl"]["by_metric"]["global"]
    expected = compare_on_images(METRICS["auc"], *panels)
    assert entry["test_on_images"] == {**expected, "p_holm": expected["p"]}
    assert entry["test_on_images"]["test"] == "DeLong"
    assert entry["test_on_images"]["images"] == 75
    assert entry["test"]["test"] == "paired t"
    assert compared.content["methods"]["fedavg"]["by_metric"]["global"]["test_on_images"] is None
    personal = {name: compared.content["methods"][name]["by_metric"]["personal"] for name in ("i2pfl", "fedproto")}
    p_values = sorted(each["test_on_images"]["p"] for each in personal.values())
    lowest = min(each["test_on_images"]["p_holm"] for each in personal.values())
    assert lowest == pytest.approx(min(1.0, 2 * p_values[0]))


def test_tables_and_markdown(compared: Comparison) -> None:
    table = compared.by_metric("global")
    assert [row[0] for row in table.rows] == ["fedavg", "i2pfl"]
    mean = compared.content["methods"]["i2pfl"]["by_metric"]["global"]["average"]["mean"]
    assert any(f"{100 * mean:.2f} [" in cell for cell in table.rows[1])
    text = (compared.path / "comparison.md").read_text()
    assert "AUC (%) of the final models, global view" in text
    assert "Accuracy" in compared.accuracy_table("global").title, "what was there stays"


def test_another_metric_needs_no_new_runs(compared: Comparison, noisy_data: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in compared.path.glob("*/summary.json")}
    again = protofed.compare(
        ["fedavg", "i2pfl", "fedproto"], out=compared.path, seeds=[0, 1], data=noisy_data, set=SETTINGS, **TINY
    )
    assert {path: path.stat().st_mtime_ns for path in compared.path.glob("*/summary.json")} == before
    assert again.content["metric"] == "accuracy"
    areas = compared.content["methods"]["fedavg"]["by_metric"]["global"]["average"]
    assert again.content["methods"]["fedavg"]["by_metric"]["global"]["average"] != areas
    # Accuracy over seeds is the mean of the last rounds, here of both; over images it is that of the final model.
    final = [run.summary["accuracy_final"]["global"]["average"] for run in runs_of(again, "fedavg")]
    assert again.content["methods"]["fedavg"]["by_metric"]["global"]["average"]["seeds"] == pytest.approx(final)


def test_mcnemar_where_there_is_one_seed(noisy_data: str, tmp_path: Path) -> None:
    result = protofed.compare(["fedavg", "i2pfl"], out=tmp_path / "cmp", data=noisy_data, set=SETTINGS, **TINY)
    test = result.content["methods"]["i2pfl"]["by_metric"]["global"]["test_on_images"]
    right = []
    for method in ("i2pfl", "fedavg"):
        (run,) = runs_of(result, method)
        parts = run.predictions().views["global"].values()
        right.append(np.concatenate([each.probabilities.argmax(1) == each.labels for each in parts]))
    assert test["test"] == "exact McNemar"
    assert test["p"] == mcnemar_p(int((right[0] & ~right[1]).sum()), int((~right[0] & right[1]).sum()))


def test_a_metric_that_does_not_fit_is_refused_before_anything_runs(tiny_data: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs two classes"):
        protofed.compare(["fedavg"], out=tmp_path / "cmp", data=tiny_data, metric="sensitivity", set=SETTINGS, **TINY)
    assert not list((tmp_path / "cmp").glob("*/run.json"))
    with pytest.raises(UserError, match="metric"):
        protofed.compare(["fedavg"], out=tmp_path / "cmp", data=tiny_data, metric="nonsense", set=SETTINGS, **TINY)


def test_runs_without_predictions_are_compared_as_before(compared: Comparison, noisy_data: str) -> None:
    """Such as those made before predictions were kept."""
    for file in compared.path.glob("*/predictions.npz"):
        file.rename(file.with_suffix(".away"))
    try:
        result = protofed.compare(
            ["fedavg", "i2pfl", "fedproto"], out=compared.path, seeds=[0, 1], data=noisy_data, set=SETTINGS, **TINY
        )
        assert result.content["methods"]["i2pfl"]["by_metric"] == {"global": None, "personal": None}
        assert result.by_metric("global").rows == []
        assert "over test images" not in result.markdown()
        for entry in result.content["methods"].values():
            del entry["by_metric"]
        del result.content["metric"]
        (compared.path / "comparison.json").write_text(json.dumps(result.content))
        assert Comparison.read(compared.path).by_metric("global").rows == []
        assert main(["report", str(compared.path)]) == 0
    finally:
        for file in compared.path.glob("*/predictions.away"):
            file.rename(file.with_suffix(".npz"))


def test_a_sweep_ranks_by_the_metric(noisy_data: str, tmp_path: Path) -> None:
    options = {**TINY, "data": noisy_data, "set": {**SETTINGS, "data.validation": 0.4}, "metric": "auc"}
    del options["lr"]
    result = protofed.sweep("fedavg", {"lr": [0.0001, 0.003]}, out=tmp_path / "sweep", **options)
    for trial in result.content["trials"]:
        run = Run(tmp_path / "sweep" / trial["runs"][0])
        assert run.options["metric"] == "auc"
        assert trial["validation"]["mean"] == pytest.approx(np.mean([line["validation"] for line in run.rounds]))
    best = result.content["best"]
    run = Run(tmp_path / "sweep" / best["runs"][0])
    assert best["by_metric"]["global"]["average"]["mean"] == pytest.approx(
        np.mean([area(run, "global", part) for part in ("a", "b", "c")])
    )
    assert result.table().title == "AUC (%) on validation data"
    assert "AUC" in result.winner()
