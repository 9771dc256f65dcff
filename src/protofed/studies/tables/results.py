"""What runs of a table came to, as a small JSON file from which pages are made without the runs.

A file is one table on one data set at one scale, and has a record for every run. Written again it keeps what it has and
replaces runs that were made again.
"""

import datetime
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NotRequired, TypedDict

from protofed.errors import UserError
from protofed.metrics import find_metric
from protofed.runs.extend import MAY_CHANGE, MOVES
from protofed.runs.opened import Run
from protofed.studies.comparison import by_domain, domains_of_clients, scored_parts
from protofed.studies.convergence import Convergence
from protofed.studies.schema import VIEWS, ReproducedMethod, Scale, View, is_trained
from protofed.studies.tables.explained import ExplanationScores, explanation_scores
from protofed.studies.tables.leakage import leakage
from protofed.studies.tables.preset import Preset, PublishedRow
from protofed.studies.tables.reproduction import Reproduction
from protofed.studies.tables.trained import curve_of_run, figure_of_run
from protofed.system import describe_machine, write_atomically

_DIGITS = 6
_BINARY = 2
_METRIC = find_metric("auc")


class ViewRecord(TypedDict):
    """A run in one view: the figure that stands for it, and its domains where there are some."""

    value: float
    parts: dict[str, float]


class RunRecord(TypedDict):
    """One run. AUC is there for two classes, of the models after the last round; leakage in tables about that,
    explanations in figures that draw them, and the curve, accuracy after every round that was scored, in figures of it.

    `converged` is the round after which accuracy settled, by view, where enough rounds were scored. Day and machine are
    those of the call that entered the run: later ones that add to the file may come from elsewhere.
    """

    row: str
    condition: str
    seed: int
    accuracy: dict[View, ViewRecord]
    auc: dict[View, ViewRecord]
    leakage: dict[str, float | None]
    explanations: ExplanationScores
    curve: dict[View, list[tuple[int, float]]]
    converged: dict[View, int]
    bytes: dict[str, int]
    cpu_seconds: float | None
    rounds: int
    date: str
    machine: str
    made_for: NotRequired[str]
    """The file that the run is from, where tables have it in common."""


class RowRecord(TypedDict):
    """A row of the table: its method, its settings and the paper's figures by view."""

    method: str
    settings: dict[str, Any]
    paper: dict[str, Any] | None


class ImagesRecord(TypedDict):
    """Which images were read, as what."""

    source: str
    shape: list[int]
    """As networks got them: channels, height, width."""
    fingerprint: str | None
    """Of the files, where they are files."""


class ResultsContent(TypedDict):
    """What the file holds."""

    preset: str
    title: str
    dataset: str
    scale: Scale
    command: str
    options: dict[str, Any]
    """What the user gave."""
    common: dict[str, Any]
    """Options that all rows have in common, the user's among them."""
    date: str
    """Of the last call, as all before the images."""
    machine: str
    versions: dict[str, str]
    images: NotRequired[ImagesRecord]
    """Files of earlier versions have none."""
    baseline: str
    value: str
    conditions: list[str]
    domains: list[str]
    rows: dict[str, RowRecord]
    runs: list[RunRecord]


def results_name(preset: str, dataset: str, scale: str) -> str:
    """The name of a file, without its suffix."""
    return f"{preset}-{dataset}-{scale}"


def write_results(result: Reproduction, out: Path, folder: Path) -> list[Path]:
    """One file for each data set whose runs, in the folder `out`, have results; what there is in `folder` is kept."""
    written = []
    for dataset, block in result.content["datasets"].items():
        if not is_trained(block):
            continue
        content = _collected(result, dataset, block["methods"], out)
        path = folder / f"{results_name(content['preset'], dataset, content['scale'])}.json"
        if not content["runs"]:
            continue
        if path.exists():
            content = _merged(read_results(path), content, path, result.preset)
        written.append(save_results(content, folder))
    return written


def save_results(content: ResultsContent, folder: Path) -> Path:
    """Write the file of a table, in place of one that is there."""
    path = folder / f"{results_name(content['preset'], content['dataset'], content['scale'])}.json"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, _encoded(content))
    return path


