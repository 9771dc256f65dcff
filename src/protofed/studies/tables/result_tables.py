"""Tables of a results file: figures over seeds, the paper's beside them, paired differences, costs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any, Literal

from protofed.studies.schema import View
from protofed.studies.statistics import PairedTest, paired_tests, spread
from protofed.studies.tables.explained import AGREEMENT, ALL, FAITHFULNESS, ExplanationScores
from protofed.studies.tables.reproduction import curve_table
from protofed.studies.tables.results import ResultsContent
from protofed.text import Table, counted, p_value, percent, setting, size

Metric = Literal["accuracy", "auc"]

_HEADINGS: dict[Metric, str] = {"accuracy": "Accuracy in %", "auc": "AUC in %"}

Cells = dict[str, float]
"""One row for one seed: its columns, and `average`."""


class ResultTables:
    """What one results file says."""

    def __init__(self, content: ResultsContent) -> None:
        self.content = content

    def about(self) -> str:
        """Command, day, machine and seeds, as Markdown."""
        content = self.content
        versions = ", ".join(f"{name} {content['versions'][name]}" for name in ("protofed", "torch"))
        seeds = ", ".join(str(seed) for seed in sorted({run["seed"] for run in content["runs"]}))
        known = content.get("images")
        images = "" if known is None else f"; {known['source']} at {'x'.join(map(str, known['shape'][1:]))} pixels"
        days = sorted({run["date"] for run in content["runs"]})
        when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        where = f"{when}; {self._machines_text()}; {versions}{images}; seeds {seeds}."
        taken: dict[str, dict[str, None]] = {}
        for run in content["runs"]:
            if "made_for" in run:
                taken.setdefault(run["made_for"], {})[run["row"]] = None
        common = "".join(f" Runs of {', '.join(rows)} were made for {file}." for file, rows in taken.items())
        return f"    {content['command']}\n\n{where}{common}"

    def _machines(self) -> list[str]:
        """Where runs were made; first the machine that made most of them."""
        return [machine for machine, _ in Counter(run["machine"] for run in self.content["runs"]).most_common()]

    def _machines_text(self) -> str:
        """If there are several, with what the others made."""
        most, *others = self._machines()
        texts = [f"{most}, CPU times are from there" if others else most]
        for machine in others:
            runs = [run for run in self.content["runs"] if run["machine"] == machine]
            rows = dict.fromkeys(run["row"] for run in runs)
            texts.append(f"{counted(len(runs), 'run')} on {machine} ({', '.join(rows)})")
        return "; ".join(texts)

    def views(self, metric: Metric = "accuracy") -> list[View]:
        """The views that some row has."""
        found = {view for run in self.content["runs"] for view in run[metric]}
        return [view for view in ("global", "personal") if view in found]

    def widest_view(self) -> View:
        """The view in which most rows have figures."""
        return max(self.views(), key=lambda view: len(self.cells("accuracy", view)))

    def table(self, metric: Metric, view: View) -> Table:
        """Columns, average, spread over seeds, and the difference to the baseline over the same seeds."""
        cells = self.cells(metric, view)
        columns = self._columns(cells)
        tests = self.differences(metric, view)
        baseline = self.content["baseline"]
        rows = []
        for title, by_seed in cells.items():
            seeds = list(by_seed.values())
            papers = self._paper(title, view) if metric == "accuracy" else {}
            means = {column: mean(each[column] for each in seeds) for column in [*columns, "average"]}
            figures = [_beside(means[column], papers.get(column)) for column in means]
            deviation = percent(spread([each["average"] for each in seeds])["std"])
            rows.append([title, *figures, deviation, str(len(seeds)), *_test_cells(tests.get(title))])
        named = "average" if self.content["conditions"] else self.content["value"].replace("_", " ")
        against = [f"vs {baseline} [95 %]", "p", "p (Holm)"]
        return Table(f"{_HEADINGS[metric]}, {view} view", ["method", *columns, named, "std", "seeds", *against], rows)

    def costs(self) -> Table:
        """Bytes and processor time of a run, and what a row has of its own.

        Time is that of runs on the machine that made most of them, since it cannot be compared with that of others.
        """
        rows = []
        machine = next(iter(self._machines()), None)
        for title, about in self.content["rows"].items():
            runs = [run for run in self.content["runs"] if run["row"] == title]
            if runs:
                sent = [size(mean(run["bytes"][way] for run in runs)) for way in ("up", "down")]
                there = [run["cpu_seconds"] for run in runs if run["machine"] == machine]
                known = [used for used in there if used is not None]
                seconds = f"{mean(known):.0f} s" if known else "-"
                rounds = f"{mean(run['rounds'] for run in runs):g}"
                settled = [next(iter(run["converged"].values())) for run in runs if run["converged"]]
                converged = f"{mean(settled):.1f}" if len(settled) == len(runs) else "-"
                rows.append([title, rounds, converged, *sent, seconds, _own(about["settings"])])
        columns = ["method", "rounds", "settled after", "sent up", "sent down", "CPU time", "own settings"]
        return Table("Costs of a run", columns, rows)

    def curves(self, view: View) -> Table:
        """Accuracy over the rounds, mean over runs."""
        curves = {}
        for title in self.content["rows"]:
            runs = [dict(run["curve"].get(view, ())) for run in self.content["runs"] if run["row"] == title]
            common = set.intersection(*map(set, runs)) if runs else set()
            if common:
                curves[title] = {number: mean(run[number] for run in runs) for number in common}
        return curve_table(f"Accuracy in % after round, {view} view", curves)

    def leakage(self) -> Table:
        """What an attacker rebuilds, mean over runs, beside the paper's figures."""
        rows, columns = [], list(next((run["leakage"] for run in self.content["runs"] if run["leakage"]), {}))
        for title, about in self.content["rows"].items():
            runs = [run["leakage"] for run in self.content["runs"] if run["row"] == title and run["leakage"]]
            paper = (about["paper"] or {}).get("leakage", {})
            if runs:
                rows.append([title, *(_leaked([run[column] for run in runs], paper.get(column)) for column in columns)])
        return Table("Images reconstructed from what was sent", ["features", *columns], rows)

    def explanations(self) -> Table:
        """Whether boxes matter to each model and whether models agree, mean over runs, each beside random boxes."""
        rows: list[list[str]] = []
        for title in self.content["rows"]:
            scores = [run["explanations"] for run in self.content["runs"] if run["row"] == title]
            rows += _explained(title, [each for each in scores if each])
        boxes = ["right", "whole image", "box blurred", "random box blurred"]
        boxes += ["all blurred", "box pasted in", "random box pasted in"]
        agreed = ["same class", "IoU of boxes", "IoU of random boxes", "rank correlation"]
        return Table(
            "Explanations: probability of the prediction, agreement", ["method", "model", *boxes, *agreed], rows
        )

    def cells(self, metric: Metric, view: View) -> dict[str, dict[int, Cells]]:
        """Every row that has the view, for the seeds that are complete under every condition."""
        found: dict[str, dict[int, Cells]] = {}
        for title in self.content["rows"]:
            own: dict[int, dict[str, Any]] = {}
            for run in self.content["runs"]:
                if run["row"] == title and view in run[metric]:
                    own.setdefault(run["seed"], {})[run["condition"]] = run[metric][view]
            seeds = {seed: self._cells_of(records) for seed, records in sorted(own.items())}
            if complete := {seed: cells for seed, cells in seeds.items() if cells is not None}:
                found[title] = complete
        return found

    def differences(self, metric: Metric, view: View) -> dict[str, PairedTest | None]:
        """Every row against the baseline, with p-values corrected for their number."""
        cells = self.cells(metric, view)
        averages = {title: {seed: each["average"] for seed, each in row.items()} for title, row in cells.items()}
        return paired_tests(averages, self.content["baseline"])

    def figures(
        self,
        row: str,
        view: View = "global",
        column: str = "average",
        metric: Metric = "accuracy",
        after: int | None = None,
    ) -> dict[int, float]:
        """One cell of a table, by seed; with `after` what the curve has after that round."""
        if after is not None:
            return self._curve_by_seed(row, view, after)
        return {seed: each[column] for seed, each in self.cells(metric, view).get(row, {}).items()}

    def pair(
        self,
        row: str,
        against: str,
        view: View = "global",
        column: str = "average",
        metric: Metric = "accuracy",
        against_view: View | None = None,
        after: int | None = None,
    ) -> tuple[dict[int, float], dict[int, float]]:
        """The same cell of two rows, by seed.

        `against_view` is for rows that have no view in common but were tested on the same images.
        """
        return (
            self.figures(row, view, column, metric, after),
            self.figures(against, against_view or view, column, metric, after),
        )

    def difference(self, row: str, against: str, **cell: Any) -> PairedTest | None:
        """One row against another over the seeds that both have, in a cell as in `pair`; None with fewer than two."""
        own, other = self.pair(row, against, **cell)
        return paired_tests({row: own, against: other}, against)[row]

    def published(self, row: str, view: View = "global", column: str = "average") -> float:
        """What the paper has in that cell; KeyError where it has nothing."""
        return self._paper(row, view)[column]

    def _curve_by_seed(self, row: str, view: View, after: int) -> dict[int, float]:
        """Mean over conditions, where there are some."""
        figures: dict[int, list[float]] = {}
        for run in self.content["runs"]:
            if run["row"] == row:
                figures.setdefault(run["seed"], []).append(dict(run["curve"][view])[after])
        return {seed: mean(several) for seed, several in figures.items()}

    def _cells_of(self, records: Mapping[str, Any]) -> Cells | None:
        conditions = self.content["conditions"]
        if not conditions:
            record = records[""]
            parts = {part: record["parts"][part] for part in self.content["domains"] if part in record["parts"]}
            return {**parts, "average": record["value"]}
        if any(condition not in records for condition in conditions):
            return None
        values = {condition: records[condition]["value"] for condition in conditions}
        return {**values, "average": mean(values.values())}

    def _columns(self, cells: Mapping[str, Mapping[int, Cells]]) -> list[str]:
        """Those that all rows and seeds have."""
        every = [set(each) for row in cells.values() for each in row.values()]
        common = set.intersection(*every) if every else set()
        return [name for name in (self.content["conditions"] or self.content["domains"]) if name in common]

    def _paper(self, title: str, view: View) -> dict[str, float]:
        return (self.content["rows"][title]["paper"] or {}).get(view) or {}


