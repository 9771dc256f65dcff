"""The site of `make docs` has every page; the rest is checked by mkdocs itself, which is strict there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIG = (ROOT / "mkdocs.yml").read_text()
LISTED = set(re.findall(r"^ +- (?:\w+: )?(\S+\.md)$", CONFIG, re.MULTILINE))
MADE = {"docs/gallery.md"}
"""By docs/make_site.py."""


def test_every_page_is_in_the_navigation() -> None:
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        ROOT / "examples/README.md",
        ROOT / "benchmarks/README.md",
    ]
    assert {str(page.relative_to(ROOT)) for page in pages} - LISTED == set()


def test_the_navigation_leads_to_pages() -> None:
    assert {page for page in LISTED - MADE | {"docs/results/README.md"} if not (ROOT / page).is_file()} == set()
