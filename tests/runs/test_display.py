"""Results as Python and notebooks show them."""

import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas
import pytest

import protofed
from protofed import UserError
from protofed.explain import explain
from protofed.pages.drawing import line_chart
from protofed.studies import Comparison

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory, tiny_data: str) -> Comparison:
    options: dict[str, Any] = {"model": "mlp", "rounds": 2, "batch": 8, "engine": "loop", "set": {"model.hidden": 16}}
    out = tmp_path_factory.mktemp("compared") / "pair"
    return protofed.compare(["fedavg", "fedproto"], data=tiny_data, seeds=[0, 1], out=out, **options)


@pytest.fixture(scope="module")
def run(compared: Comparison) -> protofed.Run:
    return protofed.Run(compared.path / compared.content["methods"]["fedavg"]["runs"][0])


def polylines(svg: str) -> list[list[tuple[float, float]]]:
    """The points of every line; the picture must be well-formed XML."""
    lines = ElementTree.fromstring(svg).iter(f"{SVG}polyline")
    pairs = [[point.split(",") for point in line.attrib["points"].split()] for line in lines]
    return [[(float(x), float(y)) for x, y in line] for line in pairs]


def test_a_run_in_a_line(run: protofed.Run) -> None:
    average = run.rounds[-1]["accuracy"]["global"]["average"]
    assert repr(run).startswith(f"<Run in '{run.path}': fedavg on data, 2 of 2 rounds, {100 * average:.2f} %")
    assert repr(protofed.Run("nowhere")) == "<Run in 'nowhere': nothing to read yet>"
    assert protofed.Run("nowhere")._repr_html_()


def test_a_runs_rounds_as_a_table(run: protofed.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    table = run.table()
    assert isinstance(table, pandas.DataFrame)
    assert list(table["round"]) == [1, 2]
    assert list(table["accuracy.global.a"]) == [record["accuracy"]["global"]["a"] for record in run.rounds]
    assert table["bytes.up.total"].sum() == run.summary["bytes"]["up"]["total"]
    monkeypatch.setitem(sys.modules, "pandas", None)
    rows = run.table()
    assert isinstance(rows, list)
    assert [row["round"] for row in rows] == [1, 2]


def test_curves_of_a_run(run: protofed.Run, tmp_path: Path) -> None:
    drawn = run.plot()
    assert len(polylines(drawn._repr_svg_())) == 4, "three domains and their average"
    assert drawn.save(tmp_path / "run.svg").read_text() == drawn.svg
    assert [len(line) for line in polylines(run.plot("bytes").svg)] == [2, 2]
    assert len(polylines(run.plot("loss").svg)) == 1
    with pytest.raises(UserError, match="did you mean loss"):
        run.plot("los")  # type: ignore[arg-type]


def test_a_run_in_a_notebook(run: protofed.Run) -> None:
    html = run._repr_html_()
    assert html.count("<svg") == 1
    for domain in ("a", "b", "c", "average"):
        assert f">{domain}</th>" in html


def test_a_comparison(compared: Comparison) -> None:
    assert repr(compared) == f"<Comparison of fedavg, fedproto; 2 seeds in '{compared.path}'>"
    table = compared.table("personal").set_index("method")
    content = compared.content["methods"]
    assert list(table.index) == ["fedavg", "fedproto"]
    assert table.loc["fedproto", "average"] == content["fedproto"]["personal"]["average"]["mean"]
    assert table.loc["fedavg", "bytes_up"] == content["fedavg"]["bytes"]["up"]["total"]
    assert "fedproto" in compared._repr_html_()
    with pytest.raises(UserError, match="did you mean global"):
        compared.table("globl")  # type: ignore[arg-type]


def test_curves_of_a_comparison(compared: Comparison) -> None:
    by_round, by_bytes = (polylines(compared.plot("personal", by=by).svg) for by in ("round", "bytes"))
    assert [len(line) for line in by_round] == [len(line) for line in by_bytes] == [2, 2]
    # fedproto sends far less, so that it ends far to the left of fedavg.
    ends = {name: line[-1][0] for name, line in zip(compared.content["methods"], by_bytes, strict=True)}
    assert ends["fedproto"] < ends["fedavg"] / 2


def test_explanations(tiny_run: Any, tmp_path: Path) -> None:
    run = tiny_run("i2pfl", model="cnn")
    explained = explain(run.path, domain="a", count=2)
    assert re.match(r"<Explanations of 2 images by a-0, b-0, c-0 in '", repr(explained))
    assert len(explained.table()) == 2 * 3
    first = explained.plot()
    assert first._repr_png_() == first.save(tmp_path / "first.png").read_bytes()
    assert explained._repr_html_().count("<img") == 2
    with pytest.raises(UserError, match="there is no image"):
        explained.plot("nosuch")


def test_a_chart_keeps_noise_small_and_names_safe() -> None:
    flat = line_chart("<b>", "round", {"a<script>": [(1, 0.500), (2, 0.501)], "b": [(1, 0.500), (2, 0.5)]})
    first, second = polylines(flat.svg)
    assert abs(first[1][1] - first[0][1]) < 10, "a tenth of a point is not a cliff"
    assert first[0] == second[0]
    assert "<script>" not in flat.svg
    assert polylines(line_chart("empty", "round", {}).svg) == []
