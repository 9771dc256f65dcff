"""Tables of the papers on tiny images, computed tables against the printed figures, and dry runs of every preset."""

import json

import pytest

from protofed.audit.audit import audit
from protofed.cli import main
from protofed.errors import UserError
from protofed.studies.tables import leakage
from protofed.studies.tables.estimate import total_hours
from protofed.studies.tables.fixtures import row_options
from protofed.studies.tables.preset import SCALES, find_preset, preset_names
from protofed.studies.tables.reproduce import dry_run, reproduce
from protofed.system import cores
from protofed.testing import toy_data

TINY = {"model": "mlp", "image_size": 8, "rounds": 1, "epochs": 1, "engine": "loop"}
SETTINGS = {"model.hidden": 8, "data.augment": "none"}
SMALLEST = {name: find_preset(name).datasets[0] for name in preset_names()}


class Finished:
    """Callback: which runs were made."""

    def __init__(self):
        self.runs = []

    def run_end(self, run):
        self.runs.append(run.path.name)


@pytest.fixture(scope="module")
def data_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    toy_data(
        root / "office_caltech10", ["caltech", "amazon", "webcam", "dslr"], classes=10, train=60, test=20, channels=3
    )
    toy_data(root / "digits", ["mnist", "usps"], classes=10, train=400, test=20)
    toy_data(root / "dr_fundus", ["aptos", "eyepacs", "idrid"], classes=5, train=20, test=10, channels=3)
    return str(root)


@pytest.fixture
def tiny(data_root):
    def run(name, **options):
        settings = {**SETTINGS, **options.pop("set", {})}
        return reproduce(name, data_root=data_root, **{**TINY, **options}, set=settings)

    return run


def test_table_beside_the_papers_and_one_more_seed(tiny, tmp_path):
    chosen = {"datasets": "office_caltech10", "methods": "fedavg,i2pfl", "out": tmp_path}
    first = tiny("i2pfl.table2", seeds=[0], **chosen)
    finished = Finished()
    second = tiny("i2pfl.table2", seeds=[0, 1], callbacks=[finished], **chosen)

    assert sorted(name.rsplit("-", 1)[0] for name in finished.runs) == ["fedavg-seed1", "i2pfl-seed1"]
    (table,) = second.tables()
    assert table.columns[:6] == ["method", "caltech", "amazon", "webcam", "dslr", "average"]
    assert table.rows[1][0] == "i2pfl"
    assert table.rows[1][5].endswith("(72.84)")
    stored = json.loads((tmp_path / "comparison.json").read_text())
    entry = stored["datasets"]["office_caltech10"]["methods"]["i2pfl"]
    assert entry["paper"]["global"] == {
        "caltech": 0.7152, "amazon": 0.8179, "webcam": 0.7207, "dslr": 0.66, "average": 0.7284
    }  # fmt: skip
    assert len(entry["global"]["average"]["seeds"]) == 2
    assert entry["global"]["test"]["seeds"] == 2
    assert entry["bytes"]["up"]["total"] > 0
    before = first.content["datasets"]["office_caltech10"]["methods"]["i2pfl"]["global"]["average"]["seeds"]
    assert entry["global"]["average"]["seeds"][:1] == before
    assert "(72.84)" in (tmp_path / "comparison.md").read_text()
    inside = json.loads((tmp_path / "office_caltech10" / "comparison.json").read_text())
    assert inside["methods"]["i2pfl"]["paper"]["average"] == 0.7284


def test_variants_of_one_method_are_rows(tiny, tmp_path):
    found = tiny("i2pfl.table4", datasets="office_caltech10", rounds=2, out=tmp_path)
    methods = found.content["datasets"]["office_caltech10"]["methods"]
    assert list(methods) == ["fedavg", "w/o APA", "w/o GPCL", "w/o EMA", "i2pfl", "protoridge", "fedncm"]
    assert methods["w/o EMA"]["settings"] == {"ema": False}
    assert len({json.dumps(entry["runs"]) for entry in methods.values()}) == 7
    curves = tiny("i2pfl.figure9", datasets="office_caltech10", rounds=2, out=tmp_path)
    assert [number for number, _ in curves.content["datasets"]["office_caltech10"]["methods"]["i2pfl"]["curve"]] == [
        1,
        2,
    ]
    assert curves.tables()[1].columns == ["method", "1", "2"]


