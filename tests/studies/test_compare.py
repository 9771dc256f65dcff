"""Comparisons: equal conditions, runs side by side that survive failures and interruptions, honest results."""

import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import protofed
from protofed.cli import main
from protofed.errors import UserError
from protofed.federation import RunFolder
from protofed.registry import method_names
from protofed.runs.assembly import assemble
from protofed.runs.options import make_options
from protofed.studies import schedule
from protofed.studies.comparison import accuracy_over_seeds
from protofed.studies.schedule import PlannedRun, Shard, allocate_cores, folder_lock

TINY: dict[str, Any] = {"model": "mlp", "rounds": 2, "batch": 8, "set": {"model.hidden": 16}}
WORDS = ["--model", "mlp", "--rounds", "2", "--batch", "8", "--set", "model.hidden=16"]

SLOW = """
import os, time
from protofed.methods.fedavg import FedAvg

class Slow(FedAvg):
    '''Averages when it gets round to it.'''

    def aggregate(self, server, total, at):
        time.sleep(float(os.environ.get('SLOW', 0)))
        return super().aggregate(server, total, at)
"""
BROKEN = """
import os
from protofed.methods.fedavg import FedAvg

class Broken(FedAvg):
    '''Fails in its second round.'''

    def aggregate(self, server, total, at):
        if at.round == 1 and at.participants and not os.path.exists({mended!r}):
            raise ZeroDivisionError('a mistake in the method')
        return super().aggregate(server, total, at)

class Dead(FedAvg):
    '''Takes its process with it.'''

    def aggregate(self, server, total, at):
        if at.round == 1 and at.participants:
            os._exit(9)
        return super().aggregate(server, total, at)
"""


@pytest.fixture
def compare(tmp_path: Path, tiny_data: str):
    def start(methods: Any, *, name: str = "cmp", **options: Any) -> protofed.Comparison:
        settings = {**TINY["set"], **options.pop("set", {})}
        return protofed.compare(
            methods, out=tmp_path / name, data=tiny_data, **{**TINY, "engine": "loop", **options, "set": settings}
        )

    return start


def runs_in(folder: Path) -> dict[str, int]:
    """The run folders and when each was summed up."""
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("*/summary.json")}


# Equal conditions


def test_a_client_that_was_not_scored_is_left_out():
    found = accuracy_over_seeds(
        [{"a-0": 0.5, "a-1": None, "b-0": None, "average": 0.5}, {"a-0": 0.7, "a-1": 0.9, "b-0": None, "average": 0.8}],
        {"a-0": "a", "a-1": "a", "b-0": "b"},
    )
    assert found["per_client"] == {
        "a-0": {"mean": pytest.approx(0.6), "std": pytest.approx(0.02**0.5), "seeds": [0.5, 0.7]}
    }
    assert found["per_domain"]["a"]["seeds"] == [0.5, pytest.approx(0.8)]
    assert found["worst_client"]["names"] == ["a-0", "a-0"]


def test_every_method_starts_from_the_same_weights_partition_and_draws(tiny_data: str, tmp_path: Path) -> None:
    def ready(method: str, seed: int) -> Any:
        # A residual network, because adapters need one.
        given = {"data": tiny_data, "protocol": "equal=2", "model": "resnet10", "set": {"model.width": 4}}
        return assemble(make_options({**given, "method": method, "seed": seed}), tmp_path / "clients").context

    first = ready("fedavg", 0)
    weights = first.model.state_dict()
    compared = 0
    for method in method_names():
        context = ready(method, 0)
        if not context.method.pools_data:
            assert context.partition.hash == first.partition.hash, method
        own = context.model.state_dict()
        # A head that is computed and not trained has no start.
        computed = ("fc.",) if context.plan.epochs[0] == 0 else ()
        names = [name for name in own if name in weights and not name.startswith(computed)]
        common = [name for name in names if own[name].shape == weights[name].shape]
        compared += bool(common)
        assert all(torch.equal(own[name], weights[name]) for name in common), method
    assert compared > 20
    other = ready("fedavg", 1)
    assert other.partition.hash != first.partition.hash
    assert not torch.equal(other.model.state_dict()["fc.weight"], weights["fc.weight"])


