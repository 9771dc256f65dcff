"""The round loop: who takes part, who is left out, what is scored and what a line of rounds.jsonl holds."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import protofed
from protofed.clients import Score
from protofed.federation.evaluation import global_view
from protofed.methods.fedproto import GlobalPrototypes
from protofed.records import ClassTable, decode

MISBEHAVING = f"{Path(__file__).parent / 'misbehaving.py'}"


CONTRACT = {
    "round": int,
    "participants": list,
    "train_loss": float,
    "cross_entropy": float,
    "loss_parts": dict,
    "accuracy": dict,
    "validation": type(None),
    "bytes": dict,
    "samples": int,
    "seconds": dict,
    "events": list,
}


@pytest.mark.parametrize("method", ["fedavg", "fedproto", "i2pfl"])
def test_a_line_is_as_the_contract_says(method: str, tiny_run: Any) -> None:
    run = tiny_run(method)
    lines = [json.loads(line) for line in (run.path / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2]
    for line in lines:
        assert set(line) == set(CONTRACT)
        assert all(isinstance(line[key], kind) for key, kind in CONTRACT.items())
        assert line["participants"] == ["a-0", "b-0", "c-0"]
        assert set(line["seconds"]) == {"train", "aggregate", "evaluate", "total"}
        for way in ("up", "down"):
            sizes = line["bytes"][way]
            assert set(sizes) == {"weights", "prototypes", "features", "other", "total"}
            assert sizes["total"] == sum(sizes[kind] for kind in ("weights", "prototypes", "features", "other"))
        assert line["train_loss"] == pytest.approx(sum(line["loss_parts"].values()))
        assert set(line["accuracy"]) == {"global", "personal"}
        personal = line["accuracy"]["personal"]
        assert set(personal) == {"a-0", "b-0", "c-0", "average"}
        assert personal["average"] == pytest.approx(sum(personal[f"{name}-0"] for name in "abc") / 3)
        if method == "fedproto":
            assert line["accuracy"]["global"] is None
        else:
            found = line["accuracy"]["global"]
            assert set(found) == {"a", "b", "c", "average", "pooled"}
            assert found["average"] == pytest.approx((found["a"] + found["b"] + found["c"]) / 3)
            assert personal["a-0"] == found["a"]
    assert {"run.json", "rounds.jsonl", "summary.json", "partition.npz", "broadcast.safetensors"} <= {
        path.name for path in run.path.iterdir()
    }


def test_bytes_down_are_the_length_of_what_is_sent(tiny_run: Any) -> None:
    """The broadcast of the round after the last is kept in the folder; it is as long as any other here."""
    run = tiny_run("fedavg")
    length = (run.path / "broadcast.safetensors").stat().st_size
    assert run.rounds[-1]["bytes"]["down"]["total"] == 3 * length
    summary = run.summary["bytes"]
    assert summary["down"]["total"] == sum(record["bytes"]["down"]["total"] for record in run.rounds)
    assert summary["up"]["total"] == sum(record["bytes"]["up"]["total"] for record in run.rounds)


def test_pooled_is_over_all_test_images(make_data: Any, tiny_run: Any) -> None:
    one = make_data(["a"], name="sizes", test=8)
    make_data(["b"], name="sizes", test=20)
    for record in tiny_run("fedavg", one).rounds:
        found = record["accuracy"]["global"]
        assert found["pooled"] == pytest.approx((8 * found["a"] + 20 * found["b"]) / 28)
        assert found["average"] == pytest.approx((found["a"] + found["b"]) / 2)


# Participation


def test_participation_is_the_same_for_all_methods(tiny_run: Any) -> None:
    options: dict[str, Any] = {"protocol": "equal=2", "participation": 0.5, "rounds": 4}
    drawn = [
        [record["participants"] for record in tiny_run(method, **options).rounds]
        for method in ("fedavg", "fedproto", "i2pfl", "fedavg")
    ]
    assert drawn[0] == drawn[1] == drawn[2] == drawn[3]
    assert all(len(clients) == 3 for clients in drawn[0])
    assert len({tuple(clients) for clients in drawn[0]}) > 1
    assert all(clients == sorted(clients) for clients in drawn[0])
    other = [record["participants"] for record in tiny_run("fedavg", **options, seed=1).rounds]
    assert other != drawn[0]


@pytest.mark.parametrize(("participation", "expected"), [(0.01, 1), (1 / 3, 1), (0.34, 2), (2 / 3, 2), (1.0, 3)])
def test_how_many_take_part(participation: float, expected: int, tiny_run: Any) -> None:
    assert len(tiny_run("fedavg", participation=participation, rounds=1).rounds[0]["participants"]) == expected


def test_who_sits_out_keeps_its_state_and_is_scored(tiny_run: Any) -> None:
    run = tiny_run("fedproto", participation=0.3, rounds=1)
    (who,) = run.rounds[0]["participants"]
    assert [path.name for path in (run.path / "clients").iterdir()] == [f"{who}.safetensors"]
    assert set(run.rounds[0]["accuracy"]["personal"]) == {"a-0", "b-0", "c-0", "average"}


# Clients that fail


@pytest.mark.parametrize("engine", ["loop", "workers"])
def test_a_failing_client_is_left_out(engine: str, tiny_run: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "protofed"):
        run = tiny_run(f"{MISBEHAVING}:Breaks", engine=engine, workers=2)
    for record in run.rounds:
        assert record["participants"] == ["a-0", "b-0", "c-0"]
        (event,) = record["events"]
        assert event["client"] == "b-0"
        assert "no luck at b-0" in event["reason"]
        assert record["train_loss"] is not None
    assert any("b-0" in message and "no luck" in message for message in caplog.messages)
    assert not (run.path / "clients/b-0.safetensors").exists()
    assert run.complete


def test_without_the_failing_client_the_others_go_on_as_if_alone(tiny_run: Any) -> None:
    broken, without = tiny_run(f"{MISBEHAVING}:Breaks"), tiny_run("fedavg", domains="a,c")
    assert (broken.path / "model.safetensors").read_bytes() == (without.path / "model.safetensors").read_bytes()
    # What was sent to the client that failed was sent; what it never sent is not counted.
    one, other = broken.rounds[0]["bytes"], without.rounds[0]["bytes"]
    assert one["up"]["total"] == other["up"]["total"]
    assert one["down"]["total"] == other["down"]["total"] * 3 / 2


def test_a_client_that_fails_later_keeps_its_last_state(tiny_run: Any) -> None:
    run, before = tiny_run(f"{MISBEHAVING}:Breaks", set={"since": 1}), tiny_run("fedavg", rounds=1)
    assert [len(record["events"]) for record in run.rounds] == [0, 1]
    file = "clients/b-0.safetensors"
    assert (run.path / file).read_bytes() == (before.path / file).read_bytes()


@pytest.mark.parametrize("engine", ["loop", "workers"])
def test_a_diverging_client_is_left_out(engine: str, tiny_run: Any) -> None:
    run = tiny_run(f"{MISBEHAVING}:Diverges", engine=engine, workers=2)
    for record in run.rounds:
        (event,) = record["events"]
        assert event["client"] == "b-0"
        assert "not finite" in event["reason"]
        assert "b-0" in event["reason"]
    assert not (run.path / "clients/b-0.safetensors").exists()
    assert list((run.path / "clients").glob("*.round-*")) == []


def test_all_clients_failing_ends_the_run_and_says_why(tiny_run: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="every client failed in round 2; the first: ValueError: no luck at a-0"):
        tiny_run(f"{MISBEHAVING}:Breaks", set={"who": "abc", "since": 1}, name="dead")
    assert len((tmp_path / "dead/rounds.jsonl").read_text().splitlines()) == 1
    with pytest.raises(RuntimeError, match="every client failed in round 2"):  # and it can be tried again
        protofed.run(out=tmp_path / "dead", resume=True)


def test_failing_in_upload(make_data: Any, tiny_run: Any) -> None:
    run = tiny_run(f"{MISBEHAVING}:Choosy", make_data(train={"a": 24, "b": 16, "c": 24}), set={"least": 20})
    assert [event["reason"] for event in run.rounds[0]["events"]] == ["RuntimeError: too few"]


# Evaluation


def test_the_server_is_told_who_took_part(tiny_run: Any) -> None:
    run = tiny_run(f"{MISBEHAVING}:AggregatesWithout", rounds=1, set={"who": "b"})
    assert [event["client"] for event in run.rounds[0]["events"]] == ["b-0"]


@pytest.mark.parametrize("who", ["a-0", "b-0", "c-0"])
def test_members_of_an_ensemble_count_as_the_method_says(who: str, tiny_run: Any) -> None:
    run = tiny_run(f"{MISBEHAVING}:OneCounts", rounds=1, set={"who": who}, ensemble=True, evaluate_local=True)
    accuracy = run.rounds[0]["accuracy"]
    assert accuracy["global"][who[0]] == accuracy["local"][who]


def test_evaluate_every(tiny_run: Any) -> None:
    run = tiny_run("fedavg", rounds=5, evaluate_every=2)
    assert [record["accuracy"] is not None for record in run.rounds] == [False, True, False, True, True]
    every = tiny_run("fedavg", rounds=5)
    assert (run.path / "model.safetensors").read_bytes() == (every.path / "model.safetensors").read_bytes()
    assert run.summary["accuracy_final"] == every.summary["accuracy_final"]
    evaluated = [record["accuracy"]["global"]["average"] for record in run.rounds if record["accuracy"]]
    assert run.summary["accuracy"]["global"]["average"] == pytest.approx(sum(evaluated) / 3)


def test_summary_is_the_mean_of_the_last_five(tiny_run: Any) -> None:
    run = tiny_run("fedavg", rounds=7)
    last = [record["accuracy"]["global"]["pooled"] for record in run.rounds][-5:]
    assert run.summary["accuracy"]["global"]["pooled"] == pytest.approx(sum(last) / 5)
    assert run.summary["accuracy_final"] == run.rounds[-1]["accuracy"]
    assert run.summary["rounds"] == 7
    assert run.summary["status"] == "complete"


def test_a_held_out_domain_counts_apart(tiny_run: Any) -> None:
    run = tiny_run("fedavg", protocol="leave-out=b")
    for record in run.rounds:
        found = record["accuracy"]["global"]
        assert set(found) == {"a", "b", "c", "average", "pooled", "held_out"}
        assert found["held_out"] == {"b": found["b"]}
        assert found["average"] == pytest.approx((found["a"] + found["c"]) / 2)
        assert found["pooled"] == pytest.approx((found["a"] + found["c"]) / 2)  # equal test sizes
        assert set(record["accuracy"]["personal"]) == {"a-0", "c-0", "average"}
    assert run.config["partition"]["held_out"] == ["b"]


@pytest.mark.parametrize("method", ["fedavg", "fedproto"])
def test_label_skew_is_scored_on_the_clients_own_holdout(method: str, tiny_run: Any) -> None:
    run = tiny_run(method, protocol="iid=4", rounds=3, lr=0.05)
    assert run.config["personal_test"] == "own hold-out"
    sizes = {client: part["holdout"] for client, part in run.config["partition"]["clients"].items()}
    assert all(sizes.values())
    for record in run.rounds:
        personal = record["accuracy"]["personal"]
        assert set(personal) == {*sizes, "average"}
        for client, size in sizes.items():
            correct = personal[client] * size
            assert correct == pytest.approx(round(correct))
    assert tiny_run(method, rounds=1).config["personal_test"] == "own domain's test set"


def test_clients_without_a_shared_model_or_holdout_are_scored_on_the_only_domain(make_data: Any, tiny_run: Any) -> None:
    dealt = {"protocol": "iid=3", "rounds": 1, "set": {"data.holdout": 0}}
    run = tiny_run("fedproto", make_data(["a"]), **dealt)
    assert set(run.summary["accuracy"]["personal"]) == {"client-0", "client-1", "client-2", "average"}
    size = run.config["data"]["domains"]["a"]["test"]
    assert all(len(each.labels) == size for each in run.predictions().views["personal"].values())
    assert tiny_run("fedavg", make_data(["a"]), **dealt).summary["accuracy"]["personal"] is None, "it has a global view"
    several = tiny_run("fedproto", make_data(["a", "b"]), **dealt)
    assert several.summary["accuracy"]["personal"] is None, "images of two domains are pooled"


def test_local_view(tiny_run: Any) -> None:
    run = tiny_run("fedavg", evaluate_local=True, epochs=3, lr=0.05)
    accuracy = run.rounds[-1]["accuracy"]
    assert set(accuracy["local"]) == {"a-0", "b-0", "c-0", "average"}
    plain = tiny_run("fedavg", epochs=3, lr=0.05)
    assert plain.rounds[-1]["accuracy"] == {key: accuracy[key] for key in ("global", "personal")}
    # The first round's local models never saw the classes their domain lacks.
    assert accuracy["local"] != accuracy["personal"]


def test_many_clients_are_summed_up(make_data: Any, tiny_run: Any) -> None:
    data = make_data(["a"], train=404)
    run = tiny_run("fedproto", data, protocol="equal=101", rounds=1, set={"model.hidden": 4})
    personal = run.rounds[0]["accuracy"]["personal"]
    assert set(personal) == {"average", "quantiles"}
    assert set(personal["quantiles"]) == {"0.25", "0.5", "0.75"}


# Folders


def test_a_second_process_is_refused(tiny_run: Any) -> None:
    refusals: list[str] = []

    class Intruder:
        def round_end(self, run: Any, record: Any) -> None:
            child = os.fork()
            if child == 0:
                try:
                    protofed.run(out=run.path, resume=True)
                except protofed.UserError as error:
                    os._exit(7 if "another process is using" in str(error) else 8)
                os._exit(9)
            refusals.append(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))

    run = tiny_run("fedavg", callbacks=[Intruder()], name="locked")
    assert refusals == ["7", "7"]
    assert run.complete
    assert protofed.run(out=run.path, resume=True).complete  # and free again afterwards


def test_an_existing_folder_is_refused(tiny_run: Any, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("years of work")
    with pytest.raises(protofed.UserError, match="already exists"):
        tiny_run("fedavg", name="mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_resume_refuses_other_options(tiny_run: Any) -> None:
    run = tiny_run("fedavg")
    with pytest.raises(protofed.UserError, match=r"lr \(was 0.01, now 0.5\)"):
        protofed.run(out=run.path, resume=True, lr=0.5)
    with pytest.raises(protofed.UserError, match="2 rounds are done"):
        protofed.run(out=run.path, resume=True, rounds=1)
    with pytest.raises(protofed.UserError, match="not a run folder"):
        protofed.run(out=run.path / "clients", resume=True)


def test_a_complete_run_resumes_to_itself(tiny_run: Any) -> None:
    run = tiny_run("fedavg")
    before = (run.path / "rounds.jsonl").read_bytes()
    again = protofed.run(out=run.path, resume=True)
    assert again.summary == run.summary
    assert (run.path / "rounds.jsonl").read_bytes() == before


def test_callbacks_follow_the_run(tiny_run: Any) -> None:
    seen: list[Any] = []

    class Watcher:
        def round_end(self, run: Any, record: Any) -> None:
            seen.append((record["round"], len(run.rounds)))

        def run_end(self, run: Any) -> None:
            seen.append(run.summary["status"])

    tiny_run("fedavg", callbacks=[Watcher()])
    assert seen == [(1, 1), (2, 2), "complete"]


def test_the_model_of_a_run(tiny_run: Any) -> None:
    run = tiny_run("fedavg", rounds=10, epochs=2, lr=0.05)
    model = run.model()
    assert not model.training
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 4)
    with pytest.raises(protofed.UserError, match="no global model"):
        tiny_run("fedproto").model()


def test_the_newcomers_broadcast_can_be_read(tiny_run: Any) -> None:
    run = tiny_run("fedproto")
    blob = (run.path / "broadcast.safetensors").read_bytes()
    G = decode(blob, GlobalPrototypes(ClassTable.empty(4, 16, torch.ones(1))), "server").G
    assert torch.equal(G.rows, run.prototypes()["rows"])


def test_an_average_is_over_domains_and_pooled_over_images_without_those_held_out() -> None:
    found = global_view({"a": Score(1, 2), "b": Score(9, 10), "c": Score(3, 3)}, ("b",))
    assert (found["average"], found["pooled"]) == (pytest.approx((1 / 2 + 1) / 2), pytest.approx(4 / 5))
    assert found["held_out"] == {"b": pytest.approx(0.9)}
