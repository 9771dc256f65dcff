"""One page of all results files in a folder: an overview, all differences, every table, and what is missing."""

from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from protofed.pages.elements import details, plain_table, scroll
from protofed.pages.forest_plot import forest_plot
from protofed.pages.frame import framed
from protofed.pages.markup import Html, join, tag
from protofed.studies.schema import View
from protofed.studies.tables.differences import differences
from protofed.studies.tables.result_tables import ResultTables, difference_text
from protofed.studies.tables.results import read_results
from protofed.system import write_atomically
from protofed.text import Table, counted, percent


def write_page(results: Path, path: Path, left_out: Sequence[str], failures: Sequence[str]) -> None:
    """The page of a folder of results; the lines are about what has no result and why."""
    files = {file.stem: ResultTables(read_results(file)) for file in sorted(results.glob("*.json"))}
    runs = sum(len(tables.content["runs"]) for tables in files.values())
    missing = [("Without a result", failures), ("Not available", left_out)]
    body = [
        *([_overview(files), _all_differences(files)] if files else []),
        *(_section(name, tables) for name, tables in files.items()),
        *(_listed(heading, lines) for heading, lines in missing if lines),
    ]
    facts = [counted(len(files), "table"), counted(runs, "run")]
    write_atomically(path, framed("reproduction", "Tables of the papers", facts, body).encode())


def _overview(files: dict[str, ResultTables]) -> Html:
    """Who is first in each table, and by how much."""
    rows = []
    for name, tables in files.items():
        content, view = tables.content, tables.widest_view()
        baseline, averages = content["baseline"], _averages(tables, view)
        if averages:
            best = max(averages, key=averages.__getitem__)
            link = tag("a", f"{content['preset']}, {content['dataset']}", href=f"#{name}")
            against = "–" if best == baseline else difference_text(tables.differences("accuracy", view).get(best))
            seeds = len({run["seed"] for run in content["runs"]})
            compared = [f"{row} {percent(averages.get(row))}" for row in (baseline, best)]
            rows.append([link, content["scale"], seeds, *compared, against])
    columns = ["table", "scale", "seeds", "baseline", "first", "first vs baseline [95 %]"]
    caption = "Accuracy in % of the baseline, and of the first row among those that have all of its seeds"
    return tag("section", tag("h2", "Overview"), plain_table(caption, columns, rows))


def _averages(tables: ResultTables, view: View) -> dict[str, float]:
    """Of every row that has all seeds of the baseline, over those."""
    cells = tables.cells("accuracy", view)
    seeds = cells.get(tables.content["baseline"], {})
    return {
        row: mean(by_seed[seed]["average"] for seed in seeds or by_seed)
        for row, by_seed in cells.items()
        if by_seed.keys() >= seeds.keys()
    }


def _all_differences(files: dict[str, ResultTables]) -> Html:
    groups = list(differences(files.values()))
    if not groups:
        return Html("")
    source = f"data:image/svg+xml;base64,{b64encode(forest_plot(groups).encode()).decode()}"
    label = "Paired differences in points of accuracy, with 95 % intervals over seeds"
    picture = scroll(tag("img", src=source, alt=f"{label}; the tables below have them as figures"), label)
    return tag("section", tag("h2", "All differences"), tag("figure", picture, tag("figcaption", label)))


def _section(name: str, tables: ResultTables) -> Html:
    """One file: figures first, costs on demand."""
    content = tables.content
    title = f"{content['preset']}, {content['dataset']}, {content['scale']}"
    shown = [tables.table("accuracy", view) for view in tables.views()]
    shown += [tables.table("auc", view) for view in tables.views("auc")]
    shown += [tables.curves(view) for view in tables.views()]
    shown += [tables.leakage(), tables.explanations()]
    return tag(
        "section",
        tag("h2", title),
        tag("p", f"{content['title']}."),
        tag("pre", tag("code", content["command"]), tabindex="0"),
        *map(_plain, _different(shown)),
        details("Costs", _plain(tables.costs())),
        id=name,
    )


def _different(tables: Sequence[Table]) -> list[Table]:
    """Without empty ones, and those that say what the one before says: of one model for all, both views."""
    filled = [table for table in tables if table.rows]
    return [table for index, table in enumerate(filled) if index == 0 or table.rows != filled[index - 1].rows]


def _plain(table: Table) -> Html:
    return plain_table(table.title, table.columns, table.rows)


def _listed(heading: str, lines: Sequence[str]) -> Html:
    return tag("section", tag("h2", heading), tag("ul", join(tag("li", line) for line in lines)))