def test_every_method_draws_the_same_clients(compare, tmp_path: Path) -> None:
    options = {"protocol": "equal=3", "participation": 0.4, "rounds": 4}
    result = compare(["fedavg", "fedproto", "i2pfl"], seeds=[0, 1], **options)
    drawn: dict[int, set[str]] = {0: set(), 1: set()}
    partitions: dict[int, set[bytes]] = {0: set(), 1: set()}
    for entry in result.content["methods"].values():
        for seed, run in zip(entry["seeds"], entry["runs"], strict=True):
            drawn[seed].add(
                json.dumps([record["participants"] for record in protofed.Run(tmp_path / "cmp" / run).rounds])
            )
            partitions[seed].add((tmp_path / "cmp" / run / "partition.npz").read_bytes())
    assert [len(drawn[seed]) for seed in drawn] == [1, 1]
    assert [len(partitions[seed]) for seed in partitions] == [1, 1]
    assert drawn[0] != drawn[1]


def test_a_run_of_a_comparison_is_the_run_itself(compare, tiny_run, same_results, tmp_path: Path) -> None:
    result = compare(["fedavg", "i2pfl"], seeds=[0])
    alone = tiny_run("i2pfl")
    same_results(alone, tmp_path / "cmp" / result.content["methods"]["i2pfl"]["runs"][0])


# Results


def test_results(compare, tmp_path: Path) -> None:
    paper = {"fedavg": 0.5, "fedproto_avg": {"average": 0.6, "a": 0.7}}
    result = compare(["fedavg", "fedproto", "fedproto_avg"], seeds=[0, 1, 2], rounds=6, paper=paper)
    content = json.loads((tmp_path / "cmp" / "comparison.json").read_text())
    assert content == result.content
    assert content["complete"]
    assert content["missing"] == []
    assert content["baseline"] == "fedavg"
    entry = content["methods"]["fedproto_avg"]
    view = entry["global"]
    assert list(view["per_domain"]) == ["a", "b", "c"]
    runs = [protofed.Run(tmp_path / "cmp" / run) for run in entry["runs"]]
    scores = [run.summary["accuracy"]["global"] for run in runs]
    assert view["average"]["seeds"] == [score["average"] for score in scores]
    assert view["per_domain"]["b"]["seeds"] == [score["b"] for score in scores]
    assert view["worst_domain"]["seeds"] == [min(score[d] for d in "abc") for score in scores]
    assert view["test"]["seeds"] == 3
    assert entry["paper"] == {"view": "global", "average": 0.6, "a": 0.7}
    assert entry["bytes"]["up"]["total"] == runs[0].summary["bytes"]["up"]["total"]
    assert entry["seconds"] > 0
    # The baseline's own average is the target unless one is given.
    baseline = content["methods"]["fedavg"]["global"]
    assert content["target"]["global"] == baseline["average"]["mean"]
    assert baseline["test"] is None
    # Views do not mix: a method without a global model has no row there.
    assert content["methods"]["fedproto"]["global"] is None
    assert content["methods"]["fedproto"]["personal"]["test"]["tests"] == 2
    table = result.accuracy_table("global")
    assert [row[0] for row in table.rows] == ["fedavg", "fedproto_avg", "chance"]
    assert [row[table.columns.index("paper")] for row in table.rows] == ["50.00", "60.00", "-"]
    # Four classes, equally many test images of each in every domain.
    assert table.rows[-1][1:5] == ["25.00", "25.00", "25.00", "25.00"]
    table = result.accuracy_table("personal")
    assert len(table.rows) == 4
    assert "paper" not in table.columns
    assert "Personal view" in (tmp_path / "cmp" / "comparison.md").read_text()


def test_a_target(compare) -> None:
    found = compare(["fedavg"], target=0.01, seeds=[0, 1]).content["methods"]["fedavg"]["global"]
    assert found["rounds_to_target"]["seeds"] == [1, 1]
    never = compare(["fedavg"], target=1.0, seeds=[0, 1])
    assert never.content["methods"]["fedavg"]["global"]["bytes_to_target"]["mean"] is None
    assert never.convergence("global").rows[0][1:3] == ["-", "-"]


def test_held_out_domains_count_apart(compare) -> None:
    result = compare(["fedavg"], protocol="leave-out=b")
    view = result.content["methods"]["fedavg"]["global"]
    assert list(view["per_domain"]) == ["a", "c"]
    assert list(view["held_out"]) == ["b"]
    assert view["worst_domain"]["names"][0] in "ac"
    assert "b (held out)" in result.accuracy_table("global").columns


