"""Reads run folders and writes one self-contained page; never trains."""

from pathlib import Path

from protofed.report.content import read
from protofed.report.page import render
from protofed.system import write_atomically

__all__ = ["read", "render", "write_report"]


def write_report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of a run, a comparison or a reproduction; to `report.html` in its folder unless `out` is given."""
    path = Path(out) if out is not None else Path(folder) / "report.html"
    content = render(read(folder)).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)
    return path
