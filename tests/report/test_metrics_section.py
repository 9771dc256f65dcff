"""Metrics on the page: figures, curves and matrices, and nothing where nothing was kept."""

import re
from pathlib import Path
from typing import Any

import numpy as np

import protofed
from protofed.metrics import PredictedSet, confusion_matrix
from protofed.report import read, render
from protofed.report.metrics_section import _confusion
from protofed.report.wording import headline

TINY: dict[str, Any] = {"model": "mlp", "set": {"model.hidden": 16}, "batch": 8, "engine": "loop", "lr": 0.003}


def section(page: str) -> str:
    found = re.search(r'<section id="metrics".*?</section>', page, re.DOTALL)
    return "" if found is None else found[0]


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


def test_a_run_of_two_classes(noisy_data: str, tmp_path: Path) -> None:
    run = protofed.run("fedavg", noisy_data, out=tmp_path / "run", rounds=2, **TINY)
    page = render(read(run.path))
    shown, metrics = section(page), run.summary["metrics"]
    for part in ("a", "b", "average"):
        figure = metrics["global"][part]["auc"]
        low, high = figure["interval"]
        assert f"{100 * figure['value']:.2f} {100 * low:.1f} to {100 * high:.1f}" in text_of(shown)
    assert shown.count("<svg") == 6, "a reliability curve and a ROC curve for each site"
    assert f"area under the curve fedavg {100 * metrics['global']['a']['auc']['value']:.2f} %" in shown
    assert "class1 counts as positive" in shown
    for own in run.predictions().views["global"].values():
        first = confusion_matrix(own.labels, own.probabilities)[0, 0]
        assert re.search(rf"<td[^>]*>{first}<span" if first else r"<td[^>]*></td>", shown)
    assert "By the model each client would use" not in shown, "it is the server's, on the same images"
    said = " ".join(headline(read(run.path)))
    assert f"its AUC is {100 * metrics['global']['average']['auc']['value']:.2f} %" in said
    assert "fedavg reaches" in said


def test_the_headline_goes_by_the_metric(noisy_data: str, tmp_path: Path) -> None:
    run = protofed.run("fedproto", noisy_data, out=tmp_path / "run", rounds=2, metric="auc", **TINY)
    said = " ".join(headline(read(run.path)))
    average = run.summary["metrics"]["personal"]["average"]["auc"]["value"]
    assert f"By AUC, fedproto reaches {100 * average:.2f} %" in said
    options = {"data": noisy_data, "rounds": 2, "metric": "auc", **TINY}
    compared = protofed.compare(["fedavg", "i2pfl"], out=tmp_path / "cmp", **options)
    averages = {
        name: entry["by_metric"]["global"]["average"]["mean"] for name, entry in compared.content["methods"].items()
    }
    best = max(averages, key=lambda name: averages[name])
    assert f"By AUC, {best} is best on average" in " ".join(headline(read(tmp_path / "cmp")))
    page = text_of(section(render(read(tmp_path / "cmp"))))
    assert "DeLong test on the same test images" in page
    for name in averages:
        assert f"All metrics of {name}" in page


def test_more_classes_have_no_roc_curve(tiny_run: Any) -> None:
    run = tiny_run("fedavg")
    shown = section(render(read(run.path)))
    assert shown.count("<svg") == 3
    assert "ROC" not in shown
    assert "counts as positive" not in shown


def test_a_run_without_predictions_has_no_such_section(tiny_run: Any) -> None:
    run = tiny_run("fedavg")
    (run.path / "predictions.npz").unlink()
    assert section(render(read(run.path))) == ""


def test_names_of_classes_stay_text() -> None:
    own = PredictedSet(np.array([0, 1]), np.eye(2), np.arange(2))
    assert "<b>" not in _confusion("<b>site", own, ["<b>one", "two"])
