"""What the papers published, table by table: methods, settings and figures, read from the TOML files in `presets`.

A file `presets/PAPER/TABLE.toml` is one preset. It names its suite, `presets/suites/NAME.toml`, which says how a paper
trains on each data set at every scale, and lists the rows of the table with the paper's figures.
"""

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from protofed.errors import UserError, unknown_name
from protofed.studies.schema import Scale, View

SCALES: tuple[Scale, ...] = get_args(Scale)


class _TomlModel(BaseModel):
    """Base of all that TOML files declare; an unknown key is a mistake."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class _DatasetAtScale(_TomlModel):
    """A data set of a suite at one scale: its name, its shape as a model sees it, and how much it holds."""

    data: str | None = None
    options: dict[str, Any] = {}
    shape: tuple[int, int, int]
    """Channels, height, width."""
    images: dict[str, tuple[int, int]]
    """Training and test images of each domain, in the order of the paper's columns."""

    @property
    def test_images(self) -> int:
        """Of all domains."""
        return sum(test for _, test in self.images.values())


class _SuiteDataset(_TomlModel):
    """A data set of a suite at every scale."""

    title: str
    """What the paper calls it."""
    classes: int
    preset: str | None = None
    """The named hyper-parameters for this data set, for methods that have them."""
    options: dict[str, Any] = {}
    lite: _DatasetAtScale
    paper: _DatasetAtScale
    imagenet: _DatasetAtScale | None = None
    """None where such a start makes no sense, or nobody has the images."""

    def at(self, scale: Scale) -> _DatasetAtScale | None:
        """What it is at a scale."""
        return {"lite": self.lite, "paper": self.paper, "imagenet": self.imagenet}[scale]


class PublishedRow(_TomlModel):
    """One row of a table: a method, or a variant of one."""

    method: str
    name: str = ""
    set: dict[str, Any] = {}
    options: dict[str, Any] = {}
    scale: dict[Scale, dict[str, Any]] = {}
    """Options of this row at one scale."""
    scales: list[Scale] = list(SCALES)
    """Where the table has this row."""
    view: View | None = None
    """In which view the paper scores this row, where the table's first is not it."""
    figures: dict[str, list[float]] = {}
    """The paper's, per data set, in the order of the columns; accuracies in percent."""
    spread: dict[str, float] = {}
    """The paper's standard deviation, per data set."""

    @property
    def title(self) -> str:
        """How the row is called; the method's name where it is not a variant."""
        return self.name or self.method

    def options_at(self, scale: Scale) -> dict[str, Any]:
        """Of its runs at a scale, beside those that all rows have in common."""
        return merge_options({"set": self.set}, self.options, self.scale.get(scale, {}))


class _TrainingSuite(_TomlModel):
    """How a paper trains, on which data."""

    options: dict[str, Any] = {}
    scale: dict[Scale, dict[str, Any]] = {}
    """Options that differ between scales."""
    data: dict[str, _SuiteDataset]
    rows: list[PublishedRow] = []
    """What stands below the paper's rows in every table of accuracies."""


class _ConditionAxis(_TomlModel):
    """One run for each of several values: each left-out domain, each degree of label skew."""

    values: list[str] | Literal["domains"] | dict[Scale, list[str] | Literal["domains"]]
    options: dict[str, str]
    """With {} where the value goes."""
    label: str = "{}"

    def values_at(self, scale: Scale, domains: list[str]) -> list[str]:
        """The values at a scale."""
        values = self.values[scale] if isinstance(self.values, dict) else self.values
        return domains if values == "domains" else list(values)


class FigureDrawing(_TomlModel):
    """What is drawn of the runs of a figure, once they are done."""

    kind: Literal["embeddings", "explanations"]
    domains: dict[Scale, list[str]] = {}
    """Whose test images are shown; all domains, or for explanations the first, unless named."""
    label: str | None = None
    """Only images of this class, by name or number: sites name grades differently."""
    count: int = 8
    """Images explained."""
    hausdorff: bool = False


class _DatasetOverrides(_TomlModel):
    """What a table changes about one data set of its suite."""

    options: dict[str, Any] = {}


