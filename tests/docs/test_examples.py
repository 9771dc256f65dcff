"""The examples run: scripts as they are, notebooks cell by cell, with small numbers on few digits."""

import ast
import json
import re
from pathlib import Path

import pytest
from small_world import small

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def run_cell(source: str, namespace: dict[str, object], name: str) -> None:
    """Execute a cell; what its last line shows is shown as a notebook would."""
    tree = ast.parse(small(source))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), namespace)
    if isinstance(last, ast.Expr):
        shown = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
        for form in ("_repr_html_", "_repr_svg_", "_repr_png_"):
            if hasattr(shown, form):
                assert getattr(shown, form)()
        assert shown is None or repr(shown)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_run(script: Path, place: Path) -> None:
    exec(compile(small(script.read_text()), script.name, "exec"), {"__name__": "__main__"})
    assert list((place / "runs").glob("*/summary.json")) or list((place / "runs").glob("*/comparison.json"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_run(notebook: Path, place: Path) -> None:
    content = json.loads(notebook.read_text())
    assert content["nbformat"] == 4
    namespace: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(content["cells"]):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "outputs of somebody's machine do not belong here"
            run_cell("".join(cell["source"]), namespace, f"{notebook.name}, cell {number}")
    assert list((place / "runs").glob("*/comparison.json"))


def test_the_list_of_examples_is_complete() -> None:
    listed = re.findall(r"^\| \[(.+?)\]", (ROOT / "examples" / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (*SCRIPTS, *NOTEBOOKS))
