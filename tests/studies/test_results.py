"""Results files: what runs came to, added to by later calls; tables and differences made from them alone."""

import json
from math import sqrt
from statistics import mean

import pytest

from protofed.errors import UserError
from protofed.metrics import find_metric
from protofed.runs.opened import Run
from protofed.studies.tables import results
from protofed.studies.tables.explained import AGREEMENT, FAITHFULNESS
from protofed.studies.tables.reproduce import reproduce
from protofed.studies.tables.result_tables import ResultTables
from protofed.studies.tables.results import read_results, write_results
from protofed.testing import toy_data

TINY = {"model": "mlp", "image_size": 8, "rounds": 1, "epochs": 1, "engine": "loop"}
SETTINGS = {"model.hidden": 8, "data.augment": "none"}


@pytest.fixture(scope="module")
def data_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    toy_data(root / "office_caltech10", ["caltech", "amazon", "webcam", "dslr"], classes=10, train=60, test=20)
    toy_data(root / "dr_fundus", ["aptos", "eyepacs", "idrid"], classes=5, train=20, test=10, channels=3)
    return str(root)


def tiny(name, data_root, out, **options):
    return reproduce(name, data_root=data_root, out=out, **{**TINY, **options}, set=SETTINGS)


def view(value, **parts):
    return {"value": value, "parts": parts}


def content(runs, **changes):
    """A file by hand; runs are (row, condition, seed, value)."""
    rows = list(dict.fromkeys(row for row, *_ in runs))
    plain = {
        "preset": "paper.table",
        "title": "A table",
        "dataset": "set",
        "scale": "lite",
        "command": "protofed reproduce paper.table",
        "options": {"set": {}},
        "common": {"set": {}},
        "date": "2026-01-01",
        "machine": "a machine",
        "versions": {"protofed": "1", "torch": "2"},
        "baseline": "fedavg",
        "value": "average",
        "conditions": [],
        "domains": [],
        "rows": {row: {"method": row, "settings": {}, "paper": None} for row in rows},
        "runs": [
            {
                "row": row,
                "condition": condition,
                "seed": seed,
                "accuracy": {"global": view(value)},
                "auc": {},
                "leakage": {},
                "explanations": {},
                "curve": {},
                "converged": {},
                "bytes": {"up": 1000 * (seed + 1), "down": 10},
                "cpu_seconds": 4.0 + seed,
                "rounds": 5,
                "date": "2026-01-01",
                "machine": "a machine",
            }
            for row, condition, seed, value in runs
        ],
    }
    return {**plain, **changes}


def test_a_file_has_a_record_of_every_run(data_root, tmp_path):
    chosen = {"datasets": "office_caltech10", "methods": "fedavg,i2pfl", "seeds": [0, 1]}
    result = tiny("i2pfl.table2", data_root, tmp_path / "out", **chosen)
    (path,) = write_results(result, tmp_path / "out", tmp_path / "data")
    assert path.name == "i2pfl.table2-office_caltech10-lite.json"
    stored = read_results(path)
    assert data_root not in path.read_text(), "where images lie concerns nobody else"
    assert stored["command"] == (
        "protofed reproduce i2pfl.table2 --scale lite --data-root DATA --datasets office_caltech10 --seeds 0,1 "
        "--model mlp --image-size 8 --rounds 1 --epochs 1 --set model.hidden=8 --set data.augment=none --out OUT"
    )
    assert [(run["row"], run["seed"]) for run in stored["runs"]] == [
        ("fedavg", 0), ("fedavg", 1), ("i2pfl", 0), ("i2pfl", 1)
    ]  # fmt: skip
    entry = result.content["datasets"]["office_caltech10"]["methods"]["i2pfl"]
    summary = Run(tmp_path / "out" / entry["runs"][""][1]).summary
    record = stored["runs"][3]
    assert record["accuracy"]["global"]["value"] == pytest.approx(summary["accuracy"]["global"]["average"], abs=1e-6)
    assert record["accuracy"]["personal"]["value"] == pytest.approx(
        summary["accuracy"]["personal"]["average"], abs=1e-6
    )
    for domain in ("caltech", "amazon", "webcam", "dslr"):
        figure = summary["accuracy"]["global"][domain]
        assert record["accuracy"]["global"]["parts"][domain] == pytest.approx(figure, abs=1e-6)
    assert record["bytes"]["up"] == summary["bytes"]["up"]["total"]
    assert record["cpu_seconds"] > 0
    assert record["auc"] == {}, "ten classes"
    # The table is that of the reproduction itself, of which nothing is needed any more.
    (shown,) = result.tables()
    made = ResultTables(stored).table("accuracy", "global")
    assert made.columns[:6] == shown.columns[:6]
    assert [row[:7] for row in made.rows] == [row[:7] for row in shown.rows]


