"""Figures on pages about results come from the files in docs/results/data: all is made again and compared."""

import json
import re
import sys
import tomllib
from math import sqrt
from pathlib import Path
from statistics import stdev

import pytest
from scipy.stats import t

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import make_results  # noqa: E402

from protofed.pages import forest_plot  # noqa: E402
from protofed.studies.tables.explained import AGREEMENT, FAITHFULNESS  # noqa: E402

RESULTS = make_results.Results()
PAGES = make_results.pages()
CLAIMS = make_results.FOLDER / "claims.toml"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_tables_are_those_of_the_files(page):
    text = page.read_text()
    assert RESULTS.rebuilt(text) == text, "python docs/make_results.py writes it anew"
    marks = len(make_results.MARKED.findall(text)) + len(make_results.FIGURE.findall(text))
    assert text.count("<!-- table:") + text.count("<!-- figure:") == text.count("<!-- end -->") == marks


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_no_figure_is_typed_by_hand(page):
    assert typed_figures(page.read_text()) == []


def typed_figures(text):
    """Percentages and differences that no mark makes; settings such as a rate of 0.01 are neither."""
    made = make_results.FIGURE.sub("", make_results.MARKED.sub("", text))
    prose = re.sub(r"`[^`]*`", "", re.sub(r"^(    |\|).*$", "", made, flags=re.MULTILINE))
    tables = re.findall(r"^\|.*?(?:\| *[+-]?\d+\.\d|\d\d\.\d).*$", made, flags=re.MULTILINE)
    return tables + re.findall(r"[+-]\d+\.\d+|\d+\.\d+ (?:%|points)", prose)


def test_typed_figures_are_found():
    mark = '<!-- figure: row = "a" -->+1.5<!-- end -->'
    assert typed_figures(f"It gains {mark} points with a rate of 0.01.\n\n    --lr +0.5\n") == []
    assert typed_figures("It gains +1.5.") == ["+1.5"]
    assert typed_figures("It has 93.9 % and 2.5 points.") == ["93.9 %", "2.5 points"]
    assert typed_figures("| a | 93.9 |") == ["| a | 93.9 |"]
    assert typed_figures("| a | has 93.9 |") == ["| a | has 93.9 |"]
    assert typed_figures("| a | 0.91 |") == ["| a | 0.91 |"]
    assert typed_figures("| Dirichlet 0.1 | a |") == []


@pytest.mark.parametrize("name", ["claims.svg", "differences.svg"])
def test_pictures_are_those_of_the_files(name):
    assert (make_results.FOLDER / name).read_text() == RESULTS.pictures()[name]


def test_every_file_has_a_page():
    named = {name for page in PAGES for name in re.findall(r"<!-- table: (\S+) ", page.read_text())}
    assert named >= set(RESULTS.files)


def test_claims_name_files_rows_and_pages_that_exist():
    for claim in tomllib.loads(CLAIMS.read_text())["claims"]:
        for found in filter(None, (claim.get("scratch"), claim.get("imagenet"))):
            assert "page" not in found or (make_results.FOLDER / found["page"]).is_file()
            rows = RESULTS.files[found["file"]].content["rows"]
            assert {found["row"], found["against"]} <= rows.keys()


def test_runs_made_again_agree_with_the_pages():
    for name, again in RESULTS.again.items():
        page = RESULTS.files[name]
        view = again.widest_view()
        before, now = (make_results._figures_of_runs(each, view) for each in (page, again))
        assert before.keys() & now.keys(), f"{name}: nothing was made again"
        for row, condition, seed in before.keys() & now.keys():
            seeds = [figure for (one, column, _), figure in before.items() if (one, column) == (row, condition)]
            half = 0.0 if len(seeds) == 1 else t.ppf(0.975, len(seeds) - 1) * stdev(seeds) / sqrt(len(seeds))
            difference = abs(now[row, condition, seed] - before[row, condition, seed])
            assert difference <= half + 1e-6, (name, row, condition, seed)


