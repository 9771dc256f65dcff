"""Figures in the sentences of pages about results, from a results file; docs/make_results.py says which there are."""

from statistics import mean
from typing import Any

from protofed.studies.tables.result_tables import ResultTables


def sentence_figure(tables: ResultTables, **wanted: Any) -> str:
    """What stands in a sentence: an accuracy or a difference, unless a key asks for another kind."""
    kinds = {"cost": _cost_ratio, "leaked": _leakage_text, "explained": _explanation_text}
    return next((kinds[key] for key in wanted if key in kinds), figure_text)(tables, **wanted)


def figure_text(
    tables: ResultTables,
    row: str,
    against: str | None = None,
    paper: bool = False,
    interval: bool = False,
    digits: int = 1,
    **cell: Any,
) -> str:
    """A figure in %, or a difference in points; the paper's has no seeds and counts as one."""
    cell.setdefault("view", "global" if tables.figures(row) else "personal")

    other_view = {"view": cell.pop("against_view", cell["view"])}

    def by_seed(title: str, **cell: Any) -> dict[int, float]:
        return {0: tables.published(title, **cell)} if paper else tables.figures(title, **cell)

    own = by_seed(row, **cell)
    if against is None:
        return f"{100 * mean(own.values()):.{digits}f}"
    other = by_seed(against, **cell | other_view)
    words = [_points(mean(own[seed] - other[seed] for seed in own.keys() & other.keys()), digits)]
    test = tables.difference(row, against, **cell, against_view=other_view["view"]) if interval else None
    if test is not None and test["interval"] is not None:
        low, high = (_points(bound, digits) for bound in test["interval"])
        words.append(f"[{low}, {high}]")
    return " ".join(words)


def _cost_ratio(tables: ResultTables, row: str, against: str, cost: str) -> str:
    """How many times what the other takes, of bytes up and down or seconds of processor time."""

    def of_a_run(title: str) -> float:
        runs = [run for run in tables.content["runs"] if run["row"] == title]
        if cost == "bytes":
            return mean(sum(run["bytes"].values()) for run in runs)
        return mean(run["cpu_seconds"] for run in runs if run["cpu_seconds"] is not None)

    return _times(of_a_run(row) / of_a_run(against))


def _leakage_text(tables: ResultTables, row: str, leaked: str) -> str:
    return f"{mean(run['leakage'][leaked] for run in tables.content['runs'] if run['row'] == row):.3f}"


def _explanation_text(tables: ResultTables, row: str, explained: str, of: str) -> str:
    scores = [run["explanations"] for run in tables.content["runs"] if run["row"] == row]
    return f"{mean((each['models'] | each['agreement'])[of][explained] for each in scores):.2f}"


def _times(ratio: float) -> str:
    """As a fraction where it is less than one half."""
    return f"{ratio:.2g}" if ratio >= 0.5 else f"1/{1 / ratio:.0f}"


def _points(difference: float, digits: int) -> str:
    """With its sign; what rounds to nothing has none."""
    text = f"{100 * difference:+.{digits}f}"
    return text if float(text) else text[1:]