def test_two_classes_have_an_auc_of_the_site_left_out(data_root, tmp_path):
    result = tiny("fedadapterproto.table1", data_root, tmp_path, methods="fedavg", datasets="dr_fundus", seeds=[0])
    (path,) = write_results(result, tmp_path, tmp_path / "data")
    stored = read_results(path)
    assert stored["conditions"] == ["to eyepacs", "to aptos", "to idrid"]
    (record,) = [run for run in stored["runs"] if run["condition"] == "to aptos"]
    (run,) = result.content["datasets"]["dr_fundus"]["methods"]["fedavg"]["runs"]["to aptos"]
    predicted = Run(tmp_path / run).predictions().views["global"]["aptos"]
    assert record["auc"]["global"]["value"] == pytest.approx(find_metric("auc").of(predicted), abs=1e-6)
    assert set(record["auc"]["global"]["parts"]) == {"aptos", "eyepacs", "idrid"}
    table = ResultTables(stored).table("auc", "global")
    assert table.columns[1:5] == ["to eyepacs", "to aptos", "to idrid", "average"]
    assert table.rows[0][2] == f"{100 * record['auc']['global']['value']:.2f}"


def test_later_calls_add_rows_and_seeds(data_root, tmp_path):
    chosen = {"datasets": "office_caltech10", "seeds": [0]}
    for methods, seeds in (("fedprox", [0]), ("fedavg,fedprox", [0, 1])):
        result = tiny("i2pfl.table2", data_root, tmp_path, methods=methods, **{**chosen, "seeds": seeds})
        (path,) = write_results(result, tmp_path, tmp_path / "data")
    stored = read_results(path)
    assert sorted((run["row"], run["seed"]) for run in stored["runs"]) == [
        ("fedavg", 0), ("fedavg", 1), ("fedprox", 0), ("fedprox", 1)
    ]  # fmt: skip
    assert "--seeds 0,1" in stored["command"]
    assert list(stored["rows"]) == ["fedavg", "fedprox"], "in the order of the table, whichever was first"
    other = tiny("i2pfl.table2", data_root, tmp_path, methods="fedavg", epochs=2, **chosen)
    with pytest.raises(UserError, match="other options"):
        write_results(other, tmp_path, tmp_path / "data")
    stored["rows"]["fedprox"]["settings"] = {"mu": 1}
    path.write_text(json.dumps(stored))
    with pytest.raises(UserError, match="another fedprox"):
        write_results(result, tmp_path, tmp_path / "data")
    path.write_text("{")
    with pytest.raises(UserError, match="damaged"):
        write_results(result, tmp_path, tmp_path / "data")


