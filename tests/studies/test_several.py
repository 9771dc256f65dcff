"""Several tables in one command: what is at hand, what it takes, runs that tables share, one page."""

import json

import pytest

from protofed.cli import main
from protofed.errors import UserError
from protofed.studies.tables import several
from protofed.studies.tables.estimate import ImageCost, cost_key
from protofed.studies.tables.fixtures import row_options
from protofed.studies.tables.preset import find_preset
from protofed.studies.tables.several import estimate_all, names_several, tables_at_hand
from protofed.testing import toy_data

TINY = ["--model", "mlp", "--image-size", "8", "--rounds", "1", "--epochs", "1", "--engine", "loop"]
SETTINGS = ["--set", "model.hidden=8", "--set", "data.augment=none"]
DOMAINS = ["caltech", "amazon", "webcam", "dslr"]


@pytest.fixture(scope="module")
def data_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    toy_data(root / "office_caltech10", DOMAINS, classes=10, train=60, test=20)
    toy_data(root / "pacs", ["photo", "sketch"], classes=7, train=60, test=20)
    return str(root)


def test_tables_are_at_hand_where_all_their_domains_are(data_root):
    tables, left_out = tables_at_hand("ALL", "imagenet", data_root)
    there = {table.preset.name: table.datasets for table in tables}
    assert there["i2pfl.table2"] == ["office_caltech10"]
    assert there["fedmp.table1"] == ["office_caltech10"]
    assert "fedadapterproto.table1" not in there
    assert "conffedproto.table2" not in there, "it is computed, not trained"
    assert "i2pfl.table2, pacs: pacs lacks art_painting, cartoon" in left_out
    assert "conffedproto.table1, emnist: it has no imagenet scale" in left_out
    assert "fedmp.table1, busi: the data root has no busi" in left_out


def test_some_tables_data_sets_and_rows_can_be_chosen(data_root):
    tables, left_out = tables_at_hand("i2pfl.table[45],i2pfl.table2", "lite", data_root, ["office_caltech10"])
    assert [table.preset.name for table in tables] == ["i2pfl.table4", "i2pfl.table5", "i2pfl.table2"]
    assert left_out == []
    tables, _ = tables_at_hand("ALL", "imagenet", data_root, None, ["protoridge"])
    assert {row.title for table in tables for row in table.rows} == {"protoridge"}
    for wrong in (("i2pfl.tabel*",), ("ALL", ["offise"]), ("ALL", None, ["fedavgg"])):
        name, *chosen = wrong
        with pytest.raises(UserError, match="unknown"):
            tables_at_hand(name, "lite", data_root, *chosen)
    assert [names_several(text) for text in ("ALL", "a,b", "i2pfl.*", "i2pfl.table2")] == [True, True, True, False]


def test_runs_that_tables_share_are_counted_once(data_root):
    options = {"model": "mlp", "image_size": 8, "rounds": 1, "epochs": 1, "set": {"model.hidden": "8"}}
    chosen = (["office_caltech10"], ["fedavg", "i2pfl", "w/o APA", "averaging"])
    one, _ = tables_at_hand("i2pfl.table2", "lite", data_root, chosen[0], chosen[1][:2])
    both, _ = tables_at_hand("i2pfl.table2,i2pfl.table4,i2pfl.table5", "lite", data_root, *chosen)
    assert estimate_all(one, [0, 1], **options).runs == 2 * 2
    whole = estimate_all(both, [0, 1], **options)
    assert whole.runs == 2 * 5, "fedavg, i2pfl, which is `reweighting` too, and it without APA, averaging, clustering"
    assert whole.hours > 0
    left_out, _ = tables_at_hand("i2pfl.table3", "lite", data_root, ["office_caltech10"], ["fedavg"])
    assert estimate_all(left_out, [0], **options).runs == 4


