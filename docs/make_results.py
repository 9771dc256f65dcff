"""Writes the figures on the pages about results from the files in docs/results/data: `python docs/make_results.py`.

`protofed reproduce TABLE ... --results docs/results/data` makes the files. On a page, what stands between
`<!-- table: FILE PART -->` and `<!-- end -->` is made from FILE.json; PART is one of

    about                     command, day, machine, seeds
    accuracy global           figures by column, spread, paired differences; also `accuracy personal`, `auc global`, ...
    curves global             accuracy over the rounds, in a figure of curves; also `curves personal`
    costs                     rounds, bytes and processor time of a run
    leakage                   what an attack rebuilds, in a table about that
    explanations              whether boxes matter and models agree, in a figure that draws explanations

`<!-- table: claims -->` is the matrix of claims.toml, whose words are written by hand and whose effects and verdicts
come from the files, and `<!-- table: verdicts -->` counts those; `<!-- table: orders -->` sets the order of methods
beside the papers'; `<!-- table: coverage -->` lists the pages, and how much of each table they have; `<!-- table:
reruns -->` compares runs that were made again (docs/results/reruns) with those behind the pages.

Figures in sentences are made as well: what stands between `<!-- figure: KEYS -->` and `<!-- end -->`. KEYS are those of
claims.toml, as TOML with commas between them: `row`, and if need be `file` (else the first on the page), `column`,
`view`, `metric`, `against_view`; then

    row = "i2pfl"                                           its mean over seeds, in %
    row = "i2pfl", against = "fedavg"                       the mean of paired differences, in points
    row = "i2pfl", against = "fedavg", interval = true      with its interval
    row = "fedmp", after = 5                                the same after that round, in a figure of curves
    row = "i2pfl", paper = true                             the paper's figure, or difference
    row = "i2pfl", against = "fedavg", cost = "bytes"       how many times as much was sent, or of "seconds" used
    row = "4th stage", leaked = "min L2"                    a column of the table of leakage
    row = "fedadapterproto", explained = "iou", of = "all"  a score of explanations, of a model, a pair or all

and `digits` after the point. All paired differences are drawn in differences.svg, those of claims in claims.svg.
`python docs/make_results.py --page FILE` prints an empty page for a file, `--common-runs` first enters runs that tables
have in common, such as FedAvg on the same clients, in all of their files. The tests compare pages and pictures with
what this makes.
"""

import argparse
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

from scipy.stats import kendalltau
from sentence_figures import figure_text, sentence_figure

from protofed.pages.forest_plot import Mark, Origin, Row, RowGroup, forest_plot
from protofed.studies.schema import View
from protofed.studies.statistics import PairedTest
from protofed.studies.tables.common_runs import enter_common_runs
from protofed.studies.tables.differences import differences, measured
from protofed.studies.tables.preset import find_preset, preset_names
from protofed.studies.tables.result_tables import ResultTables, difference_text
from protofed.studies.tables.results import read_results, results_name
from protofed.text import Table, counted, p_equals

