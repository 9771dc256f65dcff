"""The command that would do it again."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from protofed.report.reading import Findings
from protofed.runs.options import Options

_OUT = "again"


def command(findings: Findings) -> str | None:
    """As a shell takes it; None where it was made from Python in a way the command line cannot repeat."""
    words = {"run": _run, "comparison": _comparison, "reproduction": _reproduction}[findings.kind](findings)
    return None if words is None else shlex.join(["protofed", *words, "--out", _OUT])


def _run(findings: Findings) -> list[str]:
    options = findings.readings[0].options
    return ["run", options["method"], *flags(options, without=("method",))]


def _comparison(findings: Findings) -> list[str] | None:
    content = findings.content
    if not _by_name(findings):
        return None
    settings = {**content["options"], "set": content["settings"]}
    seeds = ",".join(map(str, content["seeds"]))
    words = ["compare", *content["methods"], *flags(settings, without=("method", "seed")), "--seeds", seeds]
    return [*words, "--baseline", content["baseline"]]


def _by_name(findings: Findings) -> bool:
    """Whether every label is that of a method, not of a variant made in Python."""
    return all(
        run.options["method"] == name for group in findings.groups for name, runs in group.runs.items() for run in runs
    )


def _reproduction(findings: Findings) -> list[str] | None:
    content = findings.content
    if not content:
        return None
    words = ["reproduce", content["preset"], "--scale", content["scale"], *flags(content["options"])]
    words += ["--datasets", ",".join(content["datasets"])]
    if content["seeds"]:
        words += ["--seeds", ",".join(map(str, content["seeds"]))]
    for name in ("methods", "columns"):
        if content[name]:
            words += [f"--{name}", ",".join(content[name])]
    return words


def flags(options: Mapping[str, Any], without: Sequence[str] = ()) -> list[str]:
    """Options of a run as words of the command line, those at their defaults left out."""
    words: list[str] = []
    for name, field in Options.model_fields.items():
        value: Any = options.get(name)
        if name in without or name not in options or value == field.get_default(call_default_factory=True):
            continue
        flag = f"--{name.replace('_', '-')}"
        if name == "set":
            words += [word for key, item in value.items() for word in (flag, f"{key}={item}")]
        elif isinstance(value, bool):
            words.append(flag)
        elif isinstance(value, list | tuple):
            words += [word for item in value for word in (flag, str(item))]
        elif value is not None:
            words += [flag, str(value)]
    return words


def resume(findings: Findings) -> str | None:
    """How an interrupted run goes on."""
    if findings.kind == "run" and not findings.complete:
        return shlex.join(["protofed", "run", "--resume", "--out", str(Path(findings.folder))])
    return None