def test_every_domain_is_left_out_once(tiny, tmp_path):
    found = tiny("i2pfl.table3", datasets="office_caltech10", methods=["fedavg"], fraction="0.5", out=tmp_path)
    entry = found.content["datasets"]["office_caltech10"]["methods"]["fedavg"]
    left_out = ["to caltech", "to amazon", "to webcam", "to dslr"]
    assert list(entry["global"]["columns"]) == left_out
    columns = [entry["global"]["columns"][column]["mean"] for column in left_out]
    assert entry["global"]["average"]["mean"] == pytest.approx(sum(columns) / 4)
    assert entry["global"]["worst"]["mean"] == min(columns)
    (path,) = entry["runs"]["to webcam"]
    summary = json.loads((tmp_path / path / "summary.json").read_text())
    assert summary["protocol"] == "leave-out=webcam"
    assert columns[2] == summary["accuracy"]["global"]["webcam"]


def test_both_views_of_label_skew_are_kept_apart(tiny, tmp_path):
    found = tiny("conffedproto.table1", datasets="mnist", methods="fedavg,conffedproto", out=tmp_path)
    personal, shared = found.tables()
    assert [row[0] for row in personal.rows] == ["fedavg", "conffedproto"]
    assert [row[0] for row in shared.rows] == ["fedavg"], "there is no global model in the other"
    assert shared.rows[0][1].endswith("(88.34)")
    assert "(" not in personal.rows[0][1], "the paper scored fedavg in the other view"
    assert personal.rows[1][3].endswith("(98.91)")


def test_some_columns_can_be_chosen(tiny, tmp_path):
    chosen = {"datasets": "mnist", "methods": "conffedproto", "out": tmp_path}
    (table,) = tiny("conffedproto.table1", columns="alpha=0.5", **chosen).tables()
    assert table.columns[1:3] == ["alpha=0.5", "average"]
    assert table.rows[0][1].endswith("(98.91)")
    with pytest.raises(UserError, match=r"did you mean alpha=0\.5"):
        tiny("conffedproto.table1", columns="alpha=.5", **chosen)


def test_merged_test_sets_and_external_sites(tiny, tmp_path):
    found = tiny("fedmp.table3", methods="fedavg", out=tmp_path / "dr")
    entry = found.content["datasets"]["dr"]["methods"]["fedavg"]
    summary = json.loads((tmp_path / "dr" / entry["runs"][""][0] / "summary.json").read_text())
    assert entry["global"]["average"]["mean"] == summary["accuracy"]["global"]["pooled"]
    found = tiny("fedadapterproto.table1", methods="fedavg,fedproto", datasets="dr_fundus", out=tmp_path / "sites")
    methods = found.content["datasets"]["dr_fundus"]["methods"]
    assert list(methods["fedavg"]["global"]["columns"]) == ["to eyepacs", "to aptos", "to idrid"]
    assert methods["fedavg"]["paper"] == {"global": {"average": 0.6952}}
    assert methods["fedproto"]["global"] is None
    assert methods["fedproto"]["personal"] is not None