def test_each_kind_of_training_is_measured_once(data_root, monkeypatch):
    """Neither clients, rounds nor weights of losses change what an image costs; what is trained does."""
    measured = []

    def noted(preset, row, *_):
        measured.append(f"{preset.name}, {row.title}")
        return ImageCost(trained=1.0, extracted=0.0, views=1, frozen=0, attack=0.0, saved_bytes=0.0)

    monkeypatch.setattr(several, "measured_cost", noted)
    options = {"model": "mlp", "image_size": 8, "rounds": 3, "epochs": 2, "set": {"model.hidden": "8"}}
    chosen = (["office_caltech10"], ["fedavg", "w/o EMA", "weaker losses", "i2pfl"])
    tables, _ = tables_at_hand("i2pfl.table2,i2pfl.table3,i2pfl.table4", "imagenet", data_root, *chosen)
    told = []
    whole = estimate_all(tables, [0], lambda *progress: told.append(progress), **options)
    assert measured == ["i2pfl.table2, fedavg", "i2pfl.table2, i2pfl", "i2pfl.table4, w/o EMA"]
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert whole.runs == 2 + 2 * 4 + 2, "Table 2, each domain left out, two variants"
    longer = estimate_all(tables, [0], **{**options, "rounds": 6})
    assert longer.hours == pytest.approx(2 * whole.hours, rel=0.2), "a second for each image of each round"


def test_stages_at_which_embeddings_are_taken_cost_differently():
    preset = find_preset("fedmp.table2")
    rows = {row.title: row_options(preset, row, "dr", "imagenet", {}) for row in preset.rows_at("imagenet")}
    keys = {title: cost_key(preset, "dr", "imagenet", options) for title, options in rows.items()}
    assert len({keys[f"stage {number}"] for number in (1, 2, 3, 4)}) == 4


def test_command_runs_shares_resumes_and_writes_one_page(data_root, tmp_path, capsys):
    names = "i2pfl.table2,i2pfl.table4"
    out = tmp_path / "out"
    words = ["reproduce", names, *TINY, *SETTINGS, "--data-root", data_root, "--datasets", "office_caltech10,pacs"]
    words += ["--methods", "fedavg,i2pfl", "--seeds", "0,1", "--out", str(out)]
    assert main([*words, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "left out: i2pfl.table2, pacs: pacs lacks" in said
    assert "4 different runs, about" in said
    assert "estimating: 2 of 2 kinds of runs tried" in said
    assert not out.exists()

    assert main(words) == 0
    said = capsys.readouterr().out
    assert "i2pfl.table4 (2 of 2)" in said
    runs = sorted(path.name.rsplit("-", 1)[0] for path in (out / "runs" / "domain_shift").glob("*/*-seed*"))
    assert runs == ["fedavg-seed0", "fedavg-seed1", "i2pfl-seed0", "i2pfl-seed1"]
    stored = json.loads((out / "i2pfl.table4" / "comparison.json").read_text())
    (first, _) = stored["datasets"]["office_caltech10"]["methods"]["fedavg"]["runs"][""]
    assert (out / "i2pfl.table4" / first / "summary.json").is_file()
    page = (out / "index.html").read_text()
    assert "i2pfl.table2, office_caltech10, lite" in page
    assert "i2pfl.table4, office_caltech10, lite" in page
    assert "pacs lacks art_painting, cartoon" in page
    assert main(["report", str(out / "i2pfl.table4")]) == 0
    capsys.readouterr()

    assert main(words) == 0
    assert capsys.readouterr().out.count("0 runs to do") == 2


def test_a_table_that_cannot_be_run_does_not_stop_the_others(data_root, tmp_path, capsys):
    words = ["reproduce", "i2pfl.table7,i2pfl.table2", *TINY, *SETTINGS, "--data-root", data_root, "--quiet"]
    words += ["--datasets", "office_caltech10", "--methods", "fedavg", "--seeds", "0", "--out", str(tmp_path)]
    assert main([*words, "--fraction", "0.6"]) == 1
    assert "error: i2pfl.table7: domain caltech has 60 training images" in capsys.readouterr().err


def test_mistakes_are_named(data_root, tmp_path, capsys):
    assert main(["reproduce", "ALL", "--data-root", data_root]) == 2
    assert "--out" in capsys.readouterr().err
    assert main(["reproduce", "ALL", "--json", "--out", str(tmp_path)]) == 2
    assert "not with several" in capsys.readouterr().err
    assert main(["reproduce", "fedadapterproto.*", "--data-root", data_root, "--out", str(tmp_path)]) == 2
    assert "no table has its images available" in capsys.readouterr().err