def test_a_file_says_which_images_were_read_and_takes_no_others(data_root, tmp_path):
    chosen = {"datasets": "office_caltech10", "methods": "fedavg"}
    first = tiny("i2pfl.table2", data_root, tmp_path / "out", seeds=[0], **chosen)
    (path,) = write_results(first, tmp_path / "out", tmp_path / "data")
    images = read_results(path)["images"]
    assert images["shape"] == [3, 8, 8]
    assert images["fingerprint"]
    assert f"; {images['source']} at 8x8 pixels; seeds 0." in ResultTables(read_results(path)).about()

    others = tmp_path / "others"
    toy_data(others / "office_caltech10", ["caltech", "amazon", "webcam", "dslr"], classes=10, train=61, test=20)
    second = tiny("i2pfl.table2", str(others), tmp_path / "second", seeds=[1], **chosen)
    with pytest.raises(UserError, match="other images"):
        write_results(second, tmp_path / "second", tmp_path / "data")

    older = read_results(path)
    del older["images"]
    path.write_text(json.dumps(older))
    (path,) = write_results(second, tmp_path / "second", tmp_path / "data")
    assert len(read_results(path)["runs"]) == 2, "what an earlier version wrote can be added to"


def test_columns_may_come_one_by_one(tmp_path):
    toy_data(tmp_path / "root" / "digits", ["mnist"], classes=10, train=400, test=20)
    for columns in ("alpha=0.5", "alpha=0.1,alpha=0.3", "alpha=0.3"):
        chosen = {"datasets": "mnist", "methods": "fedavg", "columns": columns, "seeds": [0]}
        result = tiny("conffedproto.table1", str(tmp_path / "root"), tmp_path / "out", **chosen)
        (path,) = write_results(result, tmp_path / "out", tmp_path / "data")
    stored = read_results(path)
    assert stored["conditions"] == ["alpha=0.1", "alpha=0.3", "alpha=0.5"]
    assert [run["condition"] for run in stored["runs"]] == ["alpha=0.5", "alpha=0.1", "alpha=0.3"]
    table = ResultTables(stored).table("accuracy", "global")
    assert table.columns[1:4] == ["alpha=0.1", "alpha=0.3", "alpha=0.5"]


def test_differences_are_paired_over_seeds():
    scores = {"fedavg": (0.50, 0.60, 0.70), "ours": (0.52, 0.63, 0.71)}
    runs = [(row, "", seed, value) for row, values in scores.items() for seed, value in enumerate(values)]
    tables = ResultTables(content(runs))
    test = tables.difference("ours", "fedavg")
    # Gaps 2, 3, 1 points: mean 2, deviation 1; the t of two degrees of freedom for 95 % is 4.302653.
    half = 4.302653 * 0.01 / sqrt(3)
    assert test["difference"] == pytest.approx(0.02)
    assert test["interval"] == pytest.approx([0.02 - half, 0.02 + half], abs=1e-6)
    table = tables.table("accuracy", "global")
    assert table.rows[1][:4] == ["ours", "62.00", "9.54", "3"]
    assert table.rows[1][4] == "+2.00 [-0.48, +4.48]"
    assert table.rows[0][4:] == ["-", "-", "-"]
    assert tables.costs().rows[0] == ["fedavg", "5", "-", "2.0 kB", "10 B", "5 s", "-"]


def test_rows_of_several_runs_count_seeds_that_are_complete():
    runs = [("fedavg", name, seed, 0.5) for name in ("to a", "to b") for seed in (0, 1)]
    runs += [("ours", "to a", 0, 0.6), ("ours", "to b", 0, 0.8), ("ours", "to a", 1, 0.9)]
    tables = ResultTables(content(runs, conditions=["to a", "to b"], value="held_out"))
    table = tables.table("accuracy", "global")
    assert table.columns[:4] == ["method", "to a", "to b", "average"]
    assert table.rows[1][:6] == ["ours", "60.00", "80.00", "70.00", "-", "1"]
    assert tables.difference("ours", "fedavg") is None, "one seed is no test"


def test_runs_of_several_machines_are_told_apart():
    runs = content([("fedavg", "", 0, 0.5), ("fedavg", "", 1, 0.5), ("fedavg", "", 2, 0.5), ("ours", "", 0, 0.6)])
    assert "\n2026-01-01; a machine; protofed 1" in ResultTables(runs).about()
    for run in runs["runs"][2:]:
        run["machine"], run["date"] = "a slower one", "2026-01-03"
    runs["runs"][2]["cpu_seconds"] = 99.0
    runs["runs"].append({**runs["runs"][0], "seed": 3})
    tables = ResultTables(runs)
    assert (
        "2026-01-01 to 2026-01-03; a machine, CPU times are from there; 2 runs on a slower one (fedavg, ours); protofed"
    ) in tables.about()
    assert [row[5] for row in tables.costs().rows] == ["4 s", "-"], "4, 5 and 4 s where most were made"