def test_images_of_sites_that_keep_their_normalisation_are_judged_with_it(tmp_path):
    for site, size in {"aptos": 40, "eyepacs": 12, "idrid": 8}.items():
        toy_data(tmp_path / "dr_fundus", [site], classes=5, train=20, test=size, channels=3)
    toy_data(tmp_path / "busi", ["busi"], classes=3, train=30, test=9, channels=3)
    small = {"image_size": 16, "rounds": 1, "epochs": 1, "engine": "loop", "set": {"model.width": 4}}
    chosen = {"methods": "fedavg,fraug,fedbn", "datasets": "dr,busi", "data_root": str(tmp_path)}
    found = reproduce("fedmp.table1", out=tmp_path / "out", **chosen, **small)
    sites, breast = (found.content["datasets"][name]["methods"] for name in ("dr", "busi"))

    summary = json.loads((tmp_path / "out" / sites["fedbn"]["runs"][""][0] / "summary.json").read_text())
    own = summary["accuracy"]["personal"]
    pooled = (40 * own["aptos-0"] + 12 * own["eyepacs-0"] + 8 * own["idrid-0"]) / 60
    assert sites["fedbn"]["personal"]["average"]["mean"] == pytest.approx(pooled)
    assert sites["fedbn"]["curve"] == [(1, pytest.approx(pooled))]
    assert sites["fedbn"]["paper"]["personal"] == {"average": 0.7235}
    assert sites["fraug"]["paper"]["global"] == {"average": 0.7312}
    assert sites["fraug"]["global"]["average"]["mean"] is not None
    # Images without a site have the global model only.
    assert breast["fedbn"]["personal"] is None
    assert breast["fedbn"]["paper"]["global"] == {"average": 0.8471}
    assert breast["fedbn"]["global"]["average"]["mean"] is not None


def test_shared_parameters_of_conffedproto():
    found = reproduce("conffedproto.table2").content["datasets"]
    ours = {dataset: {row[0]: row[1] for row in block["rows"]} for dataset, block in found.items()}
    assert ours == {
        "cifar10": {"fedavg": 163_690, "fedproto": 1_280, "conffedproto": 1_280},
        "mnist": {"fedavg": 44_426, "fedproto": 1_200, "conffedproto": 1_200},
        "emnist": {"fedavg": 47_571, "fedproto": 5_640, "conffedproto": 5_640},
    }


@pytest.mark.parametrize(
    "methods",
    [
        ["fedavg", "fedbn", "fedmp", "fedmp_fewshot"],
        pytest.param(["fedprox", "moon", "elastic", "fedmr"], marks=pytest.mark.slow),
    ],
)
def test_communication_of_fedmp_is_what_it_prints(methods):
    rows = reproduce("fedmp.table4", methods=methods).content["datasets"]["tb"]["rows"]
    for name, _, counted, exact, paper, accuracy in rows:
        assert round(counted, 2) == paper, name
        assert exact >= counted
        assert 81 < accuracy < 89


def test_partition_of_figure_4(tmp_path):
    toy_data(tmp_path / "cifar10", ["cifar10"], classes=10, train=500, test=10, channels=3)
    (table,) = reproduce("conffedproto.figure4", data_root=str(tmp_path)).tables()
    assert len(table.rows) == 10
    assert table.columns[:3] == ["client", "train", "class0"]
    assert sum(int(cell) for row in table.rows for cell in row[2:]) == 500


@pytest.mark.parametrize("name", list(SMALLEST))
def test_dry_run_of_every_preset(name):
    # Figures repeat the rows of tables, or one method with many values.
    rows = [row.title for row in find_preset(name).rows_at("lite")]
    chosen = rows[-3:] if ".figure" in name else rows
    estimates = dry_run(name, datasets=[SMALLEST[name]], methods=chosen)
    assert [each.row for each in estimates] == (chosen or ["fedavg"])
    for each in estimates:
        assert each.seconds > 0
        assert each.memory > 0
        assert each.method == "centralized" or each.up > 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", list(SMALLEST))
def test_dry_run_of_every_data_set_at_every_scale(name, scale):
    preset = find_preset(name)
    if there := preset.datasets_at(scale):
        assert len(dry_run(name, scale=scale)) == len(there) * max(1, len(preset.rows_at(scale)))


