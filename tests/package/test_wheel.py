"""The wheel works without the repository: built, installed into an environment of its own, used from another folder."""

import os
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ("src", "pyproject.toml", "README.md", "LICENSE")
SHORT = "--data digits --samples-per-client 40 --rounds 1 --engine loop"
COMMANDS = [
    "--version",
    "methods i2pfl --json",
    "data digits --json",
    "reproduce i2pfl.table2 --scale lite --dry-run",
    f"run i2pfl {SHORT} --out run",
    "report run",
    "predict run --images images --out predictions.csv",
    "explain run --images images --out explained",
    "export run --format safetensors --out model.safetensors",
]
PROGRAM = """
import sys
from pathlib import Path

import numpy as np
from PIL import Image

import protofed
from protofed.cli import main

assert Path(protofed.__file__).is_relative_to(sys.prefix), protofed.__file__
Path("images").mkdir()
Image.fromarray(np.arange(28 * 28, dtype=np.uint8).reshape(28, 28)).save("images/one.png")
for line in sys.stdin.read().splitlines():
    code = main(line.split())
    assert code == 0, f"protofed {line}: {code}"
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left in the repository."""
    place = tmp_path_factory.mktemp("source")
    for name in SOURCE:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        ignore = {"ignore": shutil.ignore_patterns("__pycache__", "*.egg-info")} if copy is shutil.copytree else {}
        copy(ROOT / name, place / name, **ignore)
    # pip asks the same build backend as `python -m build` does, and is there in every environment.
    pip = (sys.executable, "-m", "pip")
    run(*pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", place / "dist", place)
    (made,) = (place / "dist").glob("*.whl")
    return made


def run(*words: object, **options: object) -> str:
    """A program's output; it must succeed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in words], env=environment, capture_output=True, text=True, timeout=280, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_nothing_of_the_package_is_missing(wheel: Path) -> None:
    inside = {name for name in ZipFile(wheel).namelist() if name.startswith("protofed/")}
    written = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src" / "protofed").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert inside == written
    assert "protofed/py.typed" in inside


@pytest.mark.slow
def test_it_works_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    """Dependencies are those of this environment: what is tested is protofed's own part."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    (packages,) = (environment / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    work = tmp_path / "work"
    work.mkdir()
    said = run(python, "-c", PROGRAM, cwd=work, input="\n".join(COMMANDS))
    assert "report written to run/report.html" in said
    assert (work / "predictions.csv").read_text().count("\n") >= 2
    assert list((work / "explained").glob("*.html"))
    assert run(environment / "bin" / "protofed", "--version", cwd=work).startswith("protofed 0.")
