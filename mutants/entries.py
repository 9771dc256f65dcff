"""What is to be mutated: the entries of the toml files, and the text of a file with one of them made."""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


class BadEntry(Exception):
    """An entry that does not fit the source, or tests that fail without it: the list has to be mended."""


@dataclass(frozen=True)
class Mutant:
    """One mistake in one place, and the tests that have to fail with it."""

    what: str
    """The mistake in words."""
    file: str
    """Path inside the package."""
    old: str
    """Text that occurs exactly once in the file."""
    new: str
    tests: tuple[str, ...]
    """Files or node ids, inside the folder of tests."""
    survives: str = ""
    """Why no quick test can notice it; empty: one has to."""

    @property
    def test_files(self) -> set[str]:
        """Where its tests are."""
        return {file_of(test) for test in self.tests}

    def mutated(self, source: str) -> str:
        """The text of the file with the mistake in it."""
        if (times := source.count(self.old)) != 1:
            raise BadEntry(f"{self.what}: the old text occurs {times} times in {self.file}, not once")
        text = source.replace(self.old, self.new)
        try:
            compile(text, self.file, "exec")
        except SyntaxError as problem:
            raise BadEntry(f"{self.what}: {self.file} is no Python any more ({problem})") from None
        return text


def read_entries(folder: Path) -> list[Mutant]:
    """All entries of the toml files of a folder, in their order."""
    found = []
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["mutant"]:
            found.append(Mutant(**{**entry, "tests": tuple(entry["tests"])}))
    twice = {mutant.what for mutant in found if [other.what for other in found].count(mutant.what) > 1}
    if twice:
        raise BadEntry(f"more than one entry is called {', '.join(sorted(twice))}")
    return found


def check_entries(mutants: Iterable[Mutant], package: Path, tests: Path) -> None:
    """Raise where an entry does not fit the source or names tests that do not exist."""
    problems = []
    for mutant in mutants:
        try:
            mutant.mutated((package / mutant.file).read_text())
        except (BadEntry, OSError) as problem:
            problems.append(str(problem))
        problems += [f"{mutant.what}: there is no {test}" for test in mutant.tests if not _exists(test, tests)]
    if problems:
        raise BadEntry("\n".join(problems))


def file_of(test: str) -> str:
    """The file of a test."""
    return test.partition("::")[0]


def _exists(test: str, tests: Path) -> bool:
    file, _, name = test.partition("::")
    path = tests / file
    return path.is_file() and (not name or f"def {name}(" in path.read_text())