def read_results(path: Path) -> ResultsContent:
    """The content of a file."""
    try:
        content: ResultsContent = json.loads(path.read_text())
    except ValueError:
        raise UserError(f"{path} is damaged: it is not JSON") from None
    for run in content["runs"]:  # files of earlier versions have none of these
        run.setdefault("explanations", {})
        run.setdefault("curve", {})
        run.setdefault("date", content["date"])
        run.setdefault("machine", content["machine"])
    return content


def _collected(
    result: Reproduction, dataset: str, methods: Mapping[str, ReproducedMethod], out: Path
) -> ResultsContent:
    preset, scale = result.preset, result.content["scale"]
    opened = {
        (title, condition): [Run(out / path) for path in paths]
        for title, entry in methods.items()
        for condition, paths in entry["runs"].items()
    }
    runs = [_record(title, condition, run, preset) for (title, condition), several in opened.items() for run in several]
    first = next((run for several in opened.values() for run in several), None)
    conditions = preset.selected_conditions(dataset, scale, result.content["columns"])
    options = as_texts(result.content["options"])
    content: ResultsContent = {
        "preset": preset.name,
        "title": preset.title,
        "dataset": dataset,
        "scale": scale,
        "command": _command(preset.name, dataset, scale, result.content["seeds"], options),
        "options": options,
        "common": as_texts(preset.run_options(dataset, scale, result.content["options"])),
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(),
        "versions": first.config["versions"] if first else {},
        "baseline": preset.baseline,
        "value": preset.value,
        "conditions": [name for name in conditions if name],
        "domains": [] if preset.has_conditions or not preset.per_domain else preset.domains(dataset, scale),
        "rows": {
            title: {
                "method": entry["method"],
                "settings": own_settings(next(row for row in preset.rows_at(scale) if row.title == title), scale),
                "paper": entry["paper"],
            }
            for title, entry in methods.items()
        },
        "runs": runs,
    }
    if first is not None:
        content["images"] = _images(first)
    return content


def _images(run: Run) -> ImagesRecord:
    data = run.config["data"]
    return {
        "source": data["source"].partition(";")[0],  # what follows is where somebody found them
        "shape": data["image_shape"],
        "fingerprint": (data.get("place") or {}).get("fingerprint"),
    }


