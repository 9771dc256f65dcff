"""What the package says about itself, in all the places where it does."""

import re
import tomllib
from pathlib import Path

import pytest

import protofed
from protofed.cli import main

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_one_version_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited is not None
    assert cited[1] == PROJECT["version"]
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"protofed {protofed.__version__}\n"


def test_newest_section_of_the_changelog_is_this_version() -> None:
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == PROJECT["version"]


@pytest.mark.parametrize("words", [["-h"], ["run", "-h"], ["deploy", "site", "-h"]])
def test_h_is_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert "--help" in capsys.readouterr().out