def test_a_run_that_is_only_entered_again_keeps_its_day_and_machine(data_root, tmp_path, monkeypatch):
    chosen = {"datasets": "office_caltech10", "data_root": data_root, "out": tmp_path / "out"}
    (path,) = write_results(tiny("i2pfl.table2", methods="fedavg", seeds=[0], **chosen), tmp_path / "out", tmp_path)
    first = read_results(path)["runs"][0]
    monkeypatch.setattr(results, "describe_machine", lambda: "another machine")
    (path,) = write_results(tiny("i2pfl.table2", methods="fedavg", seeds=[0, 1], **chosen), tmp_path / "out", tmp_path)
    assert read_results(path)["runs"][0] == first
    assert read_results(path)["runs"][1]["machine"] == "another machine" != first["machine"]
    slower = read_results(path)
    slower["runs"][0]["cpu_seconds"] += 1
    path.write_text(json.dumps(slower))
    (path,) = write_results(tiny("i2pfl.table2", methods="fedavg", seeds=[0], **chosen), tmp_path / "out", tmp_path)
    assert read_results(path)["runs"][0]["machine"] == "another machine", "what took another time was made again"


def test_the_papers_figures_stand_in_brackets():
    runs = [("fedavg", "", 0, 0.5), ("fedavg", "", 1, 0.6)]
    paper = {"fedavg": {"method": "fedavg", "settings": {"head": "random", "ema": False}, "paper": None}}
    paper["fedavg"]["paper"] = {"global": {"average": 0.575}}
    tables = ResultTables(content(runs, rows=paper))
    assert tables.table("accuracy", "global").rows[0][1] == "55.00 (57.50)"
    assert tables.costs().rows[0][-1] == "head=random, ema=off"
    assert "seeds 0, 1." in tables.about()


def test_leakage_and_the_round_it_settled_in_are_kept():
    runs = content([("1st stage", "", 0, 0.5), ("1st stage", "", 1, 0.5), ("2nd stage", "", 0, 0.5)])
    for run, ssim, settled in zip(runs["runs"], (0.7, 0.8, 0.6), (7, 8, None), strict=True):
        run["leakage"] = {"FID": None, "max SSIM": ssim}
        run["converged"] = {} if settled is None else {"global": settled}
    runs["rows"]["1st stage"]["paper"] = {"leakage": {"max SSIM": 0.7661}}
    tables = ResultTables(runs)
    assert tables.leakage().rows == [["1st stage", "-", "0.75 (0.7661)"], ["2nd stage", "-", "0.6"]]
    assert [row[2] for row in tables.costs().rows] == ["7.5", "-"]


def test_a_figure_of_curves_keeps_them():
    runs = content([("fedavg", "", 0, 0.6), ("fedavg", "", 1, 0.8), ("fedmp", "", 0, 0.7), ("fedmp", "", 1, 0.7)])
    for run, first in zip(runs["runs"], (0.2, 0.4, 0.5, 0.5), strict=True):
        run["curve"] = {"global": [(1, first), (2, run["accuracy"]["global"]["value"])]}
    tables = ResultTables(runs)
    assert tables.curves("global").columns == ["method", "1", "2"]
    assert tables.curves("global").rows == [["fedavg", "30.00", "70.00"], ["fedmp", "50.00", "70.00"]]
    assert tables.curves("personal").rows == []
    assert tables.figures("fedavg", after=1) == {0: 0.2, 1: 0.4}
    early, late = (tables.difference("fedmp", "fedavg", after=after) for after in (1, 2))
    assert early["difference"] == pytest.approx(0.2)
    assert late["difference"] == pytest.approx(0.0)


