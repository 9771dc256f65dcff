"""Every promise of SECURITY.md names a test that holds it, and the test is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tests_that_security_names_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "SECURITY.md").read_text()))
    written = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 10
    assert {name for name in named if f"def {name}(" not in written} == set()