def test_clients_without_domains(compare) -> None:
    result = compare(["fedavg", "fedproto"], protocol="dirichlet=1,clients=3")
    view = result.content["methods"]["fedproto"]["personal"]
    assert view["per_domain"] == {}
    assert len(view["per_client"]) == 3
    assert "worst client" in result.accuracy_table("personal").columns


def test_settings_for_one_method_and_variants(compare, tmp_path: Path) -> None:
    compare(["fedprox", "fedproto"], set={"fedproto.lam": 0.5}, name="one")
    variants = {
        "weak pull": {"method": "fedproto", "set": {"lam": 0.1}},
        "strong pull": {"method": "fedproto", "set": {"lam": 9}, "lr": 0.02},
        "fedproto": {},
    }
    result = compare(variants, name="two")
    assert result.content["baseline"] == "weak pull"
    assert {label: entry["knobs"]["lam"] for label, entry in result.content["methods"].items()} == {
        "weak pull": 0.1,
        "strong pull": 9,
        "fedproto": 1,
    }
    assert len(runs_in(tmp_path / "two")) == 3
    again = compare({"one name": {"method": "fedproto"}, "another": {"method": "fedproto"}}, name="two")
    assert len(runs_in(tmp_path / "two")) == 3, "what a run is called does not define it"
    assert len(again.content["methods"]) == 2


# Runs are found again


def test_finished_runs_are_not_repeated(compare, tmp_path: Path) -> None:
    class Watcher:
        def __init__(self) -> None:
            self.todo: list[str] = []
            self.rounds: list[tuple[str, int]] = []

        def runs_start(self, runs: list[PlannedRun], unfinished: list[PlannedRun]) -> None:
            self.todo = [run.title for run in unfinished]

        def round_end(self, run: protofed.Run, record: dict[str, Any]) -> None:
            self.rounds.append((run.path.name, record["round"]))

    compare(["fedavg"], seeds=[0])
    before = runs_in(tmp_path / "cmp")
    watcher = Watcher()
    compare(["fedavg", "fedproto"], seeds=[0, 1], callbacks=[watcher], engine="auto")
    assert watcher.todo == ["fedproto, seed 0", "fedavg, seed 1", "fedproto, seed 1"]
    assert len(watcher.rounds) == 6
    after = runs_in(tmp_path / "cmp")
    assert len(after) == 4
    assert before.items() <= after.items()
    compare(["fedavg"], seeds=[0], lr=0.02)
    assert len(runs_in(tmp_path / "cmp")) == 5


def test_a_run_is_named_by_what_defines_it(tmp_path: Path) -> None:
    def path(**options: Any) -> Path:
        return PlannedRun("label", tmp_path, make_options({"method": "fedavg", **options})).path

    assert path() == path(lr=0.01) == path(engine="loop", workers=3, plugin=["mine.py"])
    assert len({path(), path(lr=0.02), path(seed=1), path(set={"model.hidden": 2}), path(data="x")}) == 5
    assert path(data_root="there") == path(data_root="./here/../there") == path(data_root=str(Path("there").resolve()))
    assert path(data_root="there") != path(data_root="elsewhere")


def test_a_folder_with_another_run_in_it_is_refused(compare, tmp_path: Path) -> None:
    run = compare(["fedavg"]).content["methods"]["fedavg"]["runs"][0]
    file = tmp_path / "cmp" / run / "run.json"
    file.write_text(file.read_text().replace('"rounds": 2', '"rounds": 3'))
    with pytest.raises(UserError, match="holds a run with other options"):
        compare(["fedavg"])


def test_a_run_that_had_hardly_begun_begins_again(compare, tmp_path: Path) -> None:
    run = compare(["fedavg"]).content["methods"]["fedavg"]["runs"][0]
    for name in ("run.json", "summary.json"):
        (tmp_path / "cmp" / run / name).unlink()
    assert compare(["fedavg"]).content["complete"]


# Side by side


