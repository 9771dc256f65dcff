"""Reads run folders and writes one self-contained page; never trains."""

from pathlib import Path

from protofed.report.content import read
from protofed.report.page import render
from protofed.system import write_atomically

__all__ = ["read", "render", "write_report"]


def write_report(folder: str | Path, out: str | Path | None = None, *, with_training_images: bool = False) -> Path:
    """Write the page of a run, a comparison or a reproduction; to `report.html` in its folder unless `out` is given.

    Pictures that show training images, such as those of an audit, are on it only `with_training_images`.
    """
    path = Path(out) if out is not None else Path(folder) / "report.html"
    content = render(read(folder), with_training_images=with_training_images).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)
    return path
