"""A run tells the truth about itself: chance, warnings, the best round, and losses that can be compared."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import protofed
from protofed.cli.app import main
from protofed.federation.chance import at_chance
from protofed.inference import Classifier, evaluate
from protofed.runs.health import diagnose
from protofed.runs.opened import OpenRun

MISBEHAVING = Path(__file__).parents[1] / "federation" / "misbehaving.py"
LEARNS = {"rounds": 6, "epochs": 3, "lr": 0.1}
"""Enough for the tiny network to be well above chance on toy data."""

CONFIG = {
    "method": {"name": "some", "kind": "global"},
    "plan": {"lr": 0.05},
    "data": {"classes": list("abcdefghij")},
    "partition": {"held_out": ["z"], "clients": {"x-0": {}, "y-0": {}}},
    "chance": {"uniform": 0.1, "global": {"x": 0.1, "y": 0.3, "z": 0.1, "average": 0.2}, "personal": None},
}


def lines(averages: list[float | None], losses: list[float | None], **sites: list[float]) -> list[dict[str, Any]]:
    """Rounds as rounds.jsonl has them, as far as a diagnosis looks at them."""
    return [
        {
            "round": index + 1,
            "train_loss": loss,
            "cross_entropy": loss,
            "loss_parts": {"ce": loss},
            "events": [],
            "accuracy": None
            if average is None
            else {
                "global": {"average": average, **{name: values[index] for name, values in sites.items()}},
                "personal": None,
            },
        }
        for index, (average, loss) in enumerate(zip(averages, losses, strict=True))
    ]


def kinds(averages: list[float | None], losses: list[float | None], **sites: list[float]) -> list[tuple[str, int]]:
    return [(each["kind"], each["round"]) for each in diagnose(CONFIG, lines(averages, losses, **sites))]


def test_a_healthy_run_has_nothing_to_say() -> None:
    assert kinds([0.2, 0.4, 0.6, 0.7], [2.3, 1.5, 1.0, 0.8]) == []
    # One bad round that is overcome is no collapse.
    assert kinds([0.4, 0.6, 0.2, 0.7], [2.3, 1.0, 15.0, 0.8]) == []
    # Two rounds at chance after better ones are not yet a state that stays.
    assert kinds([0.4, 0.6, 0.2, 0.2], [2.3, 1.0, 1.0, 1.1]) == []


def test_the_round_of_an_explosion() -> None:
    assert kinds([0.4, 0.5, 0.5], [2.0, 1.0, 11.7]) == [("loss_exploded", 3)]
    assert kinds([0.4, 0.5, 0.5], [2.0, 1.0, None]) == [("loss_exploded", 3)]
    # 6.8 is less than three times ln 10, 7.0 is more.
    assert kinds([0.4, 0.5], [2.0, 6.8]) == []
    assert kinds([0.4, 0.5], [2.0, 7.0]) == [("loss_exploded", 2)]
    # As in a run of digits: an explosion, and then the loss of guessing to the end.
    (warning,) = diagnose(CONFIG, lines([0.5, 0.57, 0.2, 0.2, 0.2], [1.9, 1.2, 11.7, 2.303, 2.303]))
    assert (warning["kind"], warning["round"]) == ("loss_exploded", 3)
    assert "rose to 11.7 in round 3 (round 1: 1.9), and accuracy has been at chance since round 3" in warning["text"]
    assert "--lr 0.005" in warning["advice"]


def test_an_accuracy_that_falls_to_chance_and_stays() -> None:
    (warning,) = diagnose(CONFIG, lines([0.3, 0.569, 0.2, 0.21, 0.2], [2.0, 1.5, 2.303, 2.303, 2.303]))
    assert (warning["kind"], warning["round"]) == ("fell_to_chance", 3)
    assert "fell to chance, 20.00 %, in round 3" in warning["text"]
    assert "had reached 56.90 %" in warning["text"]
    assert kinds([0.2, 0.2, 0.19, 0.2], [2.4, 2.4, 2.4, 2.4]) == [("never_above_chance", 1)]
    # Rounds without a score do not break a streak.
    assert kinds([0.6, 0.2, None, 0.2, 0.2], [1.0, 2.3, 2.3, 2.3, 2.3]) == [("fell_to_chance", 2)]


def test_what_to_try_where_nothing_was_learned() -> None:
    too_high, hardly_moved = (diagnose(CONFIG, lines([0.2] * 3, [loss] * 3))[0]["advice"] for loss in (2.4, 2.302))
    assert "likely too high" in too_high
    assert "more rounds" in hardly_moved
    noisy = diagnose({**CONFIG, "guard": {"noise": 1.0}}, lines([0.2] * 3, [2.4] * 3))[0]["advice"]
    assert "noise" in noisy


def without_training(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**line, "train_loss": None, "cross_entropy": None, "loss_parts": {}} for line in rounds]


def test_what_to_try_where_clients_learn_and_their_average_does_not() -> None:
    (warning,) = diagnose(CONFIG, lines([0.2] * 4, [2.3, 1.5, 1.0, 0.5]))
    assert warning["kind"] == "never_above_chance"
    assert "Clients learn (loss 0.5, guessing has 2.3), but their averaged model does not" in warning["advice"]
    assert "--lr" not in warning["advice"]
    (of_personal,) = diagnose(
        {**CONFIG, "method": {"name": "fedbn", "kind": "personal"}}, lines([0.2] * 4, [2.3, 1.5, 1.0, 0.5])
    )
    assert "averaged model" not in of_personal["advice"]
    alone = {**CONFIG, "partition": {"held_out": [], "clients": {"everybody": {}}}}
    (of_pooled,) = diagnose(alone, lines([0.2] * 4, [2.3, 1.5, 1.0, 0.5]))
    assert "averaged model" not in of_pooled["advice"], "nothing is averaged where one client has all images"


def test_what_to_try_where_nothing_is_trained() -> None:
    (warning,) = diagnose(CONFIG, without_training(lines([0.2], [None])))
    assert warning["kind"] == "never_above_chance"
    assert "20.00 % in round 1 (last" in warning["text"]
    (of_site,) = diagnose(CONFIG, without_training(lines([0.5], [None], x=[0.7], y=[0.3], z=[0.1])))
    for advice in (warning["advice"], of_site["advice"]):
        assert "--weights" in advice
        assert "--lr" not in advice
        assert "more rounds" not in advice


def test_a_site_at_chance_is_named_and_held_out_ones_are_not() -> None:
    rounds = lines([0.5] * 3, [1.0] * 3, x=[0.7] * 3, y=[0.3, 0.31, 0.3], z=[0.1] * 3)
    (warning,) = diagnose(CONFIG, rounds)
    assert warning["kind"] == "site_at_chance"
    assert "on y (chance 30.00 %)." in warning["text"]
    assert "such as fedbn" in warning["advice"]
    assert "augment" not in warning["advice"], "nobody knows whether there are colours"
    coloured = {**CONFIG["data"], "image_shape": [3, 32, 32], "augment": "crop=4,flip=0.5"}
    (of_photographs,) = diagnose({**CONFIG, "data": coloured}, rounds)
    assert "(--set data.augment=crop=4,flip=0.5,jitter,grey), or try" in of_photographs["advice"]
    (pretrained,) = diagnose({**CONFIG, "data": coloured, "model": {"start": {"from": "imagenet"}}}, rounds)
    assert "augment" not in pretrained["advice"]
    (of_personal,) = diagnose({**CONFIG, "method": {"name": "fedbn", "kind": "personal"}}, rounds)
    assert "fedbn" not in of_personal["advice"]
    assert kinds([0.5] * 3, [1.0] * 3, x=[0.7] * 3, y=[0.3, 0.31, 0.4], z=[0.1] * 3) == []


@pytest.mark.parametrize(
    ("accuracy", "chance", "expected"),
    [(0.5, 0.5, True), (0.52, 0.5, True), (0.521, 0.5, False), (0.0125, 0.01, True), (0.02, 0.01, False)],
)
def test_how_far_chance_reaches(accuracy: float, chance: float, expected: bool) -> None:
    assert at_chance(accuracy, chance) is expected


def test_old_runs_without_chance_are_judged_by_their_loss() -> None:
    old = {key: value for key, value in CONFIG.items() if key != "chance"}
    rounds = lines([0.2] * 3, [2.0, 2.0, 30.0])
    for line in rounds:
        del line["cross_entropy"]
    assert [each["kind"] for each in diagnose(old, rounds)] == ["loss_exploded"]


def test_chance_is_the_share_of_the_most_frequent_class(tmp_path: Path, tiny_run: Any) -> None:
    rng = np.random.default_rng(0)
    tests = {"a": [0] * 6 + [1] * 3 + [2], "b": [2] * 5 + [1] * 5}
    (tmp_path / "data").mkdir()
    for name, labels in tests.items():
        arrays = {"x_train": 30, "x_test": len(labels)}
        images = {key: rng.integers(0, 256, (n, 8, 8, 1), dtype=np.uint8) for key, n in arrays.items()}
        np.savez(tmp_path / "data" / f"{name}.npz", **images, y_train=np.arange(30) % 3, y_test=np.array(labels))
    summary = tiny_run("fedavg", str(tmp_path / "data"), clients="a=2,b=1").summary
    assert summary["chance"]["uniform"] == pytest.approx(1 / 3)
    assert summary["chance"]["global"] == pytest.approx({"a": 0.6, "b": 0.5, "average": 0.55, "pooled": 0.55})
    assert summary["chance"]["personal"] == pytest.approx({"a-0": 0.6, "a-1": 0.6, "b-0": 0.5, "average": 1.7 / 3})


def test_chance_on_the_clients_own_hold_outs(tiny_run: Any) -> None:
    run = tiny_run("fedavg", protocol="dirichlet=0.5,clients=3")
    opened = OpenRun(run.path, with_data=True).context
    labels = opened.dataset.pooled_labels().numpy()
    for client, indices in opened.partition.holdout.items():
        own = labels[indices]
        expected = max((own == k).mean() for k in range(4))
        assert run.summary["chance"]["personal"][client] == pytest.approx(expected)


def test_the_loss_that_is_shown_is_the_cross_entropy(tiny_run: Any) -> None:
    first, second = tiny_run(f"{MISBEHAVING}:Linear").rounds
    assert first["cross_entropy"] == pytest.approx(4 * first["loss_parts"]["mine"])
    assert first["train_loss"] == pytest.approx(first["loss_parts"]["mine"] - 5)
    assert second["cross_entropy"] is None
    scaffold = tiny_run("scaffold", rounds=3).rounds[-1]
    assert scaffold["cross_entropy"] == scaffold["loss_parts"]["ce"] != scaffold["train_loss"]
    fedproc = tiny_run("fedproc", rounds=4).rounds
    # Its share of the cross-entropy is t / T from its second round on.
    assert fedproc[1]["cross_entropy"] == pytest.approx(4 * fedproc[1]["loss_parts"]["ce"])
    assert all(0.1 < line["cross_entropy"] < 3 for line in fedproc)


@pytest.mark.parametrize("engine", ["loop", "workers"])
def test_a_run_that_nobody_survives(engine: str, tiny_run: Any) -> None:
    run = tiny_run(f"{MISBEHAVING}:Explodes", engine=engine, rounds=9, epochs=2, lr=0.1)
    summary = run.summary
    assert (summary["status"], summary["rounds"]) == ("diverged", 3)
    (warning,) = summary["warnings"]
    assert (warning["kind"], warning["round"]) == ("diverged", 4)
    assert "diverged in round 4: the weights of all 3 clients were no longer finite" in warning["text"]
    assert "--lr 0.01" in warning["advice"]
    # What is there are the rounds before it: the model can be used.
    assert (
        Classifier(run)
        .probabilities(OpenRun(run.path, with_data=True).context.dataset.domains["a"].test.x)
        .isfinite()
        .all()
    )
    assert not list((run.path / "clients").glob("*.round-*"))


def test_a_diverging_run_ends_in_one_line(tmp_path: Path, tiny_data: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    words = ["--data", tiny_data, "--model", "mlp", "--engine", "loop", "--rounds", "5", "--out", str(out)]
    assert main(["run", f"{MISBEHAVING}:Explodes", *words, "--set", "since=2"]) == 3
    said = capsys.readouterr()
    about = [line for line in said.err.splitlines() if "diverged" in line]
    assert len(about) == 1
    assert "Traceback" not in said.err
    assert "diverged in round 3" in about[0]
    assert main(["report", str(out)]) == 0
    page = (out / "report.html").read_text()
    headline = page[page.index('class="lead"') :]
    assert headline.partition(">")[2].startswith(f"{MISBEHAVING}:Explodes diverged in round 3")


def test_a_run_that_diverges_at_once(tmp_path: Path, tiny_data: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    words = ["--data", tiny_data, "--model", "mlp", "--engine", "loop", "--out", str(out), "--set", "since=0"]
    assert main(["run", f"{MISBEHAVING}:Explodes", *words]) == 3
    assert "diverged in round 1" in capsys.readouterr().err
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["rounds"], summary["accuracy"], summary["best"]) == (0, None, None)
    assert main(["report", str(out)]) == 0


def test_a_server_that_overflows(tiny_run: Any) -> None:
    run = tiny_run(f"{MISBEHAVING}:Overflows", rounds=4)
    assert (run.summary["status"], len(run.rounds)) == ("diverged", 1)
    assert "the server's new state was not finite" in run.summary["warnings"][0]["text"]
    again = protofed.run(out=run.path, resume=True)
    assert again.summary == run.summary


def test_lost_clients_are_told(tiny_run: Any) -> None:
    run = tiny_run(f"{MISBEHAVING}:Diverges", **LEARNS)
    assert all(event["not_finite"] for line in run.rounds for event in line["events"])
    lost = next(warning for warning in run.summary["warnings"] if warning["kind"] == "clients_lost")
    assert lost["round"] == 1
    assert "continued without b-0 in 6 of 6 rounds" in lost["text"]


def test_a_collapse_keeps_the_round_before_it(tiny_run: Any, tiny_data: str) -> None:
    healthy = tiny_run("fedavg", **{**LEARNS, "rounds": 6})
    assert healthy.summary["warnings"] == []
    assert not (healthy.path / "best").exists()
    run = tiny_run(f"{MISBEHAVING}:Forgets", **{**LEARNS, "rounds": 12}, set={"since": 6})
    (warning,) = run.summary["warnings"]
    assert warning["kind"] in ("fell_to_chance", "loss_exploded")
    best = run.summary["best"]
    assert (best["round"], best["by"]) == (6, "train_loss")
    assert f"Round {best['round']}, the best by training loss, is kept" in warning["advice"]
    # Round 6 is where the healthy run ended, so the models are the same.
    assert (run.path / "model_best.safetensors").read_bytes() == (healthy.path / "model.safetensors").read_bytes()
    kept = evaluate(run.path, tiny_data, model_of="best")
    ended = evaluate(healthy.path, tiny_data)
    assert kept["models"] == ended["models"]
    assert kept["models"]["global"]["accuracy"] > evaluate(run.path, tiny_data)["models"]["global"]["accuracy"]


def test_the_best_round_by_validation(tiny_run: Any) -> None:
    run = tiny_run(f"{MISBEHAVING}:Forgets", rounds=8, epochs=3, lr=0.1, validation=0.25, set={"since": 4})
    scores = [line["validation"] for line in run.rounds]
    best = run.summary["best"]
    assert (best["round"], best["score"]) == (scores.index(max(scores)) + 1, max(scores))
    assert best["by"] == "validation"
    assert best["accuracy"] == run.rounds[best["round"] - 1]["accuracy"] == run.summary["accuracy_best_validation"]
    # What is kept is what a run of so many rounds ends with.
    short = tiny_run(
        f"{MISBEHAVING}:Forgets", rounds=best["round"], epochs=3, lr=0.1, validation=0.25, set={"since": 4}
    )
    assert (run.path / "model_best.safetensors").read_bytes() == (short.path / "model.safetensors").read_bytes()
    for client in ("a-0", "b-0", "c-0"):
        name = f"clients/{client}.safetensors"
        assert (run.path / "best" / name).read_bytes() == (short.path / name).read_bytes()
    opened = OpenRun(run.path, model_of="best")
    assert opened.done == best["round"]


def test_methods_without_a_global_model_keep_their_clients(tiny_run: Any) -> None:
    run = tiny_run("fedproto", rounds=4, validation=0.25, epochs=2, lr=0.05)
    assert not (run.path / "model_best.safetensors").exists()
    best = OpenRun(run.path, model_of="best")
    assert best.done == run.summary["best"]["round"]
    assert Classifier(run, "a-0", "best").classes == Classifier(run, "a-0").classes


def test_a_run_that_kept_no_best_says_how_to(tiny_run: Any) -> None:
    run = tiny_run("fedavg", **LEARNS)
    with pytest.raises(protofed.UserError, match="--validation"):
        OpenRun(run.path, model_of="best")
    with pytest.raises(protofed.UserError, match="round whose models to use"):
        OpenRun(run.path, model_of="first")


def test_stopping_when_flat(tiny_run: Any) -> None:
    options = {"rounds": 30, "epochs": 3, "lr": 0.1, "set": {"since": 4}}
    for extra in ({}, {"validation": 0.25}):
        run = tiny_run(f"{MISBEHAVING}:Forgets", stop_when_flat=3, **options, **extra)
        assert run.summary["status"] == "flat"
        key, sign = ("validation", -1) if extra else ("cross_entropy", 1)
        scores = [sign * line[key] for line in run.rounds]
        assert len(scores) == scores.index(min(scores)) + 1 + 3 < 30
        assert run.rounds[-1]["accuracy"] is not None


def test_validation_is_given_once(tiny_run: Any) -> None:
    with pytest.raises(protofed.UserError, match="give only one of them"):
        tiny_run("fedavg", validation=0.2, set={"data.validation": 0.2})
    one = tiny_run("fedavg", validation=0.25)
    other = tiny_run("fedavg", set={"data.validation": 0.25})
    assert [line["validation"] for line in one.rounds] == [line["validation"] for line in other.rounds]


def test_strict(tmp_path: Path, tiny_data: str) -> None:
    words = ["--data", tiny_data, "--model", "mlp", "--engine", "loop", "--quiet", "--lr", "0.1", "--epochs", "3"]
    bad = ["run", f"{MISBEHAVING}:Forgets", *words, "--set", "since=0", "--rounds", "3"]
    assert main([*bad, "--out", str(tmp_path / "lenient")]) == 0
    assert main([*bad, "--strict", "--out", str(tmp_path / "strict")]) == 3
    assert main(["run", "fedavg", *words, "--rounds", "6", "--strict", "--out", str(tmp_path / "good")]) == 0


def test_comparisons_and_reports_show_chance_and_begin_with_what_went_wrong(tmp_path: Path, tiny_data: str) -> None:
    out = tmp_path / "compared"
    forgets = f"{MISBEHAVING}:Forgets"
    words = ["compare", "fedavg", forgets, "--data", tiny_data, "--model", "mlp", "--quiet", "--lr", "0.1"]
    words += ["--epochs", "3", "--rounds", "6", "--set", f"{forgets}.since=0", "--out", str(out)]
    assert main([*words, "--strict"]) == 3
    assert main(words) == 0
    content = json.loads((out / "comparison.json").read_text())
    assert content["chance"]["global"]["per_domain"] == {"a": 0.25, "b": 0.25, "c": 0.25}
    assert content["methods"]["fedavg"]["warnings"] == []
    (warning,) = content["methods"][forgets]["warnings"]
    assert (warning["kind"], warning["seed"]) == ("never_above_chance", 0)
    text = (out / "comparison.md").read_text()
    assert "| chance | 25.00 | 25.00 | 25.00 | 25.00 |" in text
    assert f"- {forgets}, seed 0: {warning['text']}" in text
    assert main(["report", str(out)]) == 0
    page = (out / "report.html").read_text()
    assert page.partition('class="lead">')[2].startswith(f"{forgets}, seed 0: {warning['text'][:40]}")
    charts = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert charts["groups"][0]["measures"][0]["chance"] == 0.25
    assert charts["groups"][0]["dots"][0]["chance"] == [0.25] * 4
