"""What a run says it has cost: every different upload counts, and nobody is charged for rounds it sat out."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from protofed.clients import Failed, Job, Result, Train
from protofed.engines.loop import LoopEngine
from protofed.federation import Federation, RoundPolicy, RunFolder, TooFewClients
from protofed.guards import PrivacyLedger
from protofed.records import Message
from protofed.runs.assembly import assemble
from protofed.runs.options import make_options

OPTIONS: dict[str, Any] = {"method": "fedavg", "model": "mlp", "set": {"model.hidden": 4}}


class Flaky(LoopEngine):
    """A client does not answer, so many times."""

    failures = 0
    client = "c-0"

    def perform(self, jobs: Sequence[tuple[Job, Message]]) -> Iterator[tuple[Job, Result]]:
        for job, result in super().perform(jobs):
            if isinstance(job, Train) and job.client == self.client and self.failures:
                self.failures -= 1
                yield job, Failed("no luck")
            else:
                yield job, result


def folder_at(path: Any) -> RunFolder:
    folder = RunFolder(path)
    folder.create()
    return folder


def ledger_of(assembly: Any) -> PrivacyLedger:
    context, templates = assembly.context, assembly.prepared.templates
    return PrivacyLedger(context.guard, context.method, context.plan, context.sizes, templates.upload)


@pytest.mark.parametrize(("source", "uploads"), [("system", 4), ("seed", 1)])
@pytest.mark.parametrize("killed", [False, True])
def test_retries_count_where_they_bring_other_uploads(
    make_data: Any, tmp_path: Any, source: str, uploads: int, killed: bool
) -> None:
    """Also where the server was killed in between and resumed."""
    guard = f"clip=1,noise=2,source={source}"
    options = make_options({**OPTIONS, "data": make_data(("a", "b", "c")), "rounds": 2, "guard": guard})
    folder = folder_at(tmp_path / "run")
    assembly = assemble(options, folder.clients)
    engine = Flaky(assembly.prepared)
    engine.failures = 3
    federation = Federation(assembly.prepared, engine, folder, RoundPolicy(min_clients=3))
    for _ in range(3):
        with pytest.raises(TooFewClients):
            next(federation.rounds())
        if killed:
            federation = Federation(assembly.prepared, engine, folder, RoundPolicy(min_clients=3))
            federation.resume()
    first, second = list(federation.rounds())
    ledger = ledger_of(assembly)
    told = federation.privacy()
    assert told is not None
    assert first["privacy"]["epsilon"] == pytest.approx(ledger.spent_by("a-0", (0,) * uploads))
    assert second["privacy"]["epsilon"] == pytest.approx(ledger.spent_by("a-0", (0,) * uploads + (1,)))
    assert told["clients"]["a-0"] == pytest.approx(second["privacy"]["epsilon"])
    assert told["clients"]["c-0"] == pytest.approx(ledger.spent_by("c-0", (0, 1)))
    assert first.get("repeated_uploads", {}) == ({"a-0": 4, "b-0": 4} if uploads > 1 else {})
    resumed = Federation(assembly.prepared, engine, folder, RoundPolicy(min_clients=3))
    resumed.resume()
    assert resumed.privacy() == told


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_a_late_client_is_not_charged_for_rounds_before_it_came(
    make_data: Any, tmp_path: Any, participation: float
) -> None:
    """And the others for those that they were drawn for then, not for those they would be drawn for now."""
    names = ("a", "b", "c", "d")
    options = {**OPTIONS, "data": make_data((*names, "e")), "rounds": 4, "guard": "clip=1,noise=4"}
    folder = folder_at(tmp_path / "run")
    few, everyone = (
        assemble(make_options({**options, "domains": ",".join(domains)}), folder.clients)
        for domains in (names, (*names, "e"))
    )
    policy = RoundPolicy(participation=participation)
    federation = Federation(few.prepared, LoopEngine(everyone.prepared), folder, policy)
    rounds = federation.rounds()
    took_part = [next(rounds)["participants"] for _ in range(3)]
    federation.admit(everyone.prepared)
    took_part.append(next(rounds)["participants"])
    told, ledger = federation.privacy(), ledger_of(everyone)
    assert told is not None
    for client in everyone.context.partition.clients:
        own = tuple(round for round, clients in enumerate(took_part) if client in clients)
        assert told["clients"][client] == pytest.approx(ledger.spent_by(client, own))
    assert told["clients"]["e-0"] < told["clients"]["a-0"] or participation < 1
