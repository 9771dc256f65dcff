"""The command that would do it again."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from protofed.report.content import ReportContent
from protofed.runs.extend import resume_command
from protofed.runs.options import Options

_OUT = "again"


def command(content: ReportContent) -> str | None:
    """As a shell takes it; None where it was made from Python in a way the command line cannot repeat."""
    words = {"run": _run, "comparison": _comparison, "reproduction": _reproduction}[content.kind](content)
    return None if words is None else shlex.join(["protofed", *words, "--out", _OUT])


def _run(content: ReportContent) -> list[str]:
    options = content.all_runs[0].options
    return ["run", options["method"], *flags(options, without=("method",))]


def _comparison(content: ReportContent) -> list[str] | None:
    if not _by_name(content):
        return None
    comparison = content.comparison
    settings = {**comparison["options"], "set": comparison["settings"]}
    seeds = ",".join(map(str, comparison["seeds"]))
    words = ["compare", *comparison["methods"], *flags(settings, without=("method", "seed")), "--seeds", seeds]
    return [*words, "--baseline", comparison["baseline"]]


def _by_name(content: ReportContent) -> bool:
    """Whether every label is that of a method, not of a variant made in Python."""
    return all(
        run.options["method"] == name for group in content.groups for name, runs in group.runs.items() for run in runs
    )


def _reproduction(content: ReportContent) -> list[str] | None:
    comparison = content.comparison
    if not comparison:
        return None
    words = ["reproduce", comparison["preset"], "--scale", comparison["scale"], *flags(comparison["options"])]
    words += ["--datasets", ",".join(comparison["datasets"])]
    if comparison["seeds"]:
        words += ["--seeds", ",".join(map(str, comparison["seeds"]))]
    for name in ("methods", "columns"):
        if comparison[name]:
            words += [f"--{name}", ",".join(comparison[name])]
    return words


def flags(options: Mapping[str, Any], without: Sequence[str] = ()) -> list[str]:
    """Options of a run as words of the command line, those at their defaults left out."""
    words: list[str] = []
    for name, field in Options.model_fields.items():
        if name in options and name not in without:
            value = options[name]
            if value != field.get_default(call_default_factory=True):
                words += _flag(name, value)
    return words


def _flag(name: str, value: Any) -> list[str]:
    """One option, as often as its value asks for."""
    flag = f"--{name.replace('_', '-')}"
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag]
    if name == "set":
        value = [f"{key}={item}" for key, item in value.items()]
    values = value if isinstance(value, list | tuple) else [value]
    return [word for item in values for word in (flag, str(item))]


def resume(content: ReportContent) -> str | None:
    """How an interrupted run goes on."""
    if content.kind == "run" and not content.complete:
        return resume_command(content.folder)
    return None
