"""The pictures of the papers' figures, drawn from the runs that `reproduce` made."""

from pathlib import Path

from protofed.explain.embeddings import embed
from protofed.explain.explaining import explain
from protofed.runs.opened import Run
from protofed.studies.schema import TrainedBlock, is_trained
from protofed.studies.tables.preset import FigureDrawing
from protofed.studies.tables.reproduction import Reproduction


def redraw(result: Reproduction, out: Path) -> list[Path]:
    """Draw what the preset asks for, for every data set whose runs are all there; the files to look at."""
    drawing = result.preset.draw
    if drawing is None:
        return []
    made = []
    for dataset, block in result.content["datasets"].items():
        if not is_trained(block):
            continue
        runs = _first_runs(block, out)
        if len(runs) < len(block["methods"]):
            continue  # another shard is still at it
        shown = drawing.domains.get(result.content["scale"])
        if drawing.kind == "embeddings":
            folder = out / dataset / "embeddings"
            embed(runs, out=folder, domains=shown, label=drawing.label, hausdorff=drawing.hausdorff)
            made.append(folder / "embeddings.png")
        else:
            made += [_explained(run, drawing, shown) for run in _all_runs(block, out)]
    return made


def _first_runs(block: TrainedBlock, out: Path) -> list[Path]:
    """The run of the first seed under the first condition, row by row."""
    runs: list[list[str]] = [next(iter(entry["runs"].values()), []) for entry in block["methods"].values()]
    return [out / paths[0] for paths in runs if paths]


def _all_runs(block: TrainedBlock, out: Path) -> list[Path]:
    """Every seed has scores of its own."""
    return [out / path for entry in block["methods"].values() for paths in entry["runs"].values() for path in paths]


def _explained(run: Path, drawing: FigureDrawing, shown: list[str] | None) -> Path:
    """In the run's own folder: with projected patches, and whether boxes matter."""
    domain = shown[0] if shown else next(iter(Run(run).config["data"]["domains"]))
    made = explain(run, domain=domain, label=drawing.label, count=drawing.count, project=True, faithful=True)
    return made.path / "index.html"
