"""comparison.json: its keys and their order are a contract, and the declared schema is what is written."""

import json
from pathlib import Path
from typing import Any

import pytest

import protofed
from protofed.errors import UserError
from protofed.studies import Comparison
from protofed.studies.schema import (
    ComparedMethod,
    ComparedView,
    ComparisonContent,
    ComputedBlock,
    ImageInterval,
    ImageTest,
    MetricOverSeeds,
    MissingMethodRun,
    ReproducedMethod,
    ReproducedView,
    ReproductionContent,
    is_reproduction,
    read_comparison,
)
from protofed.studies.statistics import PairedTest, PartialSpread, Spread
from protofed.studies.tables.reproduce import reproduce
from protofed.testing import toy_data

TINY: dict[str, Any] = {"model": "mlp", "rounds": 2, "batch": 8, "engine": "loop", "set": {"model.hidden": 8}}


def keys(content: Any, declared: Any) -> str:
    """The keys in the order of the file, which must be those of the schema."""
    assert set(content) == set(declared.__annotations__)
    return " ".join(content)


@pytest.fixture(scope="module")
def compared(tiny_data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("schema") / "cmp"
    methods = ["fedavg", "fedprox"]
    protofed.compare(methods, out=folder, seeds=[0, 1], data=tiny_data, **TINY)
    # One more seed, which is left to other machines, so that something is missing.
    protofed.compare(methods, out=folder, seeds=[0, 1, 2], data=tiny_data, shard="1/6", **TINY)
    return folder


def test_a_comparison(compared: Path) -> None:
    content = json.loads((compared / "comparison.json").read_text())
    assert keys(content, ComparisonContent) == (
        "baseline metric seeds options settings target chance methods complete missing"
    )
    assert list(content["target"]) == ["global", "personal"]
    assert keys(content["missing"][0], MissingMethodRun) == "method seed run reason failed"
    method = content["methods"]["fedprox"]
    assert (
        keys(method, ComparedMethod) == "kind knobs global personal bytes seconds paper seeds runs warnings by_metric"
    )
    assert list(method["by_metric"]) == ["global", "personal"]
    by_metric = method["by_metric"]["global"]
    assert keys(by_metric, MetricOverSeeds) == "average parts worst gap test test_on_images"
    assert keys(by_metric["average"], ImageInterval) == "mean std seeds interval"
    assert keys(by_metric["test_on_images"], ImageTest) == "difference interval p images seeds test p_holm"
    view = method["personal"]
    assert keys(view, ComparedView) == (
        "average pooled per_domain worst_domain held_out per_client worst_client "
        "test rounds_to_target bytes_to_target convergence_round fluctuation"
    )
    assert keys(view["average"], Spread) == "mean std seeds"
    assert list(view["worst_client"]) == ["mean", "std", "seeds", "names"]
    assert keys(view["rounds_to_target"], PartialSpread) == "mean std seeds reached"
    assert keys(view["test"], PairedTest) == "difference interval p seeds test p_holm tests"
    assert list(method["bytes"]) == ["up", "down"]
    assert list(method["bytes"]["up"]) == ["weights", "prototypes", "features", "other", "total"]


def test_a_comparison_is_read_again(compared: Path, tmp_path: Path) -> None:
    comparison = Comparison.read(compared)
    assert not is_reproduction(read_comparison(compared))
    assert comparison.content == json.loads((compared / "comparison.json").read_text())
    assert comparison.markdown() == (compared / "comparison.md").read_text()
    for text, problem in {"{": "not JSON", "[]": "not a JSON object", '{"preset": "x"}': "a table of a paper"}.items():
        (tmp_path / "comparison.json").write_text(text)
        with pytest.raises(UserError, match=problem):
            Comparison.read(tmp_path)


def test_a_reproduction(tmp_path: Path) -> None:
    domains = ["caltech", "amazon", "webcam", "dslr"]
    toy_data(tmp_path / "root" / "office_caltech10", domains, classes=10, train=60, test=20, channels=3)
    options = {**TINY, "image_size": 8, "epochs": 1, "set": {**TINY["set"], "data.augment": "none"}}
    selected = {"datasets": "office_caltech10", "methods": "fedavg", "data_root": str(tmp_path / "root")}
    reproduce("i2pfl.table2", out=tmp_path / "table", seeds=[0], **selected, **options)
    content = json.loads((tmp_path / "table" / "comparison.json").read_text())
    assert keys(content, ReproductionContent) == (
        "preset title scale seeds methods columns options baseline notes datasets"
    )
    assert is_reproduction(read_comparison(tmp_path / "table"))
    method = content["datasets"]["office_caltech10"]["methods"]["fedavg"]
    assert keys(method, ReproducedMethod) == ("method settings global personal bytes seconds leakage curve paper runs")
    assert keys(method["global"], ReproducedView) == "average worst columns test"


def test_a_table_that_is_computed() -> None:
    block = reproduce("conffedproto.table2", datasets="mnist", methods="fedproto").content["datasets"]["mnist"]
    assert keys(block, ComputedBlock) == "columns rows"
