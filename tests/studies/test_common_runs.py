"""Runs that tables have in common: another table's file gets them, and they are what its own runs would have been."""

import pytest

from protofed.studies.tables.common_runs import enter_common_runs
from protofed.studies.tables.reproduce import reproduce
from protofed.studies.tables.result_tables import ResultTables
from protofed.studies.tables.results import read_results, write_results
from protofed.testing import toy_data

TINY = {"model": "mlp", "image_size": 8, "rounds": 1, "epochs": 1, "engine": "loop", "datasets": "office_caltech10"}
DOMAINS = ["caltech", "amazon", "webcam", "dslr"]
TABLE2 = "i2pfl.table2-office_caltech10-lite"
TABLE5 = "i2pfl.table5-office_caltech10-lite"


@pytest.fixture(scope="module")
def data_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    toy_data(root / "office_caltech10", DOMAINS, classes=10, train=60, test=20)
    toy_data(root / "digits", ["mnist"], classes=10, train=400, test=40)
    return root


@pytest.fixture(scope="module")
def made(data_root, tmp_path_factory):
    """A function that runs rows of a table and adds them to the files of a folder."""

    def make(table, methods, folder, seeds=(0, 1), root=data_root, **options):
        settings = {"model.hidden": 8, "data.augment": "none"}
        out = tmp_path_factory.mktemp("out")
        given = {**TINY, **options, "methods": methods, "seeds": list(seeds), "set": settings}
        write_results(reproduce(table, out=out, data_root=str(root), **given), out, folder)

    return make


def runs_of(folder, file, row):
    return [run for run in read_results(folder / f"{file}.json")["runs"] if run["row"] == row]


def test_another_tables_runs_are_those_that_would_have_been_made(made, tmp_path):
    files, own = tmp_path / "files", tmp_path / "own"
    made("i2pfl.table2", "fedavg,i2pfl", files, seeds=(0, 1, 2))
    made("i2pfl.table5", "averaging", files)
    assert enter_common_runs(files) == {TABLE5: 2}
    made("i2pfl.table5", "averaging,reweighting", own)
    entered, real = (runs_of(folder, TABLE5, "reweighting") for folder in (files, own))
    assert [run["seed"] for run in entered] == [0, 1], "seed 2 is none of this table's"
    for run, expected in zip(entered, real, strict=True):
        assert run["made_for"] == TABLE2
        apart = {"made_for", "cpu_seconds"}
        assert {key: value for key, value in run.items() if key not in apart} == {
            key: value for key, value in expected.items() if key not in apart
        }
    stored, expected = (read_results(folder / f"{TABLE5}.json") for folder in (files, own))
    assert stored["rows"] == expected["rows"], "with the paper's figures"
    assert f"seeds 0, 1. Runs of reweighting were made for {TABLE2}." in ResultTables(stored).about()
    assert enter_common_runs(files) == {}, "all is entered"


def test_a_file_keeps_its_own_runs(made, tmp_path):
    made("i2pfl.table2", "i2pfl", tmp_path)
    made("i2pfl.table5", "averaging,reweighting", tmp_path, seeds=(0,))
    before = runs_of(tmp_path, TABLE5, "reweighting")
    assert enter_common_runs(tmp_path) == {}
    assert runs_of(tmp_path, TABLE5, "reweighting") == before


def test_runs_with_other_options_or_images_are_not_taken(made, tmp_path):
    made("i2pfl.table5", "averaging", tmp_path, seeds=(0,))
    made("i2pfl.table2", "i2pfl", tmp_path, seeds=(0,), epochs=2)
    assert enter_common_runs(tmp_path) == {}
    (tmp_path / f"{TABLE2}.json").unlink()
    toy_data(tmp_path / "others" / "office_caltech10", DOMAINS, classes=10, train=50, test=20)
    made("i2pfl.table2", "i2pfl", tmp_path, seeds=(0,), root=tmp_path / "others")
    assert enter_common_runs(tmp_path) == {}


def test_a_row_that_would_stay_incomplete_is_left_out(made, tmp_path):
    some, all_columns = tmp_path / "some", tmp_path / "all"
    mnist = {"datasets": "mnist", "seeds": (0,)}
    for folder, columns in ((some, "clean,wrong labels at one"), (all_columns, "clean")):
        made("conffedproto.table1", "fedavg", folder, columns="alpha=0.5", **mnist)
        made("conffedproto.confidence", "fedproto", folder, columns=columns, **mnist)
    back = {"conffedproto.table1-mnist-lite": 1}  # FedProto on clean images
    assert enter_common_runs(some) == back, "Table 1 has no wrong labels, so FedAvg would lack a column"
    assert enter_common_runs(all_columns) == {"conffedproto.confidence-mnist-lite": 1, **back}
    (run,) = runs_of(all_columns, "conffedproto.confidence-mnist-lite", "fedavg")
    assert run["condition"] == "clean"
