"""Told before it starts: how long a run takes, and that it would not fit."""

import pytest

import protofed
from protofed import system
from protofed.errors import UserError


class Listener:
    """Callback: what was foretold, and what came."""

    def __init__(self):
        self.seconds = []
        self.rounds = 0

    def run_estimate(self, _run, seconds):
        assert self.rounds == 0
        self.seconds.append(seconds)

    def runs_estimate(self, seconds):
        assert self.rounds == 0
        self.seconds.append(seconds)

    def round_end(self, _run, _record):
        self.rounds += 1


@pytest.mark.usefixtures("no_garbage_collection")
def test_an_estimate_is_of_the_right_size_and_changes_nothing(tiny_run, same_results):
    listener = Listener()
    told = tiny_run("fedavg", rounds=4, callbacks=[listener])
    same_results(told, tiny_run("fedavg", rounds=4))
    (seconds,) = listener.seconds
    taken = sum(record["seconds"]["train"] for record in told.rounds)
    assert taken / 20 < seconds < taken * 20
    longer = Listener()
    tiny_run("fedavg", rounds=8, epochs=6, callbacks=[longer])
    # Twelve times the work; on a busy machine the one batch that is timed takes several times as long as another.
    assert longer.seconds[0] > seconds


def test_a_comparison_is_estimated_as_a_whole(tiny_data, tmp_path):
    listener = Listener()
    options = {"data": tiny_data, "model": "mlp", "rounds": 2, "engine": "loop"}
    protofed.compare(["fedavg", "fedprox"], out=tmp_path / "c", callbacks=[listener], **options)
    assert len(listener.seconds) == 1
    again = Listener()
    protofed.compare(["fedavg", "fedprox"], out=tmp_path / "c", callbacks=[again], **options)
    assert again.seconds == []


def test_what_does_not_fit_is_refused_before_anything_is_written(tiny_run, tiny_data, tmp_path, monkeypatch):
    monkeypatch.setattr(system, "available_memory", lambda: 1000)
    monkeypatch.setattr("protofed.runs.estimate.available_memory", lambda: 1000)
    with pytest.raises(UserError, match=r"needs about .* GB of memory, but only 0\.0 GB are free; lower --batch"):
        tiny_run("fedavg", name="large")
    assert not (tmp_path / "large").exists()
    with pytest.raises(UserError, match="lower --batch"):
        protofed.compare(["fedavg"], out=tmp_path / "c", data=tiny_data, model="mlp", rounds=1, engine="loop")


def test_memory_of_this_machine_is_known():
    there = system.available_memory()
    assert there is None or there > 1_000_000


def test_tensorboard_has_every_round(tiny_run):
    pytest.importorskip("tensorboard", reason="pip install 'protofed[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from protofed.runs.tensorboard import TensorBoard

    run = tiny_run("fedavg", rounds=3, callbacks=[TensorBoard()])
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    found = events.Scalars("accuracy/global/average")
    assert [event.step for event in found] == [1, 2, 3]
    assert [event.value for event in found] == pytest.approx(
        [record["accuracy"]["global"]["average"] for record in run.rounds]
    )
    assert "bytes/up/total" in events.Tags()["scalars"]