def test_curves_of_runs_are_written(data_root, tmp_path):
    chosen = {"datasets": "dr", "methods": "fedavg,fedmp", "seeds": [0], "rounds": 2}
    result = tiny("fedmp.figure7", data_root, tmp_path / "out", **chosen)
    (path,) = write_results(result, tmp_path / "out", tmp_path / "data")
    stored = read_results(path)
    for run in stored["runs"]:
        assert [number for number, _ in run["curve"]["global"]] == [1, 2]
        both = mean(figure for _, figure in run["curve"]["global"])  # a run's figure is that of its last five rounds
        assert both == pytest.approx(run["accuracy"]["global"]["value"], abs=1e-6)
    shown = result.tables()[-1]
    made = ResultTables(stored).curves("global")
    assert (made.columns, made.rows) == (shown.columns, shown.rows)


def explained(agreed, **models):
    """Scores by hand; a model is (right, whole, blurred, blurred_random, nothing, pasted, pasted_random)."""
    return {
        "images": 8,
        "agreement": {who: dict(zip(AGREEMENT, agreed, strict=True)) for who in ("a and b", "all")},
        "models": {name: dict(zip(FAITHFULNESS, figures, strict=True)) for name, figures in models.items()},
    }


def test_explanations_are_told_model_by_model():
    runs = content([("parts", "", 0, 0.5), ("parts", "", 1, 0.5), ("plain", "", 0, 0.5)])
    flat = (0.5, None, None, None, None, None, None)
    first = explained(
        (0.5, 0.4, 0.1, 0.6), a=(1.0, 0.9, 0.5, 0.8, 0.1, 0.7, 0.2), b=(0.5, 0.7, 0.6, 0.6, 0.3, 0.4, 0.4)
    )
    second = explained((0.7, None, None, None), a=(0.5, 0.8, 0.6, 0.7, 0.2, 0.6, 0.3), b=flat)
    runs["runs"][0]["explanations"], runs["runs"][1]["explanations"] = first, second
    table = ResultTables(runs).explanations()
    assert table.rows == [
        ["parts", "a", "0.75", "0.85", "0.55", "0.75", "0.15", "0.65", "0.25", "-", "-", "-", "-"],
        ["parts", "b", "0.50", "0.70", "0.60", "0.60", "0.30", "0.40", "0.40", "-", "-", "-", "-"],
        ["parts", "a and b", "-", "-", "-", "-", "-", "-", "-", "0.60", "0.40", "0.10", "0.60"],
        ["parts", "all", "0.62", "0.80", "0.57", "0.70", "0.20", "0.57", "0.30", "0.60", "0.40", "0.10", "0.60"],
    ], "rows without explanations, and maps without a box, count for nothing"
    assert len(table.columns) == len(table.rows[0])


def test_files_of_earlier_versions_can_be_read(tmp_path):
    old = content([("fedavg", "", 0, 0.5)])
    for key in ("explanations", "curve", "date", "machine"):
        del old["runs"][0][key]
    path = tmp_path / "old.json"
    path.write_text(json.dumps(old))
    tables = ResultTables(read_results(path))
    assert tables.explanations().rows == []
    assert tables.content["runs"][0]["explanations"] == tables.content["runs"][0]["curve"] == {}
    assert tables.curves("global").rows == []
    assert "2026-01-01; a machine; " in tables.about(), "theirs are those of the file"


def test_files_can_be_read_line_by_line(data_root, tmp_path):
    result = tiny("i2pfl.table2", data_root, tmp_path, datasets="office_caltech10", methods="fedavg", seeds=[0, 1])
    (path,) = write_results(result, tmp_path, tmp_path / "data")
    lines = [line.strip().rstrip(",") for line in path.read_text().splitlines()]
    assert sum(line.startswith('{"row"') for line in lines) == 2
    assert json.loads(next(line for line in lines if line.startswith('{"row"')))["seed"] == 0
