"""Lays out what `make docs` builds the site from: `python docs/make_site.py`.

Pages keep their places, so that every link between them is the same on the site and in the repository. The gallery is
made here: a small comparison on the embedded digits, with the pages that protofed writes about it.
"""

import argparse
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
GALLERY = ROOT / "build" / "gallery"
PAGES = (
    "*.md",
    "LICENSE",
    "CITATION.cff",
    "docs/*.md",
    "docs/site.*",
    "docs/pictures/*",
    "docs/screenshots/*",
    "docs/results/*",
    "benchmarks/README.md",
    "benchmarks/results/*",
    "examples/*",
    "deploy/**/*",
)
GALLERY_PAGE = """# Pages that protofed writes

Made when this site was built, by a small comparison on the embedded digits. Each is one file that needs nothing else.

| page | made by |
| --- | --- |
| [A comparison](gallery/comparison.html) | `protofed report COMPARISON` |
| [A run](gallery/run.html) | `protofed report RUN` |
| [Explanations](gallery/explanations.html) | `protofed explain RUN --domain mnist` |

The runs behind them are small (400 images per client, 10 rounds): look at the pages, not at the figures.
[Results](results/README.md) has figures.
"""


def lay_out(site: Path) -> None:
    """Copy the pages of the repository."""
    shutil.rmtree(site, ignore_errors=True)
    for pattern in PAGES:
        for path in ROOT.glob(pattern):
            if path.is_file() and "__pycache__" not in path.parts:
                target = site / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)


def make_gallery(site: Path) -> None:
    """Run what the gallery shows, unless it is there already, and put its pages into the site."""
    import protofed
    from protofed.explain import explain
    from protofed.report import write_report

    options = {"samples_per_client": 400, "rounds": 10, "epochs": 2, "lr": 0.03}
    compared = protofed.compare(["fedavg", "i2pfl"], data="digits", out=GALLERY / "compared", **options)
    run = compared.path / compared.content["methods"]["i2pfl"]["runs"][0]
    write_report(compared.path, GALLERY / "comparison.html")
    write_report(run, GALLERY / "run.html")
    explain(run, domain="mnist", count=2, out=GALLERY / "explained")
    folder = site / "docs" / "gallery"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("comparison.html", "run.html"):
        shutil.copy(GALLERY / name, folder / name)
    shutil.copy(GALLERY / "explained" / "index.html", folder / "explanations.html")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--without-gallery", action="store_true", help="leave out the pages that need a run")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site-source", help="where to lay it out")
    given = parser.parse_args()
    lay_out(given.out)
    if given.without_gallery:
        (given.out / "docs" / "gallery.md").write_text("# Pages that protofed writes\n\nLeft out of this build.\n")
    else:
        make_gallery(given.out)
        (given.out / "docs" / "gallery.md").write_text(GALLERY_PAGE)
