"""How often a node looks for messages."""

from itertools import pairwise

import pytest

from protofed.deploy import supernode
from protofed.deploy.supernode import pause_after, poll_until_message


@pytest.mark.parametrize(("silence", "pause"), [(0.0, 0.1), (0.5, 0.1), (8.0, 0.8), (3600.0, 3.0)])
def test_an_idle_node_looks_seldom(silence: float, pause: float) -> None:
    assert pause_after(silence) == pytest.approx(pause)
    assert pause_after(silence, 0.5) == pytest.approx(min(pause, 0.5))


def test_it_looks_until_there_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def look(*, state: str) -> int | None:
        assert state == "its own"
        looks.append(now)
        return 7 if now > 20 else None

    monkeypatch.setattr(supernode.time, "monotonic", lambda: now)
    monkeypatch.setattr(supernode.time, "sleep", sleep)
    assert poll_until_message(look)(state="its own") == 7
    assert len(looks) < 50
    assert all(later - earlier <= 0.1 * earlier + 0.11 for earlier, later in pairwise(looks))
