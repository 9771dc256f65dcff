"""The house as docs/architecture.md draws it: imports go one way, a class has one name, a function does one thing."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "protofed"
LONGEST_FUNCTION = 60


def layers() -> list[list[str]]:
    """The rooms of the drawing, lowest first; those of one line stand side by side."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    block = re.search(r"```text\n(errors\n.*?)```", page, re.DOTALL)
    assert block is not None, "docs/architecture.md has no list of layers"
    return [line.split() for line in block[1].splitlines()]


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_rooms(path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and room of every import of ours, also of those inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            names = [
                f"{node.module}.{alias.name}" if node.module == "protofed" else str(node.module) for alias in node.names
            ]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith("protofed."):
                yield node.lineno, name.split(".")[1]


def test_every_room_is_drawn_once():
    drawn = [room for line in layers() for room in line]
    there = {room_of(path) for path, _ in modules()} - {"__init__", "__main__"}
    assert sorted(drawn) == sorted(there)


def test_imports_go_one_way():
    height = {room: number for number, line in enumerate(layers()) for room in line}
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {room_of(path)} imports {room}"
        for path, tree in modules()
        if room_of(path) in height
        for line, room in imported_rooms(path, tree)
        if room != room_of(path) and height[room] >= height[room_of(path)]
    ]
    assert wrong == []


def test_a_method_imports_only_what_a_users_own_would():
    allowed = {"closed_form", "errors", "method", "methods", "models", "records", "registry", "verbs"}
    for path, tree in modules():
        if room_of(path) == "methods":
            assert {room for _, room in imported_rooms(path, tree)} <= allowed, path


def test_a_class_name_occurs_once():
    places = defaultdict(list)
    for path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


@pytest.mark.parametrize("folder", ["src/protofed", "benchmarks"])
def test_no_function_is_long(folder: str):
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
        if node.end_lineno - node.lineno + 1 > LONGEST_FUNCTION
    ]
    assert long == []
