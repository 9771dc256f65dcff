"""predictions.npz and the metrics made of it: on every engine, after an interruption, and where there are none."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import balanced_accuracy_score, f1_score, roc_auc_score

import protofed
from protofed.cli import main
from protofed.errors import UserError
from protofed.federation import Federation
from protofed.federation import evaluation as evaluation_module
from protofed.runs import metrics as metrics_module
from protofed.runs.opened import OpenRun, Run

FILE = "predictions.npz"


def predictions_of(run: Run) -> Any:
    kept = run.predictions()
    assert kept is not None
    return kept


def test_they_are_those_the_run_was_scored_by(tiny_run: Any) -> None:
    run = tiny_run("fedavg")
    kept, final = predictions_of(run), run.summary["accuracy_final"]
    dataset = OpenRun(run.path, with_data=True).context.dataset
    assert kept.classes == dataset.classes
    for number, (domain, own) in enumerate(kept.views["global"].items()):
        assert np.array_equal(own.labels, dataset.domains[domain].test.y.numpy())
        assert own.samples.tolist() == list(range(12 * number, 12 * number + 12))
        assert (own.probabilities.argmax(1) == own.labels).mean() == pytest.approx(final["global"][domain])
        np.testing.assert_allclose(own.probabilities.sum(1), 1, rtol=1e-5)
        assert kept.views["personal"][f"{domain}-0"].content == own.content
    with np.load(run.path / FILE, allow_pickle=False) as file:
        assert len(file["labels"]) == 36, "clients with the server's model share its rows"
        assert file["probabilities"].dtype == np.float32


@pytest.mark.parametrize(
    ("method", "options", "views"),
    [
        ("fedproto", {}, ["personal"]),
        ("fedbn", {}, ["personal"]),
        ("fedavg", {"ensemble": True}, ["global", "personal"]),
        ("fedavg", {"protocol": "dirichlet=0.5,clients=4"}, ["global", "personal"]),
        ("centralized", {}, ["global"]),
        ("i2pfl", {"protocol": "leave-out=c"}, ["global", "personal"]),
    ],
)
def test_every_view_has_the_accuracy_of_the_last_round(
    method: str, options: dict[str, Any], views: list[str], tiny_run: Any
) -> None:
    run = tiny_run(method, **options)
    metrics, final = run.summary["metrics"], run.summary["accuracy_final"]
    assert sorted(predictions_of(run).views) == views
    for view in ("global", "personal"):
        assert (metrics[view] is None) == (view not in views)
        for part, scores in (metrics[view] or {}).items():
            if part in final[view]:
                assert scores["accuracy"]["value"] == pytest.approx(final[view][part]), (view, part)
    assert {part for view in views for part in final[view]} - {"held_out"} <= {
        part for view in views for part in metrics[view]
    }


def test_images_that_clients_hold_out_are_numbered_after_the_test_images(tiny_run: Any) -> None:
    run = tiny_run("fedproto", protocol="dirichlet=0.5,clients=4")
    opened = OpenRun(run.path, with_data=True)
    for client, own in predictions_of(run).views["personal"].items():
        places = own.samples - 36
        assert places.tolist() == opened.context.partition.holdout[client].tolist()
        assert own.labels.tolist() == opened.context.dataset.pooled_labels()[places].tolist()


@pytest.mark.parametrize("method", ["fedavg", "fedproto"])
@pytest.mark.parametrize("protocol", ["one-per-domain", "dirichlet=0.5,clients=4"])
def test_engines_predict_the_same(method: str, protocol: str, tiny_run: Any) -> None:
    runs = {engine: tiny_run(method, engine=engine, protocol=protocol) for engine in ("loop", "workers", "vmap")}
    loop = (runs["loop"].path / FILE).read_bytes()
    assert (runs["workers"].path / FILE).read_bytes() == loop
    assert runs["workers"].summary["metrics"] == runs["loop"].summary["metrics"]
    one, other = predictions_of(runs["loop"]), predictions_of(runs["vmap"])
    for view, parts in one.views.items():
        for part, own in parts.items():
            there = other.views[view][part]
            assert np.array_equal(own.samples, there.samples)
            # Stacked kernels add up in another order.
            np.testing.assert_allclose(own.probabilities, there.probabilities, atol=1e-4)


@pytest.mark.slow
def test_flower_predicts_the_same(tiny_run: Any) -> None:
    runs = [tiny_run("fedproto", engine=engine) for engine in ("loop", "flower")]
    assert (runs[0].path / FILE).read_bytes() == (runs[1].path / FILE).read_bytes()


def test_after_an_interruption(tiny_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one between the last round and the summary, when nothing is evaluated any more."""
    whole = tiny_run("fedavg", ensemble=True)
    with monkeypatch.context() as patch:
        patch.setattr(Federation, "write_results", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            tiny_run("fedavg", ensemble=True, name="stopped")
    stopped = whole.path.parent / "stopped"
    assert not Run(stopped).complete
    resumed = protofed.run(out=stopped, resume=True)
    assert (resumed.path / FILE).read_bytes() == (whole.path / FILE).read_bytes()
    assert resumed.summary["metrics"] == whole.summary["metrics"]


def test_metrics_of_two_classes_are_those_of_scikit_learn(tiny_run: Any, noisy_data: str) -> None:
    run = tiny_run("fedavg", noisy_data, lr=0.003)
    metrics = run.summary["metrics"]
    assert metrics["positive"] == "class1"
    areas = {}
    for domain, own in predictions_of(run).views["global"].items():
        scores = metrics["global"][domain]
        areas[domain] = roc_auc_score(own.labels, own.probabilities[:, 1])
        said = own.probabilities.argmax(1)
        assert scores["auc"]["value"] == pytest.approx(areas[domain])
        assert scores["balanced_accuracy"]["value"] == pytest.approx(balanced_accuracy_score(own.labels, said))
        assert scores["macro_f1"]["value"] == pytest.approx(f1_score(own.labels, said, average="macro"))
        low, high = scores["auc"]["interval"]
        assert low <= areas[domain] <= high
        assert sum(map(sum, scores["confusion"])) == scores["images"] == 25
    assert metrics["global"]["average"]["auc"]["value"] == pytest.approx(np.mean(list(areas.values())))
    fairness = metrics["fairness"]["global"]["auc"]
    assert fairness["worst_part"] == min(areas, key=lambda domain: areas[domain])
    assert fairness["gap"] == pytest.approx(max(areas.values()) - min(areas.values()))
    assert metrics["global"]["pooled"]["images"] == 75


def test_a_domain_that_is_held_out_counts_apart(tiny_run: Any, noisy_data: str) -> None:
    metrics = tiny_run("fedavg", noisy_data, protocol="leave-out=c").summary["metrics"]["global"]
    assert metrics["average"]["auc"]["value"] == pytest.approx(
        np.mean([metrics[domain]["auc"]["value"] for domain in ("a", "b")])
    )
    assert metrics["pooled"]["images"] == 50


def test_validation_goes_by_the_metric(tiny_run: Any, noisy_data: str) -> None:
    """Over all images that clients keep from training, together."""
    options = {"set": {"data.validation": 0.4}, "lr": 0.003}
    by_area = tiny_run("fedproto", noisy_data, metric="auc", **options)
    by_accuracy = tiny_run("fedproto", noisy_data, **options)
    assert [line["accuracy"] for line in by_area.rounds] == [line["accuracy"] for line in by_accuracy.rounds]
    assert by_area.rounds[0]["validation"] != by_accuracy.rounds[0]["validation"]
    labels, probabilities = [], []
    opened = OpenRun(by_area.path, with_data=True)
    for client in opened.clients:
        net, at = opened.model_of(client)
        kept = opened.context.test_samples(None, client, validates=True)
        with net.eval():
            probabilities += [opened.method.predict(net, x, at).detach().numpy() for x, _ in kept.batches()]
        labels.append(kept.y.numpy())
    expected = roc_auc_score(np.concatenate(labels), np.concatenate(probabilities)[:, 1])
    assert by_area.rounds[-1]["validation"] == pytest.approx(expected)
    best = max(by_area.rounds, key=lambda line: line["validation"])
    assert by_area.summary["accuracy_best_validation"] == best["accuracy"]


def test_a_metric_must_fit_the_classes(tiny_run: Any) -> None:
    with pytest.raises(UserError, match="needs two classes"):
        tiny_run("fedavg", metric="sensitivity")
    with pytest.raises(UserError, match="balanced_accuracy"):
        tiny_run("fedavg", metric="balanced")


def test_too_many_probabilities_are_not_kept(tiny_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_module, "_MOST_KEPT", 10)
    assert not (tiny_run("fedproto").path / FILE).exists()
    assert list(predictions_of(tiny_run("fedavg")).views) == ["global", "personal"], "nothing is kept twice here"


def test_a_run_that_has_kept_none(tiny_run: Any) -> None:
    """Such as one that was made before there were any."""
    run = tiny_run("fedavg")
    (run.path / FILE).unlink()
    summary = run.summary
    del summary["metrics"]
    (run.path / "summary.json").write_text(json.dumps(summary))
    assert run.predictions() is None
    assert main(["report", str(run.path)]) == 0


def test_very_many_clients_are_judged_together(tiny_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "_MOST_PARTS", 2)
    run = tiny_run("fedproto", protocol="dirichlet=0.5,clients=4")
    whole = run.summary["metrics"]["personal"]
    parts = predictions_of(run).views["personal"].values()
    right = sum(int((own.probabilities.argmax(1) == own.labels).sum()) for own in parts)
    assert list(whole) == ["pooled"]
    assert whole["pooled"]["accuracy"]["value"] == pytest.approx(right / sum(map(len, parts)))
    assert main(["report", str(run.path)]) == 0


def test_what_a_person_sees(noisy_data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "fedavg", "--data", noisy_data, "--model", "mlp", "--rounds", "2", "--lr", "0.003"]
    assert main([*words, "--engine", "loop", "--out", str(tmp_path / "shown")]) == 0
    said = capsys.readouterr().out
    metrics = Run(tmp_path / "shown").summary["metrics"]
    low, high = metrics["global"]["average"]["auc"]["interval"]
    assert "'class1' is positive" in said
    assert f"{100 * low:.2f} to {100 * high:.2f}" in said
    assert f"AUC is lowest on a, with {100 * metrics['global']['a']['auc']['value']:.2f} %" in said