@pytest.mark.usefixtures("no_garbage_collection")
def test_estimate_counts_every_image_of_every_client():
    (short,) = dry_run("i2pfl.table2", datasets="office_caltech10", methods="fedavg")
    (long,) = dry_run("i2pfl.table2", datasets="office_caltech10", methods="fedavg", rounds=400)
    assert (short.clients, short.rounds, short.runs) == (10, 40, 1)
    assert long.up == 10 * short.up
    assert 3 < long.seconds / short.seconds < 30


def test_what_is_frozen_is_counted_once_for_all_runs():
    chosen = {"scale": "imagenet", "datasets": "office_caltech10", "methods": "fedavg,fedprox,fedncm"}
    trained, other, computed = estimates = dry_run("i2pfl.table2", **chosen)
    assert trained.frozen == other.frozen < computed.frozen, "fedncm trains nothing of the network"
    assert trained.extraction > 0
    seconds = sum(each.seconds for each in estimates) * 5 + other.extraction + computed.extraction
    assert total_hours(estimates, 5) == pytest.approx(seconds / cores() / 3600)


def test_an_estimate_is_of_images_as_large_as_in_the_runs():
    chosen = {"scale": "imagenet", "datasets": "dr", "methods": "stage 1", "rounds": 1}
    (small,), (large,) = (dry_run("fedmp.table2", image_size=side, **chosen) for side in (32, 64))
    assert small.memory < large.memory
    assert small.up < large.up, "embeddings of an early stage have four times as many values"


def test_the_attack_behind_a_table_of_leakage_is_counted(monkeypatch):
    monkeypatch.setattr("protofed.studies.tables.leakage.decoder_step_seconds", lambda *_: 7.0)
    (each,) = dry_run("fedmp.table5", datasets="dr", methods="4th stage")
    assert each.clients == 3
    assert 3 * 800 * 7.0 < each.seconds < 3 * 800 * 7.0 + 3600


def test_an_estimate_has_the_plan_of_the_run():
    preset = find_preset("fedmp.table1")
    rows = preset.selected_rows(["fedavg", "fedmp_fewshot"])
    plain, few = (row_options(preset, row, "tb", "lite", {}) for row in rows)
    assert sum(plain.training_plan().epochs) == 50
    assert few.set["plan"] == "10,20,20", "3 exchanges, as many epochs in all"


def test_a_table_from_imagenet_on_tiny_images(tmp_path):
    """All that is special about the scale: weights from the package, a frozen prefix, a head from class means."""
    sites = ["caltech", "amazon", "webcam", "dslr"]
    toy_data(tmp_path / "root" / "office_caltech10", sites, classes=10, train=60, test=10, size=32, channels=3)
    small = {"image_size": 32, "rounds": 1, "evaluate_every": 1, "engine": "loop", "seeds": [0]}
    chosen = {"datasets": "office_caltech10", "methods": "fedavg,protoridge", "scale": "imagenet"}
    found = reproduce("i2pfl.table2", out=tmp_path / "out", data_root=str(tmp_path / "root"), **chosen, **small)
    methods = found.content["datasets"]["office_caltech10"]["methods"]
    assert found.failures == ()
    paths = {name: tmp_path / "out" / entry["runs"][""][0] for name, entry in methods.items()}
    start = {name: json.loads((path / "run.json").read_text()) for name, path in paths.items()}
    assert start["fedavg"]["model"]["start"]["from"] == "imagenet"
    assert start["fedavg"]["model"]["start"]["train"] == "last"
    assert [start[name]["method"]["starts_from_means"] for name in paths] == [True, False]
    assert methods["protoridge"]["paper"] is None
    assert methods["fedavg"]["bytes"]["up"]["weights"] > methods["protoridge"]["bytes"]["up"]["total"]


def test_an_estimate_is_of_the_columns_asked_for():
    chosen = {"datasets": "mnist", "methods": "fedavg"}
    (every,), (one,) = (dry_run("conffedproto.table1", columns=each, **chosen) for each in (None, "alpha=0.1"))
    assert (every.runs, one.runs) == (3, 1)
    with pytest.raises(UserError, match=r"alpha=0\.7"):
        dry_run("conffedproto.table1", columns="alpha=0.7", **chosen)


