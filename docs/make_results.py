"""Writes the figures on the pages of docs/results from the files in docs/results/data: `python docs/make_results.py`.

`protofed reproduce TABLE ... --results docs/results/data` makes the files. On a page, what stands between
`<!-- table: FILE PART -->` and `<!-- end -->` is made from FILE.json; PART is one of

    about                     command, day, machine, seeds
    accuracy global           figures by column, spread, paired differences; also `accuracy personal`, `auc global`, ...
    costs                     rounds, bytes and processor time of a run
    leakage                   what an attack rebuilds, in a table about that
    explanations              whether boxes matter and models agree, in a figure that draws explanations

`<!-- table: claims -->` is the matrix of claims.toml, whose words are written by hand and whose effects come from the
files. All paired differences are drawn in differences.svg. `python docs/make_results.py --page FILE` prints an empty
page for a file. The tests compare pages and picture with what this makes.
"""

import argparse
import re
import tomllib
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from protofed.studies.statistics import PairedTest
from protofed.studies.tables.result_tables import ResultTables, difference_text
from protofed.studies.tables.results import read_results
from protofed.text import Table

FOLDER = Path(__file__).parent / "results"
MARKED = re.compile(r"(<!-- table: ([^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)
_STARTS = {"lite": "scratch", "paper": "scratch", "imagenet": "ImageNet"}

_ROW, _HEADER, _LEFT, _WIDTH, _MARGIN = 16, 26, 330, 460, 20
_MOST = 20.0
"""Points to either side of no difference; what lies beyond is drawn at the edge."""
_COLOURS = {"scratch": "#8a6d3b", "ImageNet": "#1f6feb"}


class Results:
    """The files, the claims, and what is made of them."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder = folder
        self.files = {path.stem: ResultTables(read_results(path)) for path in sorted((folder / "data").glob("*.json"))}

    def rebuilt(self, page: str) -> str:
        """A page with everything between its marks made anew."""
        return MARKED.sub(lambda found: f"{found[1]}\n{self.part(found[2])}\n\n{found[3]}", page)

    def part(self, wanted: str) -> str:
        """What stands between the marks."""
        name, _, what = wanted.strip().partition(" ")
        if name == "claims":
            return self.claims().markdown()
        if name not in self.files:
            raise SystemExit(f"there is no {self.folder.name}/data/{name}.json; there are {', '.join(self.files)}")
        tables = self.files[name]
        if what == "about":
            return tables.about()
        plain = {"costs": tables.costs, "leakage": tables.leakage, "explanations": tables.explanations}
        if what in plain:
            return plain[what]().markdown()
        metric, _, view = what.partition(" ")
        if metric not in ("accuracy", "auc") or view not in ("global", "personal"):
            raise SystemExit(
                f"{wanted!r}: a part is about, {', '.join(plain)}, or accuracy or auc with global or personal"
            )
        return tables.table(metric, view).markdown()

    def page(self, name: str) -> str:
        """A page about one file, without words."""
        tables = self.files[name]
        content = tables.content
        parts = ["about", *(f"accuracy {view}" for view in tables.views())]
        parts += [*(f"auc {view}" for view in tables.views("auc"))]
        parts += [*(["leakage"] if tables.leakage().rows else [])]
        parts += [*(["explanations"] if tables.explanations().rows else []), "costs"]
        blocks = [f"# {content['preset']}, {content['dataset']}, {content['scale']} scale: {content['title']}"]
        blocks += [f"<!-- table: {name} {part} -->\n<!-- end -->" for part in parts]
        return self.rebuilt("\n\n".join([*blocks, "What it shows:"]) + "\n")

    def claims(self) -> Table:
        """Papers' claims, and what became of them from scratch and from ImageNet."""
        file = self.folder / "claims.toml"
        listed = tomllib.loads(file.read_text())["claims"] if file.exists() else []
        rows = [
            [claim["paper"], claim["claim"], self._outcome(claim.get("scratch")), self._outcome(claim.get("imagenet"))]
            for claim in listed
        ]
        return Table("Claims", ["paper", "claim", "from scratch", "from ImageNet"], rows, numeric=False)

    def _outcome(self, found: Mapping[str, Any] | None) -> str:
        """The verdict in words, the effect with its interval from the runs, and where to read on."""
        if found is None:
            return "not measured"
        words = [f"**{found['verdict']}**"]
        if "file" in found:
            chosen = {key: found[key] for key in ("view", "column", "metric") if key in found}
            test = self.files[found["file"]].difference(found["row"], found["against"], **chosen)
            words.append(_effect(test))
        words += [found["words"]] if "words" in found else []
        link = f" ([page]({found['page']}))" if "page" in found else ""
        return ": ".join([words[0], "; ".join(words[1:])] if words[1:] else words) + link

    def differences(self) -> Iterator[tuple[str, str, list[tuple[str, PairedTest]]]]:
        """Of every file its heading, its start, and its rows against the baseline in the first view it has."""
        for tables in self.files.values():
            content = tables.content
            view = tables.views()[0]
            tests = tables.differences("accuracy", view)
            known = [(row, test) for row, test in tests.items() if test is not None]
            if known:
                start = _STARTS[content["scale"]]
                heading = f"{content['preset']}, {content['dataset']}, {start}, against {content['baseline']}"
                yield heading, start, known

    def picture(self) -> str:
        """All paired differences with their intervals, as SVG."""
        lines: list[str] = []
        y = _MARGIN
        for heading, start, tests in self.differences():
            y += _HEADER
            lines.append(f'<text x="{_MARGIN}" y="{y - 8}" class="heading">{escape(heading)}</text>')
            for row, test in tests:
                lines += _drawn(row, test, y, _COLOURS[start])
                y += _ROW
        height = y + 2 * _MARGIN
        axis = [
            f'<line x1="{_x(tick):.1f}" x2="{_x(tick):.1f}" y1="{_MARGIN}" y2="{y}" class="grid"/>'
            f'<text x="{_x(tick):.1f}" y="{y + 16}" text-anchor="middle">{tick:+.0f}</text>'
            for tick in (-_MOST, -_MOST / 2, 0.0, _MOST / 2, _MOST)
        ]
        style = (
            "text{font:12px sans-serif;fill:#444}.heading{font-weight:bold}.grid{stroke:#bbb;stroke-width:.5}"
            "@media(prefers-color-scheme:dark){text{fill:#ccc}.grid{stroke:#555}}"
        )
        title = "<title>Paired differences in points of accuracy, with 95 % intervals over seeds</title>"
        size = f'width="{_LEFT + _WIDTH + _MARGIN}" height="{height}"'
        body = "\n".join([f"<style>{style}</style>", title, *axis, *lines])
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n{body}\n</svg>\n'

    def write(self) -> None:
        """All pages and the picture."""
        for page in sorted(self.folder.glob("*.md")):
            text = page.read_text()
            made = self.rebuilt(text)
            if made != text:
                page.write_text(made)
        (self.folder / "differences.svg").write_text(self.picture())


def _effect(test: PairedTest | None) -> str:
    if test is None:
        return "one seed"
    p = "" if test["p"] is None else f", p = {test['p']:.3f}"
    return f"{difference_text(test)}, {test['seeds']} seeds{p}"


def _x(points: float) -> float:
    """Where so many points lie in the picture."""
    inside = max(-_MOST, min(_MOST, points))
    return _LEFT + _WIDTH * (inside + _MOST) / (2 * _MOST)


def _drawn(row: str, test: PairedTest, y: int, colour: str) -> list[str]:
    """One row: its name, its interval, its mean; hollow where the mean lies beyond the edge."""
    middle = y + _ROW / 2
    points = 100 * test["difference"]
    fill = colour if abs(points) <= _MOST else "none"
    lines = [
        f'<text x="{_LEFT - 10}" y="{middle + 4:.1f}" text-anchor="end">{escape(row)}</text>',
        f'<circle cx="{_x(points):.1f}" cy="{middle:.1f}" r="3.5" fill="{fill}" stroke="{colour}">'
        f"<title>{escape(f'{row}: {difference_text(test)}')}</title></circle>",
    ]
    if test["interval"] is not None:
        low, high = (_x(100 * bound) for bound in test["interval"])
        lines.append(
            f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle:.1f}" y2="{middle:.1f}" '
            f'stroke="{colour}" stroke-width="1.5"/>'
        )
    return lines


def main() -> None:
    """Write everything, or print a page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--page", metavar="FILE", help="print a page for this file instead")
    wanted = parser.parse_args().page
    results = Results()
    if wanted is None:
        results.write()
    else:
        print(results.page(Path(wanted).name.removesuffix(".json")), end="")


if __name__ == "__main__":
    main()
