"""What summary.json says about time: on the clock, and of the processor where all of the run was done in one go."""

import pytest

import protofed
from protofed.testing import toy_data

SMALL = {"method": "fedavg", "model": "mlp", "epochs": 1}


class Stop(Exception):
    """Ends a run after its first round."""


class StopsAfterOne:
    """Callback: interrupts."""

    def round_end(self, _run, _record):
        raise Stop


@pytest.mark.parametrize("engine", [{"engine": "loop"}, {"engine": "workers", "workers": 2}])
def test_processor_time_is_kept(tmp_path, engine):
    data = toy_data(tmp_path / "data")
    seconds = protofed.run(**SMALL, **engine, data=data, rounds=2, out=tmp_path / "run").summary["seconds"]
    assert seconds["cpu"] > 0
    assert seconds["wall"] >= seconds["total"]


def test_processor_time_is_unknown_where_an_earlier_process_did_a_part(tmp_path):
    chosen = {**SMALL, "engine": "loop", "data": toy_data(tmp_path / "data"), "rounds": 2, "out": tmp_path / "run"}
    with pytest.raises(Stop):
        protofed.run(**chosen, callbacks=[StopsAfterOne()])
    assert protofed.run(**chosen, resume=True).summary["seconds"]["cpu"] is None