def test_mistakes_are_named(tmp_path):
    with pytest.raises(UserError, match="needs --out"):
        reproduce("i2pfl.table2")
    with pytest.raises(UserError, match="lite or paper or imagenet"):
        reproduce("i2pfl.table2", scale="tiny", out=tmp_path)
    with pytest.raises(UserError, match="unknown option"):
        reproduce("i2pfl.table2", out=tmp_path, roundz=3)


def test_command_lists_tries_and_runs(data_root, tmp_path, capsys):
    assert main(["reproduce", "--json"]) == 0
    assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == preset_names()
    assert main(["reproduce"]) == 0
    assert "i2pfl.table2" in capsys.readouterr().out
    assert main(["reproduce", "i2pfl.tabel2"]) == 2
    assert "did you mean" in capsys.readouterr().err
    only = ["--datasets", "office_caltech10", "--methods", "fedavg"]
    assert main(["reproduce", "i2pfl.table2", *only, "--dry-run"]) == 0
    assert "hours" in capsys.readouterr().out
    tiny = ["--model", "mlp", "--image-size", "8", "--rounds", "1", "--epochs", "1", "--set", "data.augment=none"]
    out = str(tmp_path / "out")
    assert main(["reproduce", "i2pfl.table2", *only, *tiny, "--data-root", data_root, "--out", out]) == 0
    assert "(57.50)" in capsys.readouterr().out


def test_leakage_of_fedmps_stages(data_root, tmp_path, monkeypatch):
    monkeypatch.setattr(leakage, "STEPS", 5)
    chosen = {
        "data_root": data_root,
        "rounds": 1,
        "epochs": 1,
        "engine": "loop",
        "image_size": 16,
        "set": {"model.width": 4},
        "methods": "1st stage,4th stage",
        "out": tmp_path,
    }
    found = reproduce("fedmp.table5", **chosen)
    table = found.tables()[0]
    assert table.columns[:7] == ["features", "FID-like", "max SSIM", "min L2", "mean SSIM", "mean L2", "L2 < 0.1"]
    assert [row[0] for row in table.rows] == ["1st stage", "4th stage"]
    assert table.rows[0][1].endswith("(820)")
    assert table.rows[1][3].endswith("(0.1979)")
    entry = found.content["datasets"]["dr"]["methods"]["1st stage"]
    assert entry["paper"]["leakage"] == {"FID": 820, "max SSIM": 0.7661, "min L2": 0.0801}
    figures = entry["leakage"]["figures"]
    assert 0 < figures["min L2"] < figures["mean L2"] < 1
    (run,) = entry["runs"][""]
    audited = json.loads((tmp_path / run / "audit" / "audit.json").read_text())
    (sent,) = [each for each in audited["reconstruction"] if each["source"] == "sent"]
    assert figures["class mean: L2"] == sent["mean"]["class_mean_rms"], "what knowing the class alone gives"
    assert figures["class mean: SSIM"] == sent["mean"]["class_mean_ssim"]
    assert figures["class mean: L2 < 0.1"] == sent["mean"]["class_mean_below_risk_line"]
    assert "(0.7661)" in (tmp_path / "comparison.md").read_text()

    monkeypatch.setattr(leakage, "audit", None)
    again = reproduce("fedmp.table5", **chosen)
    assert again.content == found.content, "audits that are there are not repeated"

    asked = []
    monkeypatch.setattr(leakage, "STEPS", 7)
    monkeypatch.setattr(leakage, "audit", lambda path, **options: asked.append(options) or audit(path, **options))
    reproduce("fedmp.table5", **chosen)
    assert [(options["steps"], options["out"].name) for options in asked] == [(7, "table")] * 2, "but cheaper ones are"