FOLDER = Path(__file__).parent / "results"
MARKED = re.compile(r"(<!-- table: ([^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)
FIGURE = re.compile(r"(<!-- figure: (.+?) -->)[^<]*(<!-- end -->)")
_FEWEST_IN_ORDER = 4
_VERDICTS = ("holds", "turns round", "not decided", "not measured")
_CLAIMED: dict[str, Origin] = {"scratch": "scratch", "imagenet": "ImageNet"}


class Results:
    """The files, the claims, and what is made of them."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder = folder
        self.files = _read_all(folder / "data")
        self.again = _read_all(folder / "reruns")

    def rebuilt(self, page: str) -> str:
        """A page with everything between its marks made anew."""
        named = (name for _, name, _ in MARKED.findall(page))
        first = next((file for name in named if (file := name.split()[0]) in self.files), None)
        page = MARKED.sub(lambda found: f"{found[1]}\n{self.part(found[2])}\n\n{found[3]}", page)
        return FIGURE.sub(lambda found: f"{found[1]}{self.figure(found[2], first)}{found[3]}", page)

    def part(self, wanted: str) -> str:
        """What stands between the marks."""
        name, _, what = wanted.strip().partition(" ")
        of_all = {
            "claims": self.claims,
            "verdicts": self.verdicts,
            "orders": self.orders,
            "coverage": self.coverage,
            "reruns": self.reruns,
        }
        if name in of_all:
            return of_all[name]().markdown()
        tables = self._file(name)
        if what == "about":
            return tables.about()
        plain = {"costs": tables.costs, "leakage": tables.leakage, "explanations": tables.explanations}
        if what in plain:
            return plain[what]().markdown()
        kind, _, view = what.partition(" ")
        if kind not in ("accuracy", "auc", "curves") or view not in ("global", "personal"):
            raise SystemExit(
                f"{wanted!r}: a part is about, {', '.join(plain)}, or accuracy, auc or curves with global or personal"
            )
        return (tables.curves(view) if kind == "curves" else tables.table(kind, view)).markdown()

    def _file(self, name: str | None) -> ResultTables:
        if name not in self.files:
            raise SystemExit(f"there is no {self.folder.name}/data/{name}.json; there are {', '.join(self.files)}")
        return self.files[name]

    def figure(self, keys: str, file: str | None) -> str:
        """What stands in a sentence."""
        wanted = tomllib.loads(f"wanted = {{ {keys} }}")["wanted"]
        tables = self._file(wanted.pop("file", file))
        return sentence_figure(tables, **wanted)

    def reruns(self) -> Table:
        """Runs that were made again, beside those behind the pages: the same seeds, columns and settings."""
        rows = []
        for name, tables in self.again.items():
            view = tables.widest_view()
            before, again = (_figures_of_runs(each, view) for each in (self._file(name), tables))
            for row in tables.content["rows"]:
                common = [key for key in again if key in before and key[0] == row]
                if common:
                    largest = max(abs(again[key] - before[key]) for key in common)
                    means = [100 * mean(each[key] for key in common) for each in (before, again)]
                    figures = [f"{figure:.2f}" for figure in (*means, 100 * largest)]
                    rows.append([name, row, str(len(common)), *figures, tables.content["date"]])
        columns = ["file", "row", "runs", "on the page", "again", "largest difference", "day"]
        return Table("Runs that were made again", columns, rows)

    def orders(self) -> Table:
        """Of every table with enough rows of the paper's: who is first, and how far the two orders agree."""
        rows = []
        for name, tables in self.files.items():
            ours, papers = _beside_the_paper(tables)
            if len(papers) >= _FEWEST_IN_ORDER:
                agreement = float(kendalltau(list(ours.values()), list(papers.values())).statistic)
                firsts = [max(each, key=each.__getitem__) for each in (papers, ours)]
                rows.append([name, str(len(papers)), *firsts, f"{agreement:+.2f}"])
        columns = ["file", "rows", "first in the paper", "first here", "rank correlation"]
        return Table("Orders of methods", columns, rows)

    def coverage(self) -> Table:
        """Of every table, by data set: how many of its rows were run, with how many seeds, and where to read on."""
        contents = [tables.content for tables in self.files.values()]
        at_hand = {content["dataset"] for content in contents}
        rows = []
        for name, title in {content["preset"]: content["title"] for content in contents}.items():
            own = [content["dataset"] for content in contents if content["preset"] == name]
            more = find_preset(name).datasets if name in preset_names() else []
            for dataset in dict.fromkeys([*own, *(each for each in more if each in at_hand)]):
                starts = [self._covered(results_name(name, dataset, scale)) for scale in ("lite", "imagenet")]
                rows.append([name, title, dataset, *starts])
        return Table("Pages", ["table", "about", "data", "from scratch", "from ImageNet"], rows, numeric=False)

    def _covered(self, file: str) -> str:
        """What a file has of its table; benchmarks of their own have all."""
        if file not in self.files:
            return "-"
        tables = self.files[file]
        preset, scale = tables.content["preset"], tables.content["scale"]
        seeds: dict[str, int] = {}
        for view in tables.views():
            seeds |= {row: len(by_seed) for row, by_seed in tables.cells("accuracy", view).items()}
        every = len(find_preset(preset).rows_at(scale)) if preset in preset_names() else len(seeds)
        rows = "all rows" if len(seeds) == every else f"{len(seeds)} of {every} rows"
        fewest, most = min(seeds.values()), max(seeds.values())
        each = counted(most, "seed") if fewest == most else f"{fewest} to {most} seeds"
        if file not in self._pages_of_files:
            raise SystemExit(f"no page shows {file}.json; --page {file} prints an empty one")
        return f"[{rows}]({self._pages_of_files[file]}), {each}"

    @cached_property
    def _pages_of_files(self) -> dict[str, str]:
        """Which page has the figures of a file: the first one that shows its table."""
        found: dict[str, str] = {}
        for page in sorted(self.folder.glob("*-*.md")):
            for _, name, _ in MARKED.findall(page.read_text()):
                found.setdefault(name.split()[0], page.name)
        return found

    def page(self, name: str) -> str:
        """A page about one file, without words."""
        tables = self.files[name]
        content = tables.content
        parts = ["about", *(f"accuracy {view}" for view in tables.views())]
        parts += [*(f"auc {view}" for view in tables.views("auc"))]
        parts += [*(f"curves {view}" for view in tables.views() if tables.curves(view).rows)]
        parts += [*(["leakage"] if tables.leakage().rows else [])]
        parts += [*(["explanations"] if tables.explanations().rows else []), "costs"]
        blocks = [f"# {content['preset']}, {content['dataset']}, {content['scale']} scale: {content['title']}"]
        blocks += [f"<!-- table: {name} {part} -->\n<!-- end -->" for part in parts]
        return self.rebuilt("\n\n".join([*blocks, "What it shows:"]) + "\n")

    def claims(self) -> Table:
        """Papers' claims, and what became of them from scratch and from ImageNet."""
        rows = []
        for claim in self._listed_claims():
            starts = [claim.get(start) for start in _CLAIMED]
            published = self._published(next(filter(None, starts)))
            rows.append([claim["paper"], claim["claim"], published, *(self._outcome(found) for found in starts)])
        columns = ["paper", "claim", "there, in points", "from scratch", "from ImageNet"]
        return Table("Claims", columns, rows, numeric=False)

    def verdicts(self) -> Table:
        """How many claims of each paper came out how, from either start."""
        rows = []
        listed = self._listed_claims()
        for paper in dict.fromkeys(claim["paper"] for claim in listed):
            for start, words in _CLAIMED.items():
                came_out = [self._verdict_on(claim.get(start)) for claim in listed if claim["paper"] == paper]
                rows.append([paper, words, *(str(came_out.count(verdict)) for verdict in _VERDICTS)])
        return Table("Verdicts", ["claims of", "from", *_VERDICTS], rows)

    def _listed_claims(self) -> list[dict[str, Any]]:
        file = self.folder / "claims.toml"
        listed: list[dict[str, Any]] = tomllib.loads(file.read_text())["claims"] if file.exists() else []
        return listed

    def _published(self, found: Mapping[str, Any]) -> str:
        """The paper's own difference, where it prints both figures for the same task."""
        cell = {key: found[key] for key in ("view", "column", "against_view") if key in found}
        try:
            return figure_text(self._file(found["file"]), found["row"], found["against"], paper=True, **cell)
        except KeyError:
            return "-"

    def _outcome(self, found: Mapping[str, Any] | None) -> str:
        """The verdict, the effect with its interval, both from the runs, words, and where to read on."""
        if found is None:
            return self._verdict_on(None)
        words = [_effect(self._file(found["file"]), found["row"], found["against"], **_cell(found))]
        words += [found["words"]] if "words" in found else []
        return f"**{self._verdict_on(found)}**: {'; '.join(words)} ([page]({found['page']}))"

    def _verdict_on(self, found: Mapping[str, Any] | None) -> str:
        if found is None:
            return "not measured"
        return _verdict(self._file(found["file"]).difference(found["row"], found["against"], **_cell(found)))

    def differences_of_claims(self) -> Iterator[RowGroup]:
        """Of every claim, by paper: what was published, and what came out from either start."""
        listed = self._listed_claims()
        for paper in dict.fromkeys(claim["paper"] for claim in listed):
            own = [claim for claim in listed if claim["paper"] == paper]
            yield RowGroup(paper, [Row(claim["claim"].replace("`", ""), self._marks(claim)) for claim in own])

    def _marks(self, claim: Mapping[str, Any]) -> list[Mark]:
        found = {start: claim[key] for key, start in _CLAIMED.items() if key in claim}
        published = self._published(next(iter(found.values())))
        marks = [] if published == "-" else [Mark("paper", float(published), None, f"{published} in the paper")]
        for start, each in found.items():
            tables, rows = self._file(each["file"]), (each["row"], each["against"])
            test = tables.difference(*rows, **_cell(each))
            if test is not None:
                marks.append(measured(start, test))
            else:
                points = figure_text(tables, *rows, digits=2, **_cell(each))
                marks.append(Mark(start, float(points), None, f"{points}, one seed"))
        return marks

    def pictures(self) -> dict[str, str]:
        """Differences with their intervals, as SVG: of the claims, and of all rows."""
        return {
            "claims.svg": forest_plot(self.differences_of_claims(), names=650),
            "differences.svg": forest_plot(differences(self.files.values())),
        }

    def write(self) -> None:
        """All pages and the pictures."""
        for page in pages():
            text = page.read_text()
            made = self.rebuilt(text)
            if made != text:
                page.write_text(made)
        for name, picture in self.pictures().items():
            (self.folder / name).write_text(picture)


def pages() -> list[Path]:
    """Where figures are made: all that is about results."""
    return [*sorted(FOLDER.glob("*.md")), FOLDER.parent / "choosing-a-method.md"]


def _read_all(folder: Path) -> dict[str, ResultTables]:
    return {path.stem: ResultTables(read_results(path)) for path in sorted(folder.glob("*.json"))}


def _beside_the_paper(tables: ResultTables) -> tuple[dict[str, float], dict[str, float]]:
    """Our averages over the seeds that all rows have, and the paper's, in the view in which most rows have both."""
    best: tuple[dict[str, float], dict[str, float]] = ({}, {})
    for view in tables.views():
        papers, cells = {}, {}
        for row, by_seed in tables.cells("accuracy", view).items():
            with suppress(KeyError):  # the paper has no such row
                papers[row], cells[row] = tables.published(row, view), by_seed
        common = set.intersection(*map(set, cells.values())) if cells else set()
        if common and len(papers) > len(best[1]):
            best = {row: mean(cells[row][seed]["average"] for seed in common) for row in papers}, papers
    return best


def _figures_of_runs(tables: ResultTables, view: View) -> dict[tuple[str, str, int], float]:
    """What every run came to, by row, column and seed."""
    return {
        (run["row"], run["condition"], run["seed"]): run["accuracy"][view]["value"]
        for run in tables.content["runs"]
        if view in run["accuracy"]
    }


def _effect(tables: ResultTables, row: str, against: str, **cell: Any) -> str:
    """A difference as the matrix of claims has it."""
    test = tables.difference(row, against, **cell)
    if test is None:
        return f"{figure_text(tables, row, against, digits=2, **cell)}, one seed"
    p = "" if test["p"] is None else f", {p_equals(test['p'])}"
    own, other = tables.pair(row, against, **cell)
    above = sum(own[seed] > other[seed] for seed in own.keys() & other.keys())
    return f"{difference_text(test)}, above with {above} of {test['seeds']} seeds{p}"


def _cell(found: Mapping[str, Any]) -> dict[str, Any]:
    """Which of a row's figures a claim is about."""
    return {key: found[key] for key in ("view", "column", "metric", "against_view") if key in found}


def _verdict(test: PairedTest | None) -> str:
    """On a claim that one row is above another: chance is ruled out where the interval has no nought in it."""
    low, high = (test and test["interval"]) or (0.0, 0.0)
    return "holds" if low > 0 else "turns round" if high < 0 else "not decided"


def main() -> None:
    """Write everything, or print a page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--page", metavar="FILE", help="print a page for this file instead")
    parser.add_argument("--common-runs", action="store_true", help="first give every file what others have of its rows")
    chosen = parser.parse_args()
    if chosen.common_runs:
        for name, runs in enter_common_runs(FOLDER / "data").items():
            print(f"{name}: {runs} runs of other files")
    wanted = chosen.page
    results = Results()
    if wanted is None:
        results.write()
    else:
        print(results.page(Path(wanted).name.removesuffix(".json")), end="")


if __name__ == "__main__":
    main()