def as_texts(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that decide what comes out, as the command line has them."""
    plain = {key: str(value) for key, value in options.items() if key not in {*MAY_CHANGE, *MOVES, "set"}}
    return {**plain, "set": {key: str(value) for key, value in options["set"].items()}}


def own_settings(row: PublishedRow, scale: Scale) -> dict[str, Any]:
    """What a row has of its own."""
    options = row.options_at(scale)
    return {**{key: value for key, value in options.items() if key != "set"}, **options["set"]}


def _command(preset: str, dataset: str, scale: str, seeds: Sequence[int], options: Mapping[str, Any]) -> str:
    words = ["protofed", "reproduce", preset, "--scale", scale, "--data-root", "DATA", "--datasets", dataset]
    words += ["--seeds", ",".join(map(str, seeds))]
    for key, value in options.items():
        if key == "set":
            words += [word for name, item in value.items() for word in ("--set", f"{name}={item}")]
        else:
            words += [f"--{key.replace('_', '-')}", *([] if value == "True" else [value])]
    return shlex.join([*words, "--out", "OUT"])


def _record(row: str, condition: str, run: Run, preset: Preset) -> RunRecord:
    summary, value, records = run.summary, preset.value, run.rounds
    processor = summary["seconds"].get("cpu")  # runs of earlier versions have none
    views = {view: accuracy for view in VIEWS if (accuracy := summary["accuracy"][view]) is not None}
    return {
        "row": row,
        "condition": condition,
        "seed": run.seed,
        "accuracy": {
            view: {
                "value": _rounded(figure_of_run(run, accuracy, value)),
                "parts": _parts(run, view, scored_parts(accuracy)),
            }
            for view, accuracy in views.items()
        },
        "auc": _auc(run, value),
        "leakage": (leakage([run]) or {}).get("figures", {}) if preset.kind == "leakage" else {},
        "explanations": explanation_scores(run) if preset.draw and preset.draw.kind == "explanations" else {},
        "curve": {view: _curve(run, view, value) for view in views} if preset.kind == "curves" else {},
        "converged": {
            view: settled
            for view in views
            if (settled := Convergence.of(records, view).convergence_round()) is not None
        },
        "bytes": {way: summary["bytes"][way]["total"] for way in ("up", "down")},
        "cpu_seconds": None if processor is None else round(processor, 1),
        "rounds": summary["rounds"],
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(),
    }


def _curve(run: Run, view: View, value: str) -> list[tuple[int, float]]:
    return [(number, _rounded(figure)) for number, figure in curve_of_run(run, view, value)]


def _parts(run: Run, view: View, scores: Mapping[str, float]) -> dict[str, float]:
    """By domain; clients without a domain are too many to be listed."""
    parts = by_domain(scores, domains_of_clients(run)) if view == "personal" else scores
    return {part: _rounded(figure) for part, figure in parts.items()}


def _auc(run: Run, value: str) -> dict[View, ViewRecord]:
    """As accuracy is told: of the domain left out where the table is about that, else the mean over all."""
    kept = run.predictions() if len(run.config["data"]["classes"]) == _BINARY else None
    found: dict[View, ViewRecord] = {}
    for view in VIEWS:
        sets = {} if kept is None else kept.views.get(view, {})
        scores = {part: figure for part, each in sets.items() if (figure := _METRIC.of(each)) is not None}
        left_out = [part for part in run.config["partition"]["held_out"] if part in scores]
        counted = left_out if value == "held_out" and left_out else [part for part in scores if part not in left_out]
        if counted:
            found[view] = {
                "value": _rounded(mean(scores[part] for part in counted)),
                "parts": _parts(run, view, scores),
            }
    return found


def _rounded(figure: float) -> float:
    return round(float(figure), _DIGITS)


def _merged(before: ResultsContent, now: ResultsContent, path: Path, preset: Preset) -> ResultsContent:
    """What there was, with the runs that were made now in place of older ones, in the order of the table."""
    both = [title for title in now["rows"] if title in before["rows"]]
    changed = [title for title in both if now["rows"][title]["settings"] != before["rows"][title]["settings"]]
    same_images = before.get("images", now.get("images")) == now.get("images")
    if before["common"] != now["common"] or changed or not same_images:
        what = f"another {changed[0]}" if changed else "other options" if same_images else "other images"
        raise UserError(f"{path} has runs with {what}; remove it, or give another folder")
    runs = _newest([*before["runs"], *now["runs"]])
    rows = {**before["rows"], **now["rows"]}
    for title in both:  # a call for some columns has not all of the paper's figures
        rows[title] = max(before["rows"][title], now["rows"][title], key=lambda row: len(json.dumps(row["paper"])))
    seeds = sorted({run["seed"] for run in runs})
    conditions = preset.conditions(now["dataset"], now["scale"])
    return {
        **now,
        "command": _command(now["preset"], now["dataset"], now["scale"], seeds, now["options"]),
        "conditions": [name for name in conditions if name in {*before["conditions"], *now["conditions"]}],
        "rows": {row.title: rows[row.title] for row in preset.rows_at(now["scale"]) if row.title in rows},
        "runs": runs,
    }


def _newest(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """The last of each; what was only entered again, its processor time among the rest, keeps its day and machine."""
    found: dict[tuple[str, str, int], RunRecord] = {}
    for run in runs:
        key = run["row"], run["condition"], run["seed"]
        if key not in found or found[key] != {**run, "date": found[key]["date"], "machine": found[key]["machine"]}:
            found[key] = run
    return list(found.values())


def _encoded(content: ResultsContent) -> bytes:
    """One line for each run, so that a difference between two versions can be read."""
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items() if key != "runs"]
    runs = ",\n".join(f"    {json.dumps(run)}" for run in content["runs"])
    return ("{\n" + ",\n".join([*lines, f'  "runs": [\n{runs}\n  ]']) + "\n}\n").encode()
