"""The benchmarks run. What they measure is not tested: machines are noisy."""

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from protofed.explain.explanation import Evidence, Explanation
from protofed.explain.maps import Box
from protofed.runs.opened import OpenRun


def finite(ratios):
    return len(ratios.values) == 2 and all(math.isfinite(value) and value > 0 for value in ratios.values)


def test_overhead_quick(benchmark, capsys):
    measured = benchmark("overhead").main(["--quick"])
    assert measured
    assert all(finite(ratios) for methods in measured.values() for ratios in methods.values())
    assert "fedavg / bare" in capsys.readouterr().out


def test_overhead_refuses_to_compare_different_work(benchmark, monkeypatch):
    overhead, bare = benchmark("overhead"), benchmark("bare")
    train = bare.BareLoop._train
    monkeypatch.setattr(bare.BareLoop, "_train", lambda self, x, y, order: train(self, x[:32], y[:32], order))
    with pytest.raises(RuntimeError, match="does other work than ours"):
        overhead.measure(overhead.QUICK[0], alternations=1, rounds=1)


def test_a_box_hits_where_it_holds_the_place(benchmark):
    def view(row: int, column: int) -> Explanation:
        box = Box(row - 3, row + 3, column - 3, column + 3)
        shown = Evidence(0, 1, 1.0, 1.0, 1.0, np.zeros((32, 32), dtype=np.float32), box, (8, 8))
        return Explanation("a-0", (0.1, 0.9), (shown,))

    game = benchmark("pointing_game").pointing_game
    hits, chance = game([view(8, 8), view(24, 24)], np.full((2, 2), 8.0), (32, 32), np.random.default_rng(0))
    assert hits == [True, False]
    assert all(0 <= share < 0.5 for share in chance)


def test_pointing_game_quick(benchmark, capsys):
    outcomes = benchmark("pointing_game").main(["--quick", "--seeds", "0"])
    assert [each.method for each in outcomes] == ["fedadapterproto", "protoridge"]
    assert all(each.images > 0 for each in outcomes)
    assert "random boxes" in capsys.readouterr().out


def test_the_game_counts_what_the_clients_models_predict(benchmark, tmp_path):
    game = benchmark("pointing_game")
    outcome = game.play(game.QUICK, "fedadapterproto", 0, game.backbone(game.QUICK, tmp_path), tmp_path)
    opened = OpenRun(tmp_path / "fedadapterproto-seed0", with_data=True)
    right, ill = [], 0
    for client, site in opened.domains.items():
        test = opened.context.dataset.domains[site].test
        net, at = opened.model_of(client)
        with torch.no_grad(), net.eval():
            predicted = opened.method.predict(net, opened.normalised(test.x), at).argmax(1)
        right += (predicted == test.y).tolist()
        ill += int(((predicted == test.y) & (test.y == opened.classes.index("diseased"))).sum())
    assert outcome.accuracy == pytest.approx(np.mean(right))
    assert outcome.images == ill
    assert 0 < outcome.chance < outcome.hits + 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_explanations_point_at_the_lesion(benchmark):
    game = benchmark("pointing_game")
    outcomes = game.main(["--methods", "fedadapterproto"])
    assert sum(each.hits for each in outcomes) / len(outcomes) >= game.HIT_GOAL
    assert sum(each.chance for each in outcomes) / len(outcomes) <= game.CHANCE_GOAL


@pytest.mark.parametrize("method", ["i2pfl", "single", "fedmp_fewshot", "centralized"])
def test_method_cost(method, benchmark):
    costs = benchmark("method_cost")
    work = replace(costs.WORK, clients=2, samples=20, settings={"model.width": 2})
    assert finite(costs.measure(method, 2, work))


def test_engines(benchmark):
    engines = benchmark("engines")
    assert finite(engines.measure(engines.QUICK[0], 2))


def test_backbone_quick(benchmark, capsys):
    (measured,) = benchmark("backbone").main(["--quick"]).values()
    assert finite(measured.ratios)
    assert measured.difference < 1e-4
    assert "ours / bare" in capsys.readouterr().out


def test_prototype_cost_quick(benchmark, capsys):
    measured = benchmark("method_cost").main(["--prototypes", "--quick"])
    assert sorted(measured) == ["fedmp", "i2pfl"]
    assert all(finite(ratios) for ratios in measured.values())
    assert "goal" in capsys.readouterr().out


def test_suite_quick(benchmark, capsys):
    measured = benchmark("suite").main(["lenet5", "resnet10", "--quick", "--no-flower"])
    assert {name: list(ratios) for name, ratios in measured.items()} == {"lenet5": ["bare"], "resnet10": ["bare"]}
    assert all(finite(ratios) for sides in measured.values() for ratios in sides.values())
    assert "ours / bare" in capsys.readouterr().out


@pytest.mark.slow
def test_suite_beside_flower(benchmark):
    pytest.importorskip("ray")
    measured = benchmark("suite").main(["lenet5", "start-up", "--quick"])
    assert finite(measured["lenet5"]["Flower"])
    assert finite(measured["start-up"]["Flower"])