@pytest.mark.parametrize(
    ("engine", "workers", "runs", "cores", "expected"),
    [
        ("auto", None, 9, 4, (4, {"engine": "loop"})),
        ("auto", None, 4, 4, (4, {"engine": "loop"})),
        ("auto", None, 2, 4, (2, {"engine": "workers", "workers": 2})),
        ("auto", None, 1, 4, (1, {"engine": "workers", "workers": 4})),
        ("auto", None, 3, 1, (1, {"engine": "loop"})),
        ("auto", 2, 9, 4, (2, {})),
        ("loop", None, 3, 4, (3, {})),
        ("workers", None, 9, 4, (1, {})),
        ("workers", 8, 9, 4, (1, {})),
    ],
)
def test_every_core_has_one_process(engine, workers, runs, cores, expected, monkeypatch) -> None:
    monkeypatch.setattr(schedule, "cores", lambda: cores)
    assert allocate_cores(make_options({"engine": engine, "workers": workers}), runs) == expected


def test_methods_of_the_user(compare, tmp_path: Path) -> None:
    from protofed.methods.fedavg import FedAvg

    (tmp_path / "mine.py").write_text(
        "from protofed import register\n" + SLOW + "\n@register('mine')\nclass Mine(Slow):\n    '''Mine.'''\n"
    )
    with protofed.registry.registered(type("Here", (FedAvg,), {"__doc__": "Known in this process only."})) as here:
        own = f"{tmp_path}/mine.py:Slow"
        result = compare([here, own, "mine"], plugin=f"{tmp_path}/mine.py")
    assert not result.failures
    scores = {json.dumps(entry["global"]["average"]) for entry in result.content["methods"].values()}
    assert len(scores) == 1, "all are fedavg under another name"


def test_warnings_are_said_once(compare, caplog) -> None:
    compare(["fedavg", "fedproto"], seeds=[0, 1], samples_per_client=1000)
    said = [record.getMessage().split(": ", 1)[1] for record in caplog.records]
    assert said
    assert len(said) == len(set(said))


def test_a_failing_run_does_not_lose_the_others(tiny_data: str, tmp_path: Path, capfd) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(BROKEN.format(mended=str(tmp_path / "mended")))
    words = ["compare", f"{broken}:Broken", f"{broken}:Dead", "fedavg", "--data", tiny_data, *WORDS, "--engine", "loop"]
    words += ["--seeds", "0,1", "--out", str(tmp_path / "cmp")]
    assert main(words) == 1
    shown = capfd.readouterr()
    assert "seed 0: ZeroDivisionError: a mistake in the method" in shown.err
    assert "its process ended with code 9" in shown.err
    assert shown.err.count("error: ") == 4
    content = json.loads((tmp_path / "cmp" / "comparison.json").read_text())
    assert content["methods"]["fedavg"]["global"]["average"]["mean"] > 0
    assert content["methods"][f"{broken}:Broken"]["runs"] == []
    assert not content["complete"]
    assert [entry["failed"] for entry in content["missing"]] == [True] * 4

    (tmp_path / "mended").touch()
    done = runs_in(tmp_path / "cmp")
    assert main([*words, "--json"]) == 1
    shown = capfd.readouterr()
    content = json.loads(shown.out)
    assert content["methods"][f"{broken}:Broken"]["seeds"] == [0, 1]
    assert len(content["missing"]) == 2
    assert done.items() <= runs_in(tmp_path / "cmp").items()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"methods": ["fedavg", "nosuch"]}, "unknown method"),
        ({"methods": []}, "nothing to compare"),
        ({"set": {"nosuch": 1}}, "none of the methods"),
        ({"set": {"i2pfl.tau": 1}}, "not among the compared methods"),
        ({"set": {"fedproto.lam": "x"}}, "lam=x is not valid"),
        ({"methods": ["fedproto", "fedavg"], "model": "mlp,resnet10"}, "fedavg exchanges weights"),
        ({"baseline": "i2pfl"}, "unknown baseline"),
        ({"target": 80}, "an accuracy"),
        ({"shard": "3/2"}, "between 1 and N"),
        ({"shard": "one"}, "--shard takes K/N"),
        ({"seed": 1}, "has no option seed"),
        ({"preset": "nosuch"}, "none of the methods has such a preset"),
    ],
)
def test_mistakes_show_before_anything_starts(options, text, compare, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=text):
        compare(**{"methods": ["fedavg", "fedproto"], **options})
    assert not (tmp_path / "cmp").exists()


# Several machines


