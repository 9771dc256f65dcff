"""How often a node looks for messages."""

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace

import pytest

from protofed.deploy import supernode
from protofed.deploy.supernode import AnswerInMaking, pause_after, poll_until_message, pull_eagerly
from protofed.engines.flower import prepare_flower


@pytest.mark.parametrize(("silence", "pause"), [(0.0, 0.05), (0.5, 0.05), (8.0, 0.8), (3600.0, 3.0)])
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
    answered: list[float] = []
    assert poll_until_message(look, lambda: answered.append(now))(state="its own") == 7
    assert answered == [looks[-1]]
    assert len(looks) < 60
    assert all(later - earlier <= 0.1 * earlier + 0.11 for earlier, later in pairwise(looks))


def test_a_question_that_was_held_is_asked_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def look() -> int | None:
        nonlocal now
        now += 2.0  # as long as our SuperLink holds it
        return 7 if now > 19 else None

    monkeypatch.setattr(supernode.time, "monotonic", lambda: now)
    monkeypatch.setattr(supernode.time, "sleep", lambda seconds: pytest.fail(f"it slept for {seconds} s"))
    assert poll_until_message(look, lambda: None)() == 7


def test_it_looks_for_the_answer_at_once_and_then_as_often_as_flower(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = 0.0, list[float]()
    monkeypatch.setattr(supernode.time, "monotonic", lambda: now)
    answer = AnswerInMaking()
    monkeypatch.setattr(answer, "_answer", SimpleNamespace(wait=slept.append, clear=lambda: None))
    answer.sleep(0.5)
    now = 60.0
    answer.sleep(0.5)
    answer.begin()
    answer.sleep(0.5)
    assert slept == pytest.approx([0.05, 0.5, 0.05])
    assert answer.time() > 0


def test_message_and_answer_wake_who_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supernode, "_SHORTEST", 60.0)
    answer = AnswerInMaking()
    with ThreadPoolExecutor() as threads:
        task = threads.submit(answer.after_message(lambda: "a task"))
        answer.begin()
        assert task.result(timeout=30) == "a task"
        sleeper = threads.submit(answer.sleep, 60.0)
        assert answer.before_answer(lambda status: status)("done") == "done"
        sleeper.result(timeout=30)


def test_without_a_message_a_task_is_asked_for_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supernode, "_HOLD_SECONDS", 0.01)
    assert AnswerInMaking().after_message(lambda: None)() is None


def test_a_part_that_is_not_there_yet_is_asked_for_again_at_once() -> None:
    pytest.importorskip("flwr")
    prepare_flower()
    from flwr.supercore.inflatable import inflatable_utils as inside

    before = dict(inside.pull_objects.__kwdefaults__)
    try:
        pull_eagerly()
        asked: list[str] = []

        def pull(name: str) -> bytes:
            asked.append(name)
            if len(asked) < 4:
                raise inside.ObjectUnavailableError(name)
            return b"here"

        begin = time.monotonic()
        assert inside.pull_objects(["part"], pull) == {"part": b"here"}
        assert time.monotonic() - begin < 2.9  # 0.2 s on an idle machine; Flower's own waits add up to 5.6 s and more
    finally:
        inside.pull_objects.__kwdefaults__.update(before)