class Preset(_TomlModel):
    """One table or figure."""

    paper: str
    table: str
    title: str
    kind: Literal["accuracy", "curves", "leakage", "parameters", "traffic", "partition"] = "accuracy"
    suite_name: str = Field(alias="suite")
    suite: _TrainingSuite = Field(alias="loaded_suite")
    datasets: list[str]
    rows: list[PublishedRow] = []
    views: list[View] = ["global"]
    value: Literal["average", "pooled", "held_out"] = "average"
    """What stands for a run: the mean over domains or clients, all test images together, or the domain left out."""
    per_domain: bool = True
    over: _ConditionAxis | None = None
    cases: dict[str, dict[str, Any]] = {}
    """In place of `over`: runs that differ in more than one value, by column."""
    columns: list[str] = []
    """Of a table that holds other figures than accuracies."""
    baseline: str = "fedavg"
    seeds: dict[Scale, list[int]] = {"lite": [0], "paper": [0, 1, 2], "imagenet": [0, 1, 2]}
    options: dict[str, Any] = {}
    scale: dict[Scale, dict[str, Any]] = {}
    data: dict[str, _DatasetOverrides] = {}
    notes: list[str] = []
    draw: FigureDrawing | None = None

    @property
    def name(self) -> str:
        """PAPER.TABLE."""
        return f"{self.paper}.{self.table}"

    @property
    def trains(self) -> bool:
        """Whether there are runs to be made; other tables are computed at once."""
        return self.kind in ("accuracy", "curves", "leakage")

    def scale_of(self, scale: Scale) -> Scale:
        """Bytes are always those of the paper's own model: they cost no training."""
        return "paper" if self.kind in ("parameters", "traffic") else scale

    def images(self, dataset: str, scale: Scale) -> _DatasetAtScale:
        """What a data set is at a scale."""
        declared = self.suite.data[dataset].at(scale)
        if declared is None:
            raise UserError(f"{dataset} of {self.name} has no {scale} scale")
        return declared

    def datasets_at(self, scale: Scale) -> list[str]:
        """The data sets that the table has at a scale; none where the scale makes no sense for it."""
        return [name for name in self.datasets if self.suite.data[name].at(scale) is not None]

    def rows_at(self, scale: Scale) -> list[PublishedRow]:
        """The paper's rows, and in a table of accuracies those that its suite adds at this scale."""
        compared = self.kind == "accuracy" and not self.table.startswith("figure")
        added = [row for row in self.suite.rows if row.title not in {own.title for own in self.rows}]
        return [row for row in [*self.rows, *(added if compared else [])] if scale in row.scales]

    def domains(self, dataset: str, scale: Scale) -> list[str]:
        """The domains, in the order of the paper's columns."""
        return list(self.images(dataset, scale).images)

    @property
    def has_conditions(self) -> bool:
        """Whether a row takes a run for each of its columns."""
        return self.over is not None or bool(self.cases)

    def conditions(self, dataset: str, scale: Scale) -> dict[str, dict[str, Any]]:
        """Column and options of every run that a row takes; a single one without a name where a run is a row."""
        if self.over is None:
            return self.cases or {"": {}}
        return {
            self.over.label.format(value): {key: text.format(value) for key, text in self.over.options.items()}
            for value in self.over.values_at(scale, self.domains(dataset, scale))
        }

    def selected_conditions(self, dataset: str, scale: Scale, names: Sequence[str] | None) -> dict[str, dict[str, Any]]:
        """All conditions, or those of the columns asked for."""
        known = self.conditions(dataset, scale)
        for name in names or ():
            if name not in known or not self.has_conditions:
                raise unknown_name(f"column of {self.name} with runs of its own", name, filter(None, known))
        return {name: options for name, options in known.items() if not names or name in names}

    def accuracy_columns(self, dataset: str, scale: Scale) -> list[str]:
        """Of a table of accuracies, besides the average."""
        if self.has_conditions:
            return list(self.conditions(dataset, scale))
        return self.domains(dataset, scale) if self.per_domain else []

    def published(
        self, row: PublishedRow, dataset: str, scale: Scale, view: View, selected: Sequence[str] | None = None
    ) -> dict[str, Any] | None:
        """The paper's figures of a row as fractions, by the view they belong to and column; `selected` are some."""
        if self.kind == "leakage":
            return {"leakage": dict(zip(self.columns, row.figures.get(dataset, ()), strict=False))}
        figures = [round(figure / 100, 6) for figure in row.figures.get(dataset, ())]
        if not figures:
            return None
        columns = self.accuracy_columns(dataset, scale)
        names = ["average"] if len(figures) == 1 else [*columns, "average"][: len(figures)]
        named = dict(zip(names, figures, strict=True))
        if selected and set(selected) < set(columns):  # the paper's average is over all columns
            named = {name: named[name] for name in selected if name in named}
        paper: dict[str, Any] = {view: named}
        if dataset in row.spread:
            paper["std"] = round(row.spread[dataset] / 100, 6)
        return paper

    def run_options(self, dataset: str, scale: Scale, *more: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a run on a data set, later sources override earlier ones: suite, data set, table, `more`."""
        known, images = self.suite.data[dataset], self.images(dataset, scale)
        of_suite = (self.suite.options, self.suite.scale.get(scale, {}))
        of_data = (
            {"data": images.data or dataset, "domains": ",".join(images.images)},
            known.options,
            images.options,
        )
        of_table = (self.options, self.scale.get(scale, {}), self.data.get(dataset, _DatasetOverrides()).options)
        return merge_options(*of_suite, *of_data, *of_table, *more)

    def selected_datasets(self, names: Sequence[str] | None, scale: Scale = "lite") -> list[str]:
        """All data sets that there are at a scale, or those asked for."""
        for name in names or ():
            if name not in self.datasets:
                raise unknown_name(f"data set of {self.name}", name, self.datasets)
            self.images(name, scale)
        there = [name for name in self.datasets_at(scale) if not names or name in names]
        if not there:
            raise UserError(f"{self.name} has no {scale} scale")
        return there

    def selected_rows(self, names: Sequence[str] | None, scale: Scale = "lite") -> list[PublishedRow]:
        """All rows, or those asked for: a row by its title, all variants by the name of their method."""
        rows = self.rows_at(scale)
        titles = {row.title for row in rows}
        known = titles | {row.method for row in rows}
        for name in names or ():
            if name not in known:
                raise unknown_name(f"method of {self.name}", name, known)
        by_method = set(names or ()) - titles
        return [row for row in rows if not names or row.title in names or row.method in by_method]


def merge_options(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """Options from several sources, of which later ones override earlier ones.

    `set` is merged key by key; an empty text removes an option; another model removes the settings of the one before.
    """
    result: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for source in sources:
        if source.get("model", result.get("model")) != result.get("model"):
            settings = {key: value for key, value in settings.items() if not key.startswith("model.")}
        result |= {key: value for key, value in source.items() if key != "set"}
        settings |= source.get("set", {})
    return {key: value for key, value in result.items() if value != ""} | {"set": settings}


def preset_names() -> list[str]:
    """PAPER.TABLE of every preset."""
    return sorted(_preset_files(), key=_natural_order)


@cache
def find_preset(name: str) -> Preset:
    """A preset by name, completed by its suite and by the preset it is like."""
    known = _preset_files()
    if name not in known:
        raise unknown_name("table", name, known)
    paper, _, table = name.partition(".")
    content = _read(known[name])
    if like := content.pop("like", None):
        content = {**_read(known[f"{paper}.{like}"]), **content}
    suite = _read(files("protofed.studies.tables") / "presets" / "suites" / f"{content['suite']}.toml")
    return Preset.model_validate({"paper": paper, "table": table, "loaded_suite": suite, **content})


def _preset_files() -> dict[str, Traversable]:
    folders = (folder for folder in (files("protofed.studies.tables") / "presets").iterdir() if folder.is_dir())
    return {
        f"{folder.name}.{file.name.removesuffix('.toml')}": file
        for folder in folders
        if folder.name != "suites"
        for file in folder.iterdir()
        if file.name.endswith(".toml")
    }


def _read(file: Traversable) -> dict[str, Any]:
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _natural_order(name: str) -> tuple[str, str, int]:
    """Figure 10 after figure 9."""
    paper, _, table = name.partition(".")
    digits = "".join(filter(str.isdigit, table))
    return paper, table.removesuffix(digits), int(digits or 0)
