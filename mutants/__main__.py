"""Make every mistake of the list, one at a time, and see whether the tests notice.

    python -m mutants [--only PATTERN] [--workers N] [--list] [--write]

The tests named in an entry have to pass without the mistake and to fail with it; those marked slow are left out. The
working tree is never touched. Ends with 1 where fewer than 95 % are noticed, or one that nobody has given a reason for
is not.
"""

import argparse
import importlib
import importlib.util
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mutants.entries import BadEntry, Mutant, check_entries, file_of, read_entries
from mutants.trial import Outcome, Trial, Workbench, outcomes, workbenches

ROOT = Path(__file__).parents[1]
GOAL = 0.95
_MEND_LIST = 2
"""The exit status where the list itself is wrong, so that its result says nothing."""

_LOADED = (
    *("torch", "torch.fx.experimental.symbolic_shapes", "sympy", "numpy", "scipy.sparse.csgraph", "scipy.special"),
    *("sklearn.metrics", "pydantic", "safetensors.torch", "PIL.Image", "hypothesis", "anyio", "xdist"),
)
"""What tests import that is not ours: once, instead of once per mutant."""
_SLOWDOWN = 5
"""A mutant may take so many times as long as its tests took without it, and the spare seconds more."""
_PATIENCE = 900
"""Seconds that tests may take without a mutant."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="PATTERN", default="", help="mutants in whose words or file this is found")
    parser.add_argument("--workers", type=int, default=1, help="how many at once")
    parser.add_argument("--list", action="store_true", help="say what is in the list, and check that it fits")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/mutants.md")
    parser.add_argument("--spare", type=float, default=60, help="seconds that a mutant may be late: then it is killed")
    parser.add_argument("--load", nargs="*", default=_LOADED, help="libraries to be imported once, not by each mutant")
    parser.add_argument("--entries", type=Path, default=ROOT / "mutants", help="folder of the toml files")
    parser.add_argument("--package", type=Path, default=ROOT / "src" / "protofed", help="the package to be changed")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help="the folder of its tests")
    chosen = parser.parse_args(arguments)
    try:
        pattern = re.compile(chosen.only, re.IGNORECASE)
        listed = [each for each in read_entries(chosen.entries) if pattern.search(f"{each.file} {each.what}")]
        check_entries(listed, chosen.package, chosen.tests)
        if chosen.list:
            print("\n".join(f"{mutant.file}: {mutant.what}" for mutant in listed))
            print(f"{len(listed)} mutants")
            return 0
        start, load = time.monotonic(), os.getloadavg()[0]
        load_libraries(chosen.load)
        results = run(listed, chosen.package.resolve(), chosen.tests.resolve(), chosen.workers, chosen.spare)
    except BadEntry as problem:
        print(problem, file=sys.stderr)
        return _MEND_LIST
    status = judge(results)
    if chosen.write and status != _MEND_LIST:
        write(results, time.monotonic() - start, load)
    return status


def load_libraries(names: Sequence[str]) -> None:
    """Import what is installed of these, for all children that will be forked."""
    for name in names:
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)


def run(listed: Sequence[Mutant], package: Path, tests: Path, workers: int, spare: float) -> dict[Mutant, Outcome]:
    """What became of each."""
    with workbenches(workers, package.parent, tests.parent) as benches:
        sound = _without_mutants(benches, listed, tests)
        results = {
            mutant: Outcome(False, "", f"{file} fails without a mutant: {sound[file].killer} {sound[file].reason}")
            for mutant in listed
            for file in mutant.test_files
            if not sound[file].passed
        }
        trials = (
            (
                mutant,
                _trial(mutant, package, tests, spare + _SLOWDOWN * sum(sound[f].seconds for f in mutant.test_files)),
            )
            for mutant in listed
            if mutant not in results
        )
        for mutant, outcome in outcomes(benches, trials):
            results[mutant] = outcome
            told = "survived" if outcome.passed else f"killed by {outcome.killer.rpartition('/')[2]}: {outcome.reason}"
            print(f"{len(results)}/{len(listed)} {outcome.seconds:.1f} s {mutant.what}: {told}", flush=True)
    return {mutant: results[mutant] for mutant in listed}


def _trial(mutant: Mutant, package: Path, tests: Path, limit: float) -> Trial:
    text = mutant.mutated((package / mutant.file).read_text())
    return Trial(_paths(mutant.tests, tests), limit, f"{package.name}/{mutant.file}", text)


def _without_mutants(benches: Sequence[Workbench], listed: Sequence[Mutant], tests: Path) -> dict[str, Outcome]:
    """What becomes of the named tests of each file with the package as it is, with which they have to pass."""
    named: dict[str, dict[str, None]] = {}
    for test in (test for mutant in listed for test in mutant.tests):
        named.setdefault(file_of(test), {})[test] = None
    trials = ((file, Trial(_paths(list(names), tests), _PATIENCE)) for file, names in named.items())
    found = dict(outcomes(benches, trials))
    passed = sum(outcome.passed for outcome in found.values())
    print(f"the tests named in {passed} of {len(found)} files pass without a mutant", flush=True)
    return found


def _paths(names: Sequence[str], tests: Path) -> tuple[str, ...]:
    return tuple(str(tests / name) for name in names)


def judge(results: dict[Mutant, Outcome]) -> int:
    """Say how many were killed, and what is wrong with those that were not; the exit status."""
    meaningless = [mutant for mutant, outcome in results.items() if not outcome.passed and outcome.meaningless]
    unexplained = [mutant for mutant, outcome in results.items() if outcome.passed and not mutant.survives]
    explained_for_nothing = [mutant for mutant, outcome in results.items() if not outcome.passed and mutant.survives]
    for mutant in meaningless:
        print(f"shows nothing: {mutant.what}: {results[mutant].reason}")
    for mutant in unexplained:
        print(f"survived: {mutant.file}: {mutant.what}")
    for mutant in explained_for_nothing:
        print(f"was killed, so it needs no reason: {mutant.what}")
    killed = sum(not outcome.passed for outcome in results.values()) - len(meaningless)
    print(f"killed {killed} of {len(results)}")
    if meaningless or explained_for_nothing:
        return _MEND_LIST
    return int(bool(unexplained) or killed < GOAL * len(results))


def write(results: dict[Mutant, Outcome], seconds: float, load: float) -> None:
    """The table of results."""
    from benchmarks import RESULTS, report, table  # imports the package, which must not be loaded before a fork

    areas = Counter(Path(mutant.file).parts[0].removesuffix(".py") for mutant in results)
    lost = Counter(
        Path(mutant.file).parts[0].removesuffix(".py") for mutant, outcome in results.items() if outcome.passed
    )
    rows = [[area, number - lost[area], number] for area, number in sorted(areas.items())]
    rows.append(["all", len(results) - lost.total(), len(results)])
    survivors = [[mutant.file, mutant.what, mutant.survives] for mutant, outcome in results.items() if outcome.passed]
    killers = [
        [mutant.file, mutant.what, outcome.killer.rpartition("/")[2]]
        for mutant, outcome in results.items()
        if not outcome.passed
    ]
    body = "\n\n".join(
        [
            table(["part", "killed", "mutants"], rows),
            "## Survivors",
            table(["file", "mistake", "why no quick test notices"], survivors) if survivors else "None.",
            "## Killed",
            table(["file", "mistake", "first test that failed"], killers),
        ]
    )
    text = report("Mutants: mistakes that the tests notice", "python -m mutants --write", body, seconds, load)
    (RESULTS / "mutants.md").write_text(text)


if __name__ == "__main__":
    sys.exit(main())
