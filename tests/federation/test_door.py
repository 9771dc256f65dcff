"""The door inside a process: what an engine hands over is checked there too, and no broken state is committed."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from protofed.clients import Evaluate, Failed, Job, Result, Train, Trained
from protofed.engines.loop import LoopEngine
from protofed.federation import Federation, RoundPolicy, RunFolder
from protofed.methods.fedavg import FedAvg
from protofed.records import Message, encode, map_tensors
from protofed.runs.assembly import assemble
from protofed.runs.options import make_options


class Forging(LoopEngine):
    """Changes the answers of client b."""

    def forge(self, job: Job, result: Any) -> list[tuple[Any, Any]]:
        return [(job, result)]

    def perform(self, jobs: Sequence[tuple[Job, Message]]) -> Iterator[tuple[Job, Result]]:
        for job, result in super().perform(jobs):
            if isinstance(job, Train) and job.client == "b-0":
                yield from self.forge(job, result)
            else:
                yield job, result


def federation_of(
    make_data: Any, tmp_path: Any, forge: Any = None, scattered: bool = False, **options: Any
) -> Federation:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    given = {"method": "fedavg", "data": make_data(("a", "b", "c")), "model": "mlp", "rounds": 2, **options}
    assembly = assemble(make_options({**given, "set": {"model.hidden": 4}}), folder.clients)
    engine = Forging(assembly.prepared)
    if forge is not None:
        engine.forge = forge  # type: ignore[method-assign]
    engine.scattered = scattered
    return Federation(assembly.prepared, engine, folder, RoundPolicy())


@pytest.mark.parametrize(
    ("forge", "reason"),
    [
        (lambda job, result: [(job, replace(result, samples="7"))], "it claims '7' samples"),
        (lambda job, result: [(job, replace(result, samples=True))], "it claims True samples"),
        (lambda job, result: [(job, replace(result, loss={str(k): 1.0 for k in range(99)}))], "it reports 99 losses"),
        (lambda *_: [], "it gave no answer"),
        (lambda job, _: [(job, Failed("\x1b[2Jno\nluck" + "!" * 9999))], "no luck!!!"),
    ],
)
def test_what_is_no_answer_leaves_its_client_out(make_data: Any, tmp_path: Any, forge: Any, reason: str) -> None:
    for line in federation_of(make_data, tmp_path, forge).rounds():
        (event,) = line["events"]
        assert (event["client"], event["event"]) == ("b-0", "left out")
        assert event["reason"].startswith(reason)
        assert len(event["reason"]) <= 300


def test_a_late_or_second_answer_is_dropped(make_data: Any, tmp_path: Any) -> None:
    def twice(job: Train, result: Trained) -> list[tuple[Any, Any]]:
        strangers = [(Train(job.round, "x-0"), result), (Train(job.round - 1, job.client), result), ("?", None)]
        return [*strangers, (job, result), (job, Failed("second")), (Evaluate("global", 0, None, "a"), result)]

    honest = [line["train_loss"] for line in federation_of(make_data, tmp_path / "honest").rounds()]
    lines = list(federation_of(make_data, tmp_path / "twice", twice).rounds())
    assert [line["train_loss"] for line in lines] == honest
    assert all(line["events"] == [] for line in lines)


@pytest.mark.parametrize("how", ["not finite", "an error"])
def test_a_state_that_is_none_is_not_committed(
    make_data: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    aggregate = FedAvg.aggregate

    def overflows(self: Any, server: Any, total: Any, at: Any) -> Any:
        if at.round == 0 and how == "an error":
            raise torch.linalg.LinAlgError("singular")
        state = aggregate(self, server, total, at)
        return map_tensors(state, lambda tensor: tensor * float("inf")) if at.round == 0 else state

    monkeypatch.setattr(FedAvg, "aggregate", overflows)
    federation = federation_of(make_data, tmp_path, scattered=True)
    before = federation.server
    rounds = federation.rounds()
    first = next(rounds)
    assert federation.server is before
    assert {event["reason"] for event in first["events"]} == {
        "the server's state would not be finite after this round; the old state stays"
    }
    assert federation.folder.committed_clients() == []
    assert next(rounds)["events"] == []
    assert federation.server is not before
    encode(federation.server, "server")  # refuses what is not finite


def test_an_error_in_a_method_is_its_authors_business(
    make_data: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any) -> Any:
        raise ValueError("a bug")

    monkeypatch.setattr(FedAvg, "aggregate", breaks)
    with pytest.raises(ValueError, match="a bug"):
        next(federation_of(make_data, tmp_path).rounds())
