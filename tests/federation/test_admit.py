"""Clients that come while a run is under way: ledger, evaluation and sums know the same members."""

from typing import Any

from protofed.engines.loop import LoopEngine
from protofed.federation import Federation, RoundPolicy, RunFolder
from protofed.runs.assembly import assemble
from protofed.runs.options import make_options


def test_whoever_is_admitted_is_counted_everywhere(make_data: Any, tmp_path: Any) -> None:
    data = make_data(("a", "b", "c"))
    options = {"method": "fedavg", "data": data, "model": "mlp", "rounds": 2, "guard": "clip=1,noise=4,train=private"}
    folder = RunFolder(tmp_path / "run")
    folder.create()
    few, all_three = (
        assemble(make_options({**options, "domains": domains}), folder.clients) for domains in ("a,b", "a,b,c")
    )
    federation = Federation(few.prepared, LoopEngine(all_three.prepared), folder, RoundPolicy())
    rounds = federation.rounds()
    assert next(rounds)["participants"] == ["a-0", "b-0"]
    federation.admit(all_three.prepared)
    second = next(rounds)
    assert second["participants"] == ["a-0", "b-0", "c-0"]
    assert set(second["accuracy"]["personal"]) == {"a-0", "b-0", "c-0", "average"}
    spent = federation.privacy()
    assert spent is not None
    assert set(spent["clients"]) == {"a-0", "b-0", "c-0"}
    assert spent["clients"]["c-0"] > 0
