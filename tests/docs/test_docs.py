"""The documentation is true: its commands and examples run, its links lead somewhere, its lists are complete.

Every document is followed from top to bottom in an empty folder: Python blocks are executed, lines of sh blocks that
begin with `protofed` go to the command line, other lines (make, activate) are skipped. The documents speak to people,
so the test makes what they say small:

- `digits` is an excerpt of itself and rounds, epochs, samples and seeds are few (see small_world.py);
- a Python block whose first line is `# NAME.py` is saved under that name, as the text asks;
- `my-data` (folders by class) and `my-manifest.csv` exist; whatever else a document uses, it must have made.
"""

import re
import shlex
import sys
from pathlib import Path

import pytest
from small_world import small

from protofed.cli import main
from protofed.method import Method
from protofed.registry import find_method, load_plugin, method_names
from protofed.testing import check_method

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LINKING = sorted(
    [
        *DOCUMENTS,
        *(page for place in ("docs/results", "benchmarks", "examples") for page in (ROOT / place).rglob("*.md")),
    ]
)
METHODS = (ROOT / "docs" / "methods.md").read_text()
OURS = [name for name in method_names() if find_method(name).__module__.startswith("protofed.methods.")]


def blocks(text: str) -> list[tuple[str, str]]:
    """Language and content of every fenced block."""
    return re.findall(r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[list[str]]:
    """The protofed commands of a sh block; a backslash continues a line."""
    lines = block.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("protofed ")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_and_examples_run(document: Path, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for language, content in blocks(document.read_text()):
        if language in ("sh", "bash"):
            for words in commands(small(content)):
                code = main(words)
                said = capfd.readouterr()
                assert code == 0, f"{document.name}: protofed {shlex.join(words)}\n{said.err}"
        elif language == "python":
            name = re.match(r"# (\w+\.py)\n", content)
            if name:
                (place / name[1]).write_text(content)
            else:
                exec(compile(small(content), f"{document.name} example", "exec"), {"__name__": "example"})


def test_the_worked_method_passes_the_checks(place: Path) -> None:
    text = (ROOT / "docs" / "writing-a-method.md").read_text()
    example = next(content for language, content in blocks(text) if content.startswith("# fedrare.py\n"))
    (place / "fedrare.py").write_text(example)
    method = load_plugin(str(place / "fedrare.py")).FedRare
    assert issubclass(method, Method)
    check_method(method, model="resnet10", **{"model.width": 4})


def test_the_api_reference_is_that_of_the_code() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    import make_api

    assert make_api.PAGE.read_text() == make_api.page(), "python docs/make_api.py writes it anew"


def test_the_guide_places_every_method() -> None:
    text = (ROOT / "docs" / "choosing-a-method.md").read_text()
    first = text[text.index("## 1.") : text.index("## 2.")]
    named = re.findall(r"`(\w+)`", "".join(line for line in first.splitlines() if line.startswith("| ")))
    assert sorted([*named, "centralized", "single"]) == OURS


@pytest.mark.parametrize("document", LINKING, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    for target in [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r'<\w+ [^>]*(?:src|href)="([^"]+)"', text)]:
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        linked = document.parent / path if path else document
        assert linked.exists(), f"{document.name} links to {target}"
        if anchor:
            assert anchor in anchors(linked), f"{document.name} links to {target}"


def anchors(document: Path) -> set[str]:
    """The headings as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_method_is_listed_once() -> None:
    table = METHODS[METHODS.index("## At a glance") : METHODS.index("## Where to expect little")]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == OURS
    assert sorted(re.findall(r"^#### `(\w+)`$", METHODS, re.MULTILINE)) == OURS


def test_the_readme_lists_every_method() -> None:
    text = (ROOT / "README.md").read_text()
    groups = text[text.index("## Methods") : text.index("## Read on")]
    rows = [line for line in groups.splitlines() if line.startswith("| ")]
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row)) == OURS


@pytest.mark.parametrize("name", OURS)
def test_the_page_agrees_with_the_method(name: str) -> None:
    """What `protofed methods NAME` says: what travels, how the paper is read, presets."""
    method = find_method(name)
    row = next(line for line in METHODS.splitlines() if line.startswith(f"| `{name}` |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2:5] == [method().kind, method.sends_up, method.sends_down]
    section = METHODS.split(f"#### `{name}`\n")[1].split("\n###")[0].split("\n####")[0]
    listed = re.findall(r"^- (?!`--preset)(.+)$", section, re.MULTILINE)
    assert listed == list(method.readings)
    presets = dict(re.findall(r"^- `--preset (\w+)`: (.+)$", section, re.MULTILINE))
    assert presets == {preset: ", ".join(map(_setting, values.items())) for preset, values in method.presets.items()}
    assert method.paper in section


def _setting(item: tuple[str, object]) -> str:
    key, value = item
    return f"`{key}={ {True: 'on', False: 'off'}[value] if isinstance(value, bool) else value }`"
