"""The site of `make docs` has every page, is built without a warning, and every link in it leads somewhere."""

import fnmatch
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
CONFIG = (ROOT / "mkdocs.yml").read_text()
LISTED = set(re.findall(r"^ +- (?:[\w ]+: )?(\S+\.md)$", CONFIG, re.MULTILINE))
LEFT_OUT = re.findall(r"^  /(\S+)$", CONFIG, re.MULTILINE)
"""Of the navigation, because other pages lead there."""
MADE = {"docs/gallery.md"}
"""By docs/make_site.py."""


class Page(HTMLParser):
    """What a page leads to, and what can be led to in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors = {"", "__nocodeblock"}
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is not None and name in ("href", "src"):
                self.links.append(value)
            elif value is not None and name in ("id", "name"):
                self.anchors.add(value)


def test_every_page_is_in_the_navigation() -> None:
    pages = {
        str(page.relative_to(ROOT))
        for place in ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md", "deploy/**/*.md")
        for page in ROOT.glob(place)
    }
    assert "docs/runbook.md" in pages
    assert {page for page in pages - LISTED if not any(fnmatch.fnmatch(page, each) for each in LEFT_OUT)} == set()


def test_the_navigation_leads_to_pages() -> None:
    assert {page for page in LISTED - MADE | {"docs/results/README.md"} if not (ROOT / page).is_file()} == set()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as by `make docs`, but for the gallery, whose pages need runs."""
    place = tmp_path_factory.mktemp("site")
    config = CONFIG.replace("docs_dir: build/site-source", f"docs_dir: {place / 'source'}")
    assert config != CONFIG
    (place / "mkdocs.yml").write_text(config)
    for words in (
        [ROOT / "docs" / "make_site.py", "--without-gallery", "--out", place / "source"],
        ["-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", place / "mkdocs.yml"],
    ):
        done = subprocess.run(
            [sys.executable, *map(str, words)],
            env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},  # as in the Makefile
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr
        said = [line for line in done.stderr.splitlines() if re.match("WARNING|ERROR", line)]
        assert said == []
    return place / "site"


def test_every_link_of_the_site_leads_somewhere(site: Path) -> None:
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    made = {path.relative_to(site).as_posix() for path in pages}
    assert {page.replace("README.md", "index.md").replace(".md", ".html") for page in LISTED} <= made
    lost = []
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:", link):
                continue
            target, _, anchor = link.partition("#")
            leads_to = (path.parent / unquote(target)).resolve() if target else path
            if not leads_to.is_file() or (leads_to in pages and unquote(anchor) not in pages[leads_to].anchors):
                lost.append((path.relative_to(site).as_posix(), link))
    assert lost == []
