"""What makes many clients cheap changes no result: shared pixels, models scored once, uploads that wait on disk."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from protofed.clients import ClientSide, Evaluate, Train, Trained
from protofed.data import Dataset, Domain, Images, Normalise
from protofed.federation import engine, evaluation
from protofed.records import Bytes

ONE_BY_ONE = "one_by_one.py"
PLUGIN = '''
"""FedAvg whose prediction might depend on the client, so that everybody is scored alone."""
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedbn import FedBN


class OneByOne(FedAvg):
    def predict(self, net, x, at):
        return super().predict(net, x, at)


class OneByOneBN(FedBN):
    def predict(self, net, x, at):
        return super().predict(net, x, at)
'''


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All jobs that clients are given."""
    seen: list[Any] = []
    perform = ClientSide.perform

    def noted(self: ClientSide, job: Any, message: Any) -> Any:
        seen.append(job)
        return perform(self, job, message)

    monkeypatch.setattr(ClientSide, "perform", noted)
    return seen


def personal(jobs: list[Any]) -> list[Evaluate]:
    """Jobs on clients' own images; where all use the server's model, it comes with the job."""
    return [job for job in jobs if isinstance(job, Evaluate) and job.client is not None and job.view != "local"]


@pytest.mark.parametrize(("plain", "alone"), [("fedavg", "OneByOne"), ("fedbn", "OneByOneBN")])
@pytest.mark.parametrize("protocol", ["iid=6", "equal=3"])
def test_scoring_together_equals_scoring_one_by_one(
    plain: str, alone: str, protocol: str, tiny_run: Any, tmp_path: Path, jobs: list[Any]
) -> None:
    (tmp_path / ONE_BY_ONE).write_text(PLUGIN)
    # In float32, rounding might decide for a class where two are equally probable.
    options: dict[str, Any] = {"protocol": protocol, "participation": 0.4, "model": "resnet10", "dtype": "float64"}
    options["set"] = {"model.width": 2, "data.validation": 0.3}
    together = tiny_run(plain, **options)
    few = len(personal(jobs))
    jobs.clear()
    one_by_one = tiny_run(f"{tmp_path / ONE_BY_ONE}:{alone}", **options)
    assert few < len(personal(jobs))
    for left, right in zip(together.rounds, one_by_one.rounds, strict=True):
        assert left["accuracy"] == right["accuracy"]
        assert left["validation"] == right["validation"]


def test_small_hold_outs_go_through_the_model_together(tiny_run: Any, jobs: list[Any]) -> None:
    tiny_run("fedavg", protocol="iid=6", rounds=1)
    (job,) = personal(jobs)
    assert [job.client, *job.alike] == [f"client-{number}" for number in range(6)]


def test_cuts_do_not_depend_on_the_engine(tiny_run: Any, same_results: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "_SCORED_TOGETHER", 5)
    options: dict[str, Any] = {"protocol": "dirichlet=0.5,clients=5", "participation": 0.5}
    same_results(tiny_run("fedbn", **options), tiny_run("fedbn", engine="workers", workers=2, **options))


def test_a_model_that_did_not_change_is_not_scored_again(tiny_run: Any, jobs: list[Any]) -> None:
    run = tiny_run("fedavg", protocol="equal=3", participation=0.3, rounds=3, evaluate_local=True)
    local = Counter(job.client for job in jobs if isinstance(job, Evaluate) and job.view == "local")
    trained = Counter(job.client for job in jobs if isinstance(job, Train))
    # Whoever trained is scored once for every time; those who never did share one score in each of the three domains.
    assert local.total() == trained.total() + 3
    assert all("local" in line["accuracy"] for line in run.rounds)


def test_a_resumed_run_scores_as_an_uninterrupted_one(tiny_run: Any, same_results: Any) -> None:
    options: dict[str, Any] = {"protocol": "equal=3", "participation": 0.4, "rounds": 3, "evaluate_local": True}
    options.update({"model": "resnet10", "set": {"model.width": 2}})
    straight = tiny_run("fedbn", name="straight", **options)

    class Stop:
        def round_end(self, run: Any, record: dict[str, Any]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny_run("fedbn", name="stopped", callbacks=[Stop()], **options)
    same_results(straight, tiny_run("fedbn", name="stopped", resume=True, **options))


@pytest.mark.parametrize("limit", [0, 100, 10**6])
def test_results_wait_their_turn_in_memory_or_on_disk(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_WAITING_IN_MEMORY", limit)
    wanted = [Train(0, f"client-{number}") for number in range(6)]
    results = {job: Trained(f"{job.client}".encode() * 9, Bytes(), {}, 1) for job in wanted}
    order = [wanted[index] for index in (3, 0, 5, 4, 1, 2)]
    handed_on = list(engine.in_order(((job, results[job]) for job in order), wanted, tmp_path))
    assert handed_on == [(job, results[job]) for job in wanted]
    assert list(tmp_path.iterdir()) == []


def test_waiting_on_disk_changes_no_result(tiny_run: Any, same_results: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"protocol": "dirichlet=0.5,clients=5", "engine": "workers", "workers": 2}
    in_memory = tiny_run("fedavg", **options)
    monkeypatch.setattr(engine, "_WAITING_IN_MEMORY", 1)
    same_results(in_memory, tiny_run("fedavg", **options))


def test_pixels_exist_once() -> None:
    def part(name: str, first: int) -> Domain:
        images = Images(torch.full((2, 1, 4, 4), first, dtype=torch.uint8), torch.tensor([0, 1]))
        return Domain(name, images, images)

    domains = {name: part(name, n) for n, name in enumerate("xy")}
    dataset = Dataset("toy", ("a", "b"), domains, Normalise.default(1))
    assert dataset.pooled_train().x[:, 0, 0, 0].tolist() == [0, 0, 1, 1]
    for name, given in domains.items():
        assert dataset.domains[name].train.x.data_ptr() == given.train.x.data_ptr()