@pytest.fixture
def folder(tmp_path):
    """Results of another project: one file with two rows and three seeds."""
    scores = {"fedavg": (0.5, 0.6, 0.7), "a < b": (0.52, 0.63, 0.71)}
    content = {
        **{"preset": "p.t", "title": "T", "dataset": "d", "scale": "lite", "command": "c", "options": {"set": {}}},
        **{"date": "2026-01-01", "machine": "m", "versions": {"protofed": "1", "torch": "2"}},
        **{"baseline": "fedavg", "value": "average", "conditions": [], "domains": []},
        "rows": {
            row: {"method": "x", "settings": {}, "paper": {"global": {"average": paper}}}
            for row, paper in zip(scores, (0.575, 0.5), strict=True)
        },
        "runs": [
            {
                **{"row": row, "condition": "", "seed": seed, "auc": {}, "leakage": {}, "converged": {}},
                **{"accuracy": {"global": {"value": value, "parts": {}}}, "rounds": 1},
                "cpu_seconds": 5.0 if row == "fedavg" else 2.0,
                "bytes": {"up": 20, "down": 12} if row == "fedavg" else {"up": 1, "down": 1},
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
    assert "| a < b | 62.00 (50.00) | 9.54 | 3 | +2.00 [-0.48, +4.48] |" in page
    assert results.rebuilt(page) == page
    changed = page.replace("62.00 (", "63.00 (")
    assert results.rebuilt(changed) == page
    with pytest.raises(SystemExit, match="there is no"):
        results.rebuilt("<!-- table: q about -->\n<!-- end -->")
    with pytest.raises(SystemExit, match="a part is"):
        results.rebuilt("<!-- table: p.t-d-lite median -->\n<!-- end -->")


def test_orders_of_methods_are_compared_where_the_paper_has_enough_rows(folder):
    assert make_results.Results(folder).orders().rows == []
    path = folder / "data" / "p.t-d-lite.json"
    content = json.loads(path.read_text())
    for row, ours, paper in (("c", 0.9, 0.55), ("d", 0.1, 0.99), ("ours", 0.95, None)):
        published = None if paper is None else {"global": {"average": paper}}
        content["rows"][row] = {"method": "x", "settings": {}, "paper": published}
        accuracy = {"global": {"value": ours, "parts": {}}}
        content["runs"].append({**content["runs"][0], "row": row, "accuracy": accuracy})
    path.write_text(json.dumps(content))
    results = make_results.Results(folder)
    # Ours d, fedavg, a < b, c and the paper's a < b, c, fedavg, d: of six pairs one is in the same order.
    assert results.orders().rows == [["p.t-d-lite", "4", "d", "c", f"{(1 - 5) / 6:+.2f}"]]
    assert "| p.t-d-lite | 4 | d | c | -0.67 |" in results.rebuilt("<!-- table: orders -->\n<!-- end -->")


def test_figures_in_sentences_are_made_from_the_files(folder):
    path = folder / "data" / "p.t-d-lite.json"
    content = json.loads(path.read_text())
    for run in content["runs"]:
        run["leakage"] = {"min L2": 0.1 + 0.025 * run["seed"]}
        models = {"site-0": {**dict.fromkeys(FAITHFULNESS, 0.5), "right": 0.75}}
        agreement = {"all": {**dict.fromkeys(AGREEMENT, 0.5), "iou": 0.4}}
        run["explanations"] = {"images": 8, "agreement": agreement, "models": models}
    path.write_text(json.dumps(content))
    results = make_results.Results(folder)
    page = results.page("p.t-d-lite")
    made = {
        'row = "a < b"': "62.0",
        'row = "a < b", digits = 0': "62",
        'row = "a < b", against = "fedavg"': "+2.0",
        'row = "fedavg", against = "a < b", digits = 2': "-2.00",
        'row = "fedavg", against = "fedavg"': "0.0",
        'row = "a < b", against = "fedavg", interval = true': "+2.0 [-0.5, +4.5]",
        'row = "fedavg", paper = true': "57.5",
        'row = "a < b", against = "fedavg", paper = true': "-7.5",
        'row = "a < b", against = "fedavg", cost = "bytes"': "1/16",
        'row = "fedavg", against = "a < b", cost = "seconds"': "2.5",
        'row = "fedavg", leaked = "min L2"': "0.125",
        'row = "fedavg", explained = "iou", of = "all"': "0.40",
        'row = "fedavg", explained = "right", of = "site-0"': "0.75",
    }
    for keys, figure in made.items():
        marked = f"{page}It is <!-- figure: {keys} -->99.9<!-- end --> %.\n"
        expected = f"{page}It is <!-- figure: {keys} -->{figure}<!-- end --> %.\n"
        assert results.rebuilt(marked) == expected
    with pytest.raises(SystemExit, match="there is no"):
        results.rebuilt('<!-- figure: row = "fedavg" -->1<!-- end -->')


def test_runs_made_again_stand_beside_those_of_the_page(folder):
    again = json.loads((folder / "data" / "p.t-d-lite.json").read_text())
    again["runs"] = [run for run in again["runs"] if run["row"] == "fedavg" and run["seed"] < 2]
    again["runs"][1]["accuracy"]["global"]["value"] = 0.599
    again["date"] = "2026-02-01"
    (folder / "reruns").mkdir()
    (folder / "reruns" / "p.t-d-lite.json").write_text(json.dumps(again))
    (row,) = make_results.Results(folder).reruns().rows
    assert row == ["p.t-d-lite", "fedavg", "2", "55.00", "54.95", "0.10", "2026-02-01"]


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


def test_coverage_counts_rows_and_seeds_and_names_the_page(folder):
    path = folder / "data" / "p.t-d-lite.json"
    content = json.loads(path.read_text())
    content["runs"].pop()
    path.write_text(json.dumps(content))
    (folder / "a-page.md").write_text(make_results.Results(folder).page("p.t-d-lite"))
    content |= {"preset": "i2pfl.table5", "dataset": "pacs", "scale": "imagenet"}
    (folder / "data" / "i2pfl.table5-pacs-imagenet.json").write_text(json.dumps(content))
    (folder / "b-page.md").write_text(make_results.Results(folder).page("i2pfl.table5-pacs-imagenet"))
    assert make_results.Results(folder).coverage().rows == [
        ["i2pfl.table5", "T", "pacs", "-", "[2 of 5 rows](b-page.md), 2 to 3 seeds"],
        ["p.t", "T", "d", "[all rows](a-page.md), 2 to 3 seeds", "-"],
    ]


def claimed(folder, row, against):
    """What the matrix of claims says of a claim that `row` beats `against`, from scratch."""
    found = f'{{ file = "p.t-d-lite", row = "{row}", against = "{against}", page = "x.md" }}'
    (folder / "claims.toml").write_text(f'[[claims]]\npaper = "P"\nclaim = "b beats FedAvg"\nscratch = {found}\n')
    (line,) = make_results.Results(folder).claims().rows
    return line[2:]


def test_claims_take_their_effects_from_the_files(folder):
    # Gaps of 2, 3 and 1 points: t = 2 / (1 / sqrt 3) = 3.464 with two degrees of freedom, so p = 0.074.
    effect = "**not decided**: +2.00 [-0.48, +4.48], above with 3 of 3 seeds, p = 0.074 ([page](x.md))"
    assert claimed(folder, "a < b", "fedavg") == ["-7.5", effect, "not measured"]


def test_a_claim_holds_or_turns_round_where_chance_is_ruled_out(folder):
    path = folder / "data" / "p.t-d-lite.json"
    content = json.loads(path.read_text())
    for run in content["runs"]:
        if run["row"] == "a < b":
            gap = (0.02, 0.021, 0.019)[run["seed"]]
            run["accuracy"]["global"]["value"] = (0.5, 0.6, 0.7)[run["seed"]] + gap
    path.write_text(json.dumps(content))
    assert claimed(folder, "a < b", "fedavg")[1].startswith("**holds**: +2.00 [+1.75, +2.25], above with 3 of 3 seeds")
    assert claimed(folder, "fedavg", "a < b")[1].startswith("**turns round**: -2.00 [-2.25, -1.75], above with 0 of 3")
    content["runs"] = [run for run in content["runs"] if run["seed"] == 0]
    path.write_text(json.dumps(content))
    assert claimed(folder, "a < b", "fedavg")[1] == "**not decided**: +2.00, one seed ([page](x.md))"


def test_verdicts_are_counted_by_paper_and_start(folder):
    found = '{ file = "p.t-d-lite", row = "a < b", against = "fedavg", page = "x.md" }'
    claims = [("P", "scratch"), ("P", "imagenet"), ("Q", "scratch")]
    text = "".join(f'[[claims]]\npaper = "{paper}"\nclaim = "c"\n{start} = {found}\n' for paper, start in claims)
    (folder / "claims.toml").write_text(text)
    # Its interval has nought in it, so each claim is decided nowhere, and measured from one start alone.
    assert make_results.Results(folder).verdicts().rows == [
        ["P", "scratch", "0", "0", "1", "1"],
        ["P", "ImageNet", "0", "0", "1", "1"],
        ["Q", "scratch", "0", "0", "1", "0"],
        ["Q", "ImageNet", "0", "0", "0", "1"],
    ]


def at(points, names):
    """Where a difference is drawn."""
    return f"{names + forest_plot._WIDTH / 2 + points * forest_plot._WIDTH / 40:.1f}"


def test_differences_are_drawn_at_their_place(folder):
    picture = make_results.Results(folder).pictures()["differences.svg"]
    assert f'cx="{at(2, 330)}"' in picture
    assert f'x1="{at(-0.4841, 330)}" x2="{at(4.4841, 330)}"' in picture
    assert "a &lt; b" in picture
    assert "p.t, d, scratch, against fedavg" in picture
    assert "the paper" not in picture, "no row of it is published"


def test_claims_are_drawn_beside_what_was_published(folder):
    claimed(folder, "a < b", "fedavg")
    picture = make_results.Results(folder).pictures()["claims.svg"]
    assert f'<circle cx="{at(2, 650)}"' in picture
    assert f'x1="{at(-0.4841, 650)}" x2="{at(4.4841, 650)}"' in picture
    half = 2.5 * 40 / forest_plot._WIDTH  # of a square, in points
    assert f'<rect x="{at(-7.5 - half, 650)}"' in picture
    assert "b beats FedAvg: -7.5 in the paper" in picture
    assert "from scratch" in picture
    assert "from ImageNet" not in picture
    path = folder / "data" / "p.t-d-lite.json"
    content = json.loads(path.read_text())
    content["runs"] = [run for run in content["runs"] if run["seed"] == 0]
    path.write_text(json.dumps(content))
    assert "b beats FedAvg: +2.00, one seed" in make_results.Results(folder).pictures()["claims.svg"]