def difference_text(test: PairedTest | None) -> str:
    """In points, with its interval."""
    if test is None:
        return "-"
    bounds = test["interval"]
    interval = "" if bounds is None else f" [{points(bounds[0])}, {points(bounds[1])}]"
    return f"{points(test['difference'])}{interval}"


def points(difference: float) -> str:
    """A difference of accuracies in points, with its sign; what rounds to nothing has none."""
    return f"{round(100 * difference, 2) + 0.0:+.2f}"


def _test_cells(test: PairedTest | None) -> list[str]:
    p_values = (None, None) if test is None else (test["p"], test["p_holm"])
    return [difference_text(test), *map(p_value, p_values)]


def _beside(ours: float, paper: float | None) -> str:
    return percent(ours) if paper is None else f"{percent(ours)} ({percent(paper)})"


def _leaked(ours: Sequence[float | None], paper: float | None) -> str:
    known = [figure for figure in ours if figure is not None]
    text = f"{mean(known):.4g}" if len(known) == len(ours) else "-"
    return text if paper is None else f"{text} ({paper:g})"


def _explained(title: str, runs: Sequence[ExplanationScores]) -> list[list[str]]:
    """A line for each model, one for each pair, and one for all."""
    names = dict.fromkeys([name for run in runs for name in (*run["models"], *run["agreement"])])
    lines = []
    for name in [*(name for name in names if name != ALL), *([ALL] if runs else [])]:
        alone = [model for run in runs for who, model in run["models"].items() if name in (who, ALL)]
        agreed = [run["agreement"][name] for run in runs if name in run["agreement"]]
        boxes = [_mean_text([scores[key] for scores in alone]) for key in FAITHFULNESS]
        lines.append([title, name, *boxes, *(_mean_text([scores[key] for scores in agreed]) for key in AGREEMENT)])
    return lines


def _mean_text(figures: Sequence[float | None]) -> str:
    known = [figure for figure in figures if figure is not None]
    return f"{mean(known):.2f}" if known else "-"


def _own(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={setting(value)}" for key, value in settings.items()) or "-"
