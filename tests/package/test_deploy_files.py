"""What a deployment is made of names things that exist, and commands that parse: units, containers, the runbook."""

import os
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml

from protofed.cli.app import app
from protofed.deploy.policy import Policy
from protofed.runs.config_file import read_config
from protofed.runs.options import make_options

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
COMPOSE = sorted(DEPLOY.glob("compose.*.yaml"))
DOCUMENTS = [ROOT / "docs" / "runbook.md", ROOT / "docs" / "deploying.md", ROOT / "docs" / "releasing.md"]
START = "start-server.sh"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]
FLAG = "true|false"
DIRECTIVES = {
    "Unit": {"Description": ".+", "Documentation": "(man|https):.+", "After": r"[\w.-]+", "Wants": r"[\w.-]+"},
    "Service": {
        "User": r"[a-z][\w-]*",
        "StateDirectory": r"[\w-]+",
        "StateDirectoryMode": "0700",
        "WorkingDirectory": "/.+",
        "Environment": r"(\w+=\S+ ?)+",
        "EnvironmentFile": "/.+",
        "ExecStart": "/.+",
        "Restart": "on-failure|always",
        "RestartSec": r"\d+",
        "TimeoutStopSec": r"\d+",
        "NoNewPrivileges": FLAG,
        "ProtectSystem": "strict",
        "ProtectHome": f"{FLAG}|read-only",
        "PrivateTmp": FLAG,
        "PrivateDevices": FLAG,
        "CapabilityBoundingSet": "",
        "RestrictAddressFamilies": "(AF_(INET|INET6|UNIX) ?)+",
    },
    "Install": {"WantedBy": "multi-user.target"},
}
"""What our units may say, and how (systemd.unit, systemd.service, systemd.exec)."""
SERVICE_KEYS = {
    "build", "cap_drop", "command", "entrypoint", "image", "ports", "read_only", "restart", "security_opt",
    "stop_grace_period", "tmpfs", "volumes",
}  # fmt: skip
"""Of the compose specification, as far as our files use it."""
INSTRUCTIONS = {"FROM", "WORKDIR", "COPY", "RUN", "USER", "ENV", "ENTRYPOINT", "CMD"}


def parse(words: list[str]) -> None:
    """Parse a command line as protofed does, without doing anything."""
    command: Any = typer.main.get_command(app)
    context = click.Context(command, info_name="protofed")
    while isinstance(command, click.Group) and words and words[0] in command.commands:
        name, *words = words
        command = command.commands[name]
        context = click.Context(command, parent=context, info_name=name)
    command.make_context(command.name, list(words), parent=context.parent)


def commands_in(text: str) -> list[list[str]]:
    """The protofed commands of console blocks, also those behind sudo or a path."""
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    parts = [part for line in lines for part in line.split("&&")]
    found = [re.search(r"(?:^|/)protofed (.+)$", part.strip()) for part in parts]
    return [shlex.split(each[1]) for each in found if each]


def started(words: list[str]) -> list[str]:
    """The command that the script begins a run with."""
    return ["deploy", "server", "--config", words[0], "--out", words[1], *words[2:]]


def test_a_wrong_option_is_noticed() -> None:
    with pytest.raises(click.UsageError):
        parse(["deploy", "site", "--data", "x", "--polizy", "y"])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_of_documents_parse(document: Path) -> None:
    commands = commands_in(document.read_text())
    assert commands
    for words in commands:
        parse(words)


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_commands_of_units_parse(unit: Path) -> None:
    line = re.search(r"^ExecStart=(.+)$", unit.read_text(), re.MULTILINE)
    assert line is not None
    program, *words = shlex.split(line[1])
    parse(started(words) if program.endswith(START) else words)


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_units_say_what_systemd_knows(unit: Path) -> None:
    """Also on machines without systemd: a misspelt name would only be a line in a journal."""
    section, said = "", []
    for line in unit.read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            name, _, value = line.partition("=")
            said.append((section, name))
            assert re.fullmatch(DIRECTIVES[section][name], value), line
    assert {("Service", "ExecStart"), ("Service", "User"), ("Install", "WantedBy")} <= set(said)
    repeated = {each for each in said if said.count(each) > 1}
    assert repeated == set()


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_accepts_the_units(unit: Path, tmp_path: Path) -> None:
    """Programs are looked for, so those of /opt are put beside the unit. Without systemd the test above has to do."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    text = unit.read_text()
    for program in re.findall(r"/opt/protofed/bin/([\w.-]+) ", text):
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    (tmp_path / unit.name).write_text(text.replace("/opt/protofed/bin/", f"{tmp_path}/"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit.name)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert unit.name not in done.stderr, done.stderr


@pytest.mark.parametrize("file", COMPOSE, ids=lambda path: path.name)
def test_commands_of_containers_parse(file: Path) -> None:
    content = yaml.safe_load(file.read_text())
    assert set(content) <= {"services", "volumes"}
    for service in content["services"].values():
        assert set(service) <= SERVICE_KEYS
        assert service["image"] == f"protofed:{VERSION}"
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        entry = service.get("entrypoint", ["protofed"])
        words = [*entry[1:], *service["command"]]
        parse(started(words) if entry[0] == START else words)
        # Every absolute path of the command is mounted.
        mounted = [
            volume.rsplit(":", 2)[1] if volume.endswith(":ro") else volume.rsplit(":", 1)[1]
            for volume in service["volumes"]
        ]
        named = [word for word in words if word.startswith("/")]
        assert [
            word for word in named if not any(word == place or word.startswith(f"{place}/") for place in mounted)
        ] == []
        assert service["read_only"]


def test_the_dockerfile_copies_what_exists_and_does_not_run_as_root() -> None:
    text = re.sub(r"\\\n\s*", "", (DEPLOY / "Dockerfile").read_text())
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert {name for name, _ in lines} <= INSTRUCTIONS
    for name, rest in lines:
        words = [word for word in rest.split() if not word.startswith("--")]
        if name == "COPY" and "--from" not in rest:
            assert [word for word in words[:-1] if not (ROOT / word).exists()] == []
    assert [rest for name, rest in lines if name == "USER"][-1] == "protofed"
    wanted = re.search(r"\.whl\)\[([\w,]+)\]", text)
    assert wanted is not None
    assert set(wanted[1].split(",")) <= set(PROJECT["optional-dependencies"])
    assert f"--tag protofed:{VERSION}" in (DEPLOY / "Dockerfile").read_text()


def test_the_examples_are_valid() -> None:
    assert Policy.read(DEPLOY / "policy.toml").methods
    assert make_options(read_config(DEPLOY / "study.toml")).method in Policy.read(DEPLOY / "policy.toml").methods


def test_the_server_is_begun_once_and_then_resumed(tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "protofed"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$*"\n')
    fake.chmod(0o755)
    run = tmp_path / "a run"

    def start() -> str:
        words = [str(DEPLOY / START), "study.toml", str(run), "--min-sites", "2"]
        path = {**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}"}
        return subprocess.run(words, env=path, capture_output=True, text=True, check=True).stdout.strip()

    assert start() == f"deploy server --config study.toml --out {run} --min-sites 2"
    run.mkdir()
    (run / "run.json").write_text("{}")
    assert start() == f"deploy server --resume --out {run} --min-sites 2"
