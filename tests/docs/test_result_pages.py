"""Figures on the pages of docs/results come from the files beside them: all is made again and compared."""

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import make_results  # noqa: E402

from protofed.studies.tables.explained import FAITHFULNESS  # noqa: E402

RESULTS = make_results.Results()
PAGES = sorted(make_results.FOLDER.glob("*.md"))
CLAIMS = make_results.FOLDER / "claims.toml"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_tables_are_those_of_the_files(page):
    text = page.read_text()
    assert RESULTS.rebuilt(text) == text, "python docs/make_results.py writes it anew"
    assert text.count("<!-- table:") == text.count("<!-- end -->") == len(make_results.MARKED.findall(text))


def test_the_picture_is_that_of_the_files():
    assert (make_results.FOLDER / "differences.svg").read_text() == RESULTS.picture()


def test_every_file_has_a_page():
    named = {name for page in PAGES for name in re.findall(r"<!-- table: (\S+) ", page.read_text())}
    assert named >= set(RESULTS.files)


def test_claims_name_files_rows_and_pages_that_exist():
    for claim in tomllib.loads(CLAIMS.read_text())["claims"]:
        for found in filter(None, (claim.get("scratch"), claim.get("imagenet"))):
            assert found["verdict"] in ("holds", "turns round", "does not hold", "not decided")
            assert "page" not in found or (make_results.FOLDER / found["page"]).is_file()
            if "file" in found:
                rows = RESULTS.files[found["file"]].content["rows"]
                assert {found["row"], found["against"]} <= rows.keys()


@pytest.fixture
def folder(tmp_path):
    """Results of another project: one file with two rows and three seeds."""
    scores = {"fedavg": (0.5, 0.6, 0.7), "a < b": (0.52, 0.63, 0.71)}
    content = {
        **{"preset": "p.t", "title": "T", "dataset": "d", "scale": "lite", "command": "c", "options": {"set": {}}},
        **{"date": "2026-01-01", "machine": "m", "versions": {"protofed": "1", "torch": "2"}},
        **{"baseline": "fedavg", "value": "average", "conditions": [], "domains": []},
        "rows": {row: {"method": "x", "settings": {}, "paper": None} for row in scores},
        "runs": [
            {
                **{"row": row, "condition": "", "seed": seed, "auc": {}, "leakage": {}, "converged": {}},
                **{"accuracy": {"global": {"value": value, "parts": {}}}, "cpu_seconds": 1.0, "rounds": 1},
                "bytes": {"up": 1, "down": 1},
            }
            for row, values in scores.items()
            for seed, value in enumerate(values)
        ],
    }
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "p.t-d-lite.json").write_text(json.dumps(content))
    return tmp_path


def test_a_figure_that_was_changed_by_hand_is_noticed(folder):
    results = make_results.Results(folder)
    page = results.page("p.t-d-lite")
    assert "| a < b | 62.00 | 9.54 | 3 | +2.00 [-0.48, +4.48] |" in page
    assert results.rebuilt(page) == page
    changed = page.replace("62.00", "63.00")
    assert results.rebuilt(changed) == page
    with pytest.raises(SystemExit, match="there is no"):
        results.rebuilt("<!-- table: q about -->\n<!-- end -->")
    with pytest.raises(SystemExit, match="a part is"):
        results.rebuilt("<!-- table: p.t-d-lite median -->\n<!-- end -->")


def test_a_page_has_explanations_where_some_were_drawn(folder):
    assert "explanations" not in make_results.Results(folder).page("p.t-d-lite")
    path = folder / "data" / "p.t-d-lite.json"
    content = json.loads(path.read_text())
    models = {"site-0": dict.fromkeys(FAITHFULNESS, 0.25)}
    content["runs"][0]["explanations"] = {"images": 8, "agreement": {}, "models": models}
    path.write_text(json.dumps(content))
    page = make_results.Results(folder).page("p.t-d-lite")
    assert "<!-- table: p.t-d-lite explanations -->" in page
    assert "| fedavg | site-0 | 0.25 |" in page
    assert page.index("explanations -->") < page.index("costs -->")


def test_claims_take_their_effects_from_the_files(folder):
    (folder / "claims.toml").write_text(
        '[[claims]]\npaper = "P"\nclaim = "b beats FedAvg"\n'
        'scratch = { verdict = "holds", file = "p.t-d-lite", row = "a < b", against = "fedavg", page = "x.md" }\n'
    )
    (row,) = make_results.Results(folder).claims().rows
    # Gaps of 2, 3 and 1 points: t = 2 / (1 / sqrt 3) = 3.464 with two degrees of freedom, so p = 0.074.
    assert row[2:] == ["**holds**: +2.00 [-0.48, +4.48], 3 seeds, p = 0.074 ([page](x.md))", "not measured"]


def test_differences_are_drawn_at_their_place(folder):
    picture = make_results.Results(folder).picture()
    zero = make_results._LEFT + make_results._WIDTH / 2
    per_point = make_results._WIDTH / 40
    assert f'cx="{zero + 2 * per_point:.1f}"' in picture
    assert f'x1="{zero - 0.4841 * per_point:.1f}" x2="{zero + 4.4841 * per_point:.1f}"' in picture
    assert "a &lt; b" in picture
    assert "p.t, d, scratch, against fedavg" in picture