def test_scaling_quick(benchmark, tmp_path):
    scaling = benchmark("scaling")
    runs = [scaling.measure(8, 0.5, workers=2, rounds=1)]
    assert [run.participants for run in runs] == [4]
    assert all(run.peak > run.data > 0 and run.round > 0 and run.start_up > 0 for run in runs)
    assert "| 8 " in scaling.as_table(runs)
    pytest.importorskip("matplotlib")
    scaling.plot(runs, tmp_path / "plot.svg")
    assert "<svg" in (tmp_path / "plot.svg").read_text()


def test_memory_counts_children(benchmark):
    memory = benchmark("memory")
    big = "x = bytearray(50 * 2**20); print(flush=True); input()"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {big!r}])"
    with subprocess.Popen([sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert memory.tree_bytes(process.pid) > 50 * 2**20
        process.communicate(b"\n")
    assert memory.tree_bytes(process.pid) == 0


def test_streaming_quick(benchmark, capsys):
    above = benchmark("streaming").main(["--images", "40", "--side", "64"])
    assert 0 < above < 1.5e9
    assert "40 JPEGs of 64 pixels" in capsys.readouterr().out


def test_frozen_quick(benchmark, capsys):
    measured = benchmark("frozen").main(["--quick"])
    assert set(measured) == {"adapters", "last stage"}
    assert all(finite(ratios) for both in measured.values() for ratios in both)
    assert "later rounds / bare" in capsys.readouterr().out


def test_one_pass_quick(benchmark, capsys):
    measured = benchmark("one_pass").main(["--quick", "--cases", "fedncm,protoridge gram=full project=256"])
    assert [each.case for each in measured] == ["fedncm", "protoridge gram=full project=256"]
    held = 10 * 10  # sites times classes, each of 1,280 numbers of four bytes; some sites may lack a class
    assert 0.9 * held * 5120 < measured[0].sent < 1.1 * held * 5120
    assert "KB up per site" in capsys.readouterr().out


def first(kind, model):
    return next(layer for layer in model.modules() if isinstance(layer, kind))


def test_statistics_of_a_domain_replace_averaged_ones(benchmark, tiny_run):
    own = benchmark("batch_statistics")
    run = tiny_run("fedavg", model="resnet10", set={"model.width": 4})
    opened = OpenRun(run.path, with_data=True)
    model, images = run.model().eval(), next(iter(opened.context.dataset.domains.values())).train
    normalised = opened.normalised(images.x[:])
    adapted = own.with_statistics_of(model, [normalised])
    before, after = (first(torch.nn.BatchNorm2d, each) for each in (model, adapted))
    convolved = first(torch.nn.Conv2d, model)(normalised)
    assert torch.allclose(after.running_mean, convolved.mean((0, 2, 3)), atol=1e-5)
    assert not torch.allclose(before.running_mean, after.running_mean, atol=1e-3)
    assert torch.equal(before.weight, after.weight)
    # As it is, the model has the accuracy that its last round told.
    (as_it_is, _) = own.rows_of(str(run.path))
    last = run.rounds[-1]["accuracy"]["global"]
    assert as_it_is[2] == ", ".join(f"{name} {100 * last[name]:.1f}" for name in opened.context.dataset.domains)


def test_statistics_are_of_images_as_networks_saw_them_in_training(benchmark, tiny_run):
    opened = OpenRun(tiny_run("fedavg", set={"data.augment": "crop"}).path, with_data=True)
    (domain, *_) = opened.context.dataset.domains.values()
    own = benchmark("finished_runs")
    (plain, *_), (changed, *_) = own.normalised(opened, domain.train), own.as_in_training(opened, domain.train)
    assert plain.shape == changed.shape
    assert not torch.equal(plain, changed)


def test_training_images_are_told_from_test_images(benchmark, tiny_run):
    run = tiny_run("fedavg", model="resnet10", set={"model.width": 4})
    opened = OpenRun(run.path, with_data=True)
    partition, last = opened.context.partition, run.rounds[-1]["accuracy"]["global"]
    own = benchmark("training_images")
    found, shares = own.accuracies(opened), own.shares_trained_on(opened)
    for name, domain in opened.context.dataset.domains.items():
        on_tests, on_all = (found["averaged", images][name] for images in ("test images", "all images"))
        assert on_tests == pytest.approx(last[name])
        tests, every = len(domain.test), len(domain.train) + len(domain.test)
        assert tests * on_tests <= every * on_all <= tests * on_tests + len(domain.train)
        held = sum(len(partition.train[client]) for client in partition.clients if partition.domain[client] == name)
        assert shares[name] == pytest.approx(held / every)
    assert [row[1:3] for row in own.rows_of(str(run.path))] == [
        ["averaged", "test images"],
        ["averaged", "all images"],
        ["the domain's own", "test images"],
        ["the domain's own", "all images"],
    ]
