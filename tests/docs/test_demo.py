"""`make demo` runs to its end: its commands, made small, in the place of its folders."""

import re
import shlex
from pathlib import Path

import pytest
from small_world import small

from protofed.cli import main

MAKEFILE = (Path(__file__).parents[2] / "Makefile").read_text()


def test_the_demo_runs(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe = re.search(r"^demo: setup\n((?:\t.+\n)+)", MAKEFILE, re.MULTILINE)
    assert recipe is not None
    commands = re.findall(r"^\t\$\(BIN\)/protofed (.+)$", recipe[1].replace("$(DEMO)", "demo"), re.MULTILINE)
    methods = {word for command in commands for word in command.split()} & {"fedavg", "i2pfl", "protoridge"}
    assert len(methods) == 3, "both worlds"
    for command in commands:
        assert main(shlex.split(small(command))) == 0, capfd.readouterr().err
    assert (place / "demo" / "report.html").is_file()
