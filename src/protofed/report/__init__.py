"""Reads run folders and writes one self-contained page; never trains."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from protofed.report.content import read
from protofed.report.page import render
from protofed.report.sweep_page import sweep_page
from protofed.studies.sweep_result import SWEEP_FILE, Sweep
from protofed.system import write_atomically

__all__ = ["read", "render", "write_report"]


def write_report(
    folder: str | Path,
    out: str | Path | None = None,
    *,
    with_training_images: bool = False,
    notes: Sequence[str] = (),
) -> Path:
    """Write the page of a run, a comparison, a reproduction or a sweep; to `report.html` in its folder unless `out` is
    given.

    Pictures that show training images, such as those of an audit, are on it only `with_training_images`. `notes` are
    paragraphs for its readers.
    """
    path = Path(out) if out is not None else Path(folder) / "report.html"
    if (Path(folder) / SWEEP_FILE).exists():
        content = sweep_page(Sweep.read(folder), list(notes)).encode()
    else:
        found = replace(read(folder), remarks=list(notes))
        content = render(found, with_training_images=with_training_images).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)
    return path
