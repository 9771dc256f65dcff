"""The page of several tables: an overview that leads to each of them, all differences, figures, what is missing."""

import base64
import json
import re

from protofed.studies.tables.results_page import write_page


def run(row, seed, accuracy, personal=None, **more):
    views = {"global": accuracy, "personal": accuracy if personal is None else personal}
    return {
        **{"row": row, "condition": "", "seed": seed, "auc": {}, "leakage": {}, "converged": {}, "rounds": 1},
        "accuracy": {view: {"value": value, "parts": {}} for view, value in views.items()},
        **{"bytes": {"up": 2000, "down": 10}, "cpu_seconds": 1.0},
        **more,
    }


def write(folder, name, runs, **changes):
    rows = dict.fromkeys(each["row"] for each in runs)
    content = {
        **{
            "preset": name,
            "title": "A < B",
            "dataset": "set",
            "scale": "lite",
            "command": f"protofed reproduce {name}",
        },
        **{"options": {"set": {}}, "common": {"set": {}}, "date": "2026-01-01", "machine": "m"},
        **{"versions": {"protofed": "1", "torch": "2"}, "baseline": "fedavg", "value": "average"},
        **{"conditions": [], "domains": []},
        "rows": {row: {"method": row, "settings": {}, "paper": None} for row in rows},
        "runs": runs,
        **changes,
    }
    folder.mkdir(exist_ok=True)
    (folder / f"{name}-set-lite.json").write_text(json.dumps(content))


def page_of(tmp_path, left_out=(), failures=()):
    write_page(tmp_path / "results", tmp_path / "index.html", left_out, failures)
    return (tmp_path / "index.html").read_text()


def test_the_overview_names_the_first_row_and_leads_to_its_table(tmp_path):
    first = [run("fedavg", seed, 0.5 + 0.1 * seed) for seed in range(3)]
    second = [run("i2pfl", seed, 0.52 + 0.1 * seed + 0.01 * seed) for seed in range(3)]
    write(tmp_path / "results", "p.one", [*first, *second, run("one lucky seed", 2, 0.99)])
    write(tmp_path / "results", "p.two", [run("fedavg", 0, 0.9), run("i2pfl", 0, 0.8)])
    page = page_of(tmp_path)
    assert "2 tables · 9 runs" in page
    assert '<a href="#p.one-set-lite">p.one, set</a>' in page
    assert '<section id="p.one-set-lite">' in page
    # Gaps of 2, 3 and 4 points: 3 +- 4.303 * 1 / sqrt 3.
    assert "<td>fedavg 60.00</td><td>i2pfl 63.00</td><td>+3.00 [+0.52, +5.48]</td>" in page
    assert "<td>fedavg 90.00</td><td>fedavg 90.00</td><td>–</td>" in page
    assert "A &lt; B" in page


def test_differences_are_drawn_where_there_are_seeds(tmp_path):
    write(tmp_path / "results", "p.one", [run("fedavg", 0, 0.9), run("i2pfl", 0, 0.8)])
    assert "All differences" not in page_of(tmp_path)
    runs = [run(row, seed, 0.5 + 0.1 * seed + gap) for row, gap in (("fedavg", 0), ("i2pfl", 0.1)) for seed in (0, 1)]
    write(tmp_path / "results", "p.one", runs)
    page = page_of(tmp_path)
    assert "img-src data:" in page
    (source,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    assert "p.one, set, scratch, against fedavg" in base64.b64decode(source).decode()


def test_a_view_that_says_the_same_is_shown_once(tmp_path):
    write(tmp_path / "results", "p.one", [run("fedavg", 0, 0.9)])
    page = page_of(tmp_path)
    assert "Accuracy in %, global view" in page
    assert "Accuracy in %, personal view" not in page
    write(tmp_path / "results", "p.one", [run("fedavg", 0, 0.9, personal=0.8)])
    assert "Accuracy in %, personal view" in page_of(tmp_path)


def test_curves_costs_and_what_is_missing_are_on_the_page(tmp_path):
    curve = {"curve": {"global": [[1, 0.25], [2, 0.75]]}}
    write(tmp_path / "results", "p.one", [run("fedavg", 0, 0.75, **curve)])
    page = page_of(tmp_path, ["p.two, tb: the data root has no tb"], ["fedprox, seed 0: <no> memory"])
    assert "Accuracy in % after round, global view" in page
    assert "<details><summary>Costs</summary>" in page
    assert "2.0 kB" in page
    assert "<li>p.two, tb: the data root has no tb</li>" in page
    assert "<li>fedprox, seed 0: &lt;no&gt; memory</li>" in page


def test_without_results_there_is_a_page_all_the_same(tmp_path):
    page = page_of(tmp_path, failures=["p.one: no images"])
    assert "0 tables" in page
    assert "<h2>Overview</h2>" not in page
    assert "p.one: no images" in page