def test_shards_share_a_folder(compare, tmp_path: Path) -> None:
    names = ["fedavg", "fedproto", "fedproto_avg"]
    first = compare(names, seeds=[0, 1], shard="1/2")
    here = runs_in(tmp_path / "cmp")
    assert len(here) == 3
    assert not first.failures
    assert not first.content["complete"]
    assert len(first.missing()) == 3
    assert "Not complete" in (tmp_path / "cmp" / "comparison.md").read_text()
    second = compare(names, seeds=[0, 1], shard="2/2")
    assert second.content["complete"]
    everything = runs_in(tmp_path / "cmp")
    assert len(everything) == 6
    assert here.items() <= everything.items(), "one shard does not repeat another's runs"
    whole = compare(names, seeds=[0, 1], name="whole")
    for name in names:
        assert whole.content["methods"][name]["personal"] == second.content["methods"][name]["personal"]


def test_shards_deal_out_everything_once() -> None:
    runs: Any = list(range(11))
    dealt = [run for number in (1, 2, 3) for run in Shard(number, 3).own(runs)]
    assert sorted(dealt) == runs
    assert Shard.parse("2/3") == Shard(2, 3)
    assert Shard.parse(None).own(runs) == runs


def test_a_run_that_another_process_is_at_is_skipped(compare, tmp_path: Path) -> None:
    run = compare(["fedavg"]).content["methods"]["fedavg"]["runs"][0]
    (tmp_path / "cmp" / run / "summary.json").unlink()
    other = RunFolder(tmp_path / "cmp" / run)
    other.lock()
    try:
        result = compare(["fedavg", "fedproto"])
    finally:
        other.release()
    assert not result.failures
    assert [entry["method"] for entry in result.content["missing"]] == ["fedavg"]
    assert "another process" in result.missing()[0]
    assert result.content["methods"]["fedproto"]["personal"] is not None
    with folder_lock(tmp_path / "cmp", run):
        assert "another process" in compare(["fedavg"]).missing()[0]
    assert compare(["fedavg"]).content["complete"]


# Interruptions


def members(group: int) -> list[int]:
    """The processes of a process group that are alive."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def command(words: list[str]) -> None:
    """The command in a process of its own, which is forked because importing takes longer than all the runs."""
    os.setsid()
    # As in a terminal: a job in the background of a script inherits that Ctrl-C is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["SLOW"] = "0.5"
    sys.exit(main(words))


@pytest.mark.parametrize(
    ("number", "engine", "code"),
    [(signal.SIGTERM, "auto", 143), (signal.SIGKILL, "auto", -9), (signal.SIGINT, "workers", 130)],
)
def test_an_interrupted_comparison_resumes(number, engine, code, tiny_data: str, tmp_path: Path, same_results) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    method = f"{tmp_path}/slow.py:Slow"
    words = ["compare", method, "--data", tiny_data, *WORDS, "--rounds", "8", "--engine", engine, "--workers", "1"]
    words += ["--seeds", "0,1,2", "--out", str(tmp_path / "cmp")]
    process = multiprocessing.get_context("fork").Process(target=command, args=(words,))
    process.start()
    assert process.pid
    deadline = time.monotonic() + 60
    while not list((tmp_path / "cmp").glob("*/checkpoint/manifest.json")) and time.monotonic() < deadline:
        assert process.is_alive()
        time.sleep(0.01)
    assert len(members(process.pid)) > 1
    # Ctrl-C reaches the whole group.
    os.killpg(process.pid, number) if number == signal.SIGINT else os.kill(process.pid, number)
    process.join(30)
    assert process.exitcode == code
    deadline = time.monotonic() + 10
    while members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert members(process.pid) == [], "nobody goes on writing"

    started = {}
    for manifest in (tmp_path / "cmp").glob("*/checkpoint/manifest.json"):
        run = manifest.parents[1]
        started[run.name] = (run / "rounds.jsonl").read_bytes()[
            : json.loads(manifest.read_text())["rounds_jsonl_bytes"]
        ]
    assert started
    assert not runs_in(tmp_path / "cmp")
    options: dict[str, Any] = {**TINY, "rounds": 8, "data": tiny_data, "engine": "loop"}
    result = protofed.compare([method], out=tmp_path / "cmp", seeds=[0, 1, 2], **options)
    assert result.content["complete"]
    for name, committed in started.items():
        finished = (tmp_path / "cmp" / name / "rounds.jsonl").read_bytes()[: len(committed)]
        assert finished == committed, "rounds that were done are not done again: even their seconds are the same"
    seed = 0
    path = tmp_path / "cmp" / result.content["methods"][method]["runs"][seed]
    same_results(protofed.run(method, out=tmp_path / "straight", seed=seed, **options), path)
