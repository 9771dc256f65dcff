"""The SuperLink's own parts: requests for messages wait for one, and members are remembered without a database."""

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from protofed.deploy import superlink
from protofed.deploy.superlink import Arrivals, HoldMiddleware, KeptNodes, OpenQuestions
from protofed.engines.flower import prepare_flower, to_record_dict

NODE_PULL, REPLY_PULL = "/v1/fleet/pull-messages", "/v1/runtime/pull-messages"


def in_memory_state() -> Any:
    """Flower's own."""
    prepare_flower()
    from flwr.server.superlink.linkstate import LinkStateFactory
    from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.superlink.federation import NoOpFederationManager

    return LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory()).state()


def test_nodes_keep_their_numbers_and_revoked_keys_stay_out(tmp_path: Path) -> None:
    file = tmp_path / "nodes.json"
    state = in_memory_state()
    KeptNodes(state, file)
    north = state.create_node("us", "us", b"north's key", 0, name="north")
    gone = state.create_node("us", "us", b"an old key", 0, name="gone")
    state.delete_node("us", gone)  # it was never online, which Flower's own state does not expect

    again = in_memory_state()
    KeptNodes(again, file)
    assert again.get_node_id_by_public_key(b"north's key") == north
    assert again.get_node_id_by_public_key(b"an old key") is None
    with pytest.raises(ValueError, match="in use"):
        again.create_node("us", "us", b"an old key", 0, name="gone")
    assert [node.name for node in again.get_node_info(owner_aids=["us"])] == ["north", "gone"]
    assert {node["name"]: node["unregistered"] for node in json.loads(file.read_text())} == {
        "north": False,
        "gone": True,
    }


def test_a_node_that_asks_is_online(tmp_path: Path) -> None:
    """After a restart of the server it need not wait for the node's next heartbeat."""
    state = in_memory_state()
    KeptNodes(state, tmp_path / "nodes.json")
    node_id = state.create_node("us", "us", b"key", 0, name="north")
    assert [node.status for node in state.get_node_info()] == ["registered"]
    assert state.get_message_ins(node_id, limit=1) == []
    assert [node.status for node in state.get_node_info()] == ["online"]


def test_a_node_that_was_killed_is_let_in_again_at_once(tmp_path: Path) -> None:
    """Flower takes it for online until a minute has gone by without heartbeats."""
    state = in_memory_state()
    KeptNodes(state, tmp_path / "nodes.json")
    node_id = state.create_node("us", "us", b"key", 0, name="north")
    assert state.activate_node(node_id, 30)
    assert state.activate_node(node_id, 30)
    assert [node.status for node in state.get_node_info()] == ["online"]
    state.delete_node("us", node_id)
    assert not state.activate_node(node_id, 30)


class Link:
    """Flower's own state as our SuperLink has it, with one node, and a run in which it is asked and answers."""

    def __init__(self, folder: Path) -> None:
        self.state = in_memory_state()
        questions = OpenQuestions(self.state)
        KeptNodes(self.state, folder / "nodes.json", questions.ask_again)
        Arrivals(self.state)
        self.node = self.state.create_node("us", "us", b"key", 0, name="north")
        self.state.activate_node(self.node, 10)
        self.state.federation_manager.exists = lambda _: True
        self.state.run_ids[1] = SimpleNamespace(run=SimpleNamespace(federation_id="ours", primary_task_id=1))
        self.state._is_finished_run = lambda _: False

    def ask(self) -> Any:
        """The server's question, with all its parts."""
        from flwr.app import Message
        from flwr.common.constant import SUPERLINK_NODE_ID
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SUPERLINK_NODE_ID, 1
        question = Message(to_record_dict(b"a question"), self.node, "train", ttl=60.0)
        question.metadata.__dict__["_message_id"] = question.object_id
        self.send(question, parts=99)
        return question

    def answer(self, question: Any, parts: int = 99) -> None:
        """The node's answer, or only some of its parts."""
        from flwr.app import Message

        answer = Message(to_record_dict(b"an answer"), reply_to=question)
        answer.metadata.__dict__["_src_node_id"] = self.node
        answer.metadata.__dict__["_message_id"] = answer.object_id
        self.send(answer, parts)

    def send(self, message: Any, parts: int) -> None:
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

        session = self.state.start_session(1)
        stored, _ = self.state.store_message_and_object_tree(message, get_object_tree(message), session)
        assert stored
        for name, part in list(get_all_nested_objects(message).items())[:parts]:
            self.state.store_object(1, session, name, part.deflate())

    def fetched(self) -> list[str]:
        """What the node is given, which it acknowledges."""
        fetched = self.state.get_message_ins(self.node, limit=1)
        OpenQuestions.keep_after_receipt(request=None, state=self.state, store=self.state.object_store)
        for message in fetched:  # with all that is in it
            assert self.state.object_store.get(message.metadata.message_id)
        return [message.metadata.message_id for message in fetched]

    def replies(self, question: Any) -> list[Any]:
        """What the server is given, as Flower's handler does it."""
        replies = self.state.get_message_res({question.metadata.message_id}, 1)
        self.state.delete_messages({reply.metadata.reply_to_message_id for reply in replies})
        return list(replies)


@pytest.fixture
def link(tmp_path: Path) -> Link:
    return Link(tmp_path)


def test_what_a_killed_node_was_at_work_on_is_handed_out_to_it_again(link: Link) -> None:
    question = link.ask()
    assert link.fetched() == [question.metadata.message_id]
    assert link.fetched() == []
    link.state.activate_node(link.node, 10)  # as a node does when it is started
    assert link.fetched() == [question.metadata.message_id]
    link.answer(question)
    (reply,) = link.replies(question)
    assert not reply.has_error()
    assert not link.state.message_ins_store


def test_an_answer_that_was_cut_off_is_asked_for_again(link: Link) -> None:
    question = link.ask()
    link.fetched()
    link.answer(question, parts=1)
    assert link.replies(question) == []  # half of it would hold up whoever waits for the rest
    link.state.activate_node(link.node, 10)
    assert link.fetched() == [question.metadata.message_id]
    link.answer(question)
    assert [reply.has_error() for reply in link.replies(question)] == [False]


def test_an_answer_that_is_there_is_not_asked_for_again(link: Link) -> None:
    question = link.ask()
    link.fetched()
    link.answer(question)
    link.state.activate_node(link.node, 10)
    assert link.fetched() == []
    assert len(link.replies(question)) == 1


@pytest.mark.parametrize("parts", [0, 1])
def test_a_node_that_stays_away_is_waited_for_no_longer(link: Link, parts: int) -> None:
    question = link.ask()
    link.fetched()
    if parts:
        link.answer(question, parts)
    assert link.replies(question) == []
    link.state.nodes[link.node].online_until = 0.0
    (reply,) = link.replies(question)
    assert reply.has_error()
    link.state.activate_node(link.node, 10)
    assert link.fetched() == []  # it comes too late for that


def test_nothing_is_kept_of_what_is_answered(link: Link) -> None:
    """The SuperLink has messages in memory: what stays there of each round would add up."""
    for _ in range(3):
        question = link.ask()
        link.fetched()
        link.answer(question)
        (reply,) = link.replies(question)
        link.state.object_store.delete(reply.metadata.message_id)  # the server's receipt
        assert len(link.state.object_store) == 0


class Mailbox:
    """A state with the tables that Arrivals reads, in which messages have one part each."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.message_ins_store: dict[str, Any] = {}
        self.message_res_store: dict[str, Any] = {}
        self.message_ins_id_to_message_res_id: dict[str, str] = {}
        self._object_push_sessions: dict[str, Any] = {}
        self._object_push_session_by_root: dict[str, str] = {}

    def announce(self, name: str, node: int, reply_to: str = "") -> None:
        metadata = SimpleNamespace(message_id=name, dst_node_id=node, reply_to_message_id=reply_to, delivered_at="")
        store = self.message_res_store if reply_to else self.message_ins_store
        store[name] = SimpleNamespace(metadata=metadata)
        if reply_to:
            self.message_ins_id_to_message_res_id[reply_to] = name
        self._object_push_sessions[name] = SimpleNamespace(root_object_ids={name})
        self._object_push_session_by_root[name] = name

    def store_object(self, run_id: int, session_id: str) -> bool:
        del self._object_push_sessions[session_id], self._object_push_session_by_root[session_id]
        return True

    def get_message_res(self, message_ids: set[str], run_id: int) -> list[Any]:
        raise KeyError("a message that has expired")


def pull(node: int | None = None, reply_to: str | None = None) -> tuple[str, bytes]:
    from flwr.proto.fleet_pb2 import PullMessagesRequest
    from flwr.proto.node_pb2 import Node
    from flwr.proto.runtime_pb2 import PullAppMessagesRequest

    if node is not None:
        return NODE_PULL, PullMessagesRequest(node=Node(node_id=node)).SerializeToString()
    return REPLY_PULL, PullAppMessagesRequest(message_ids=[reply_to or ""]).SerializeToString()


def ask(state: Mailbox, path: str, body: bytes, meanwhile: Callable[[], Any], hangs_up: bool = False) -> list[bytes]:
    """What reaches Flower of one request during which something happens."""
    passed: list[bytes] = []

    async def flower(_: Any, receive: Any, __: Any) -> None:
        passed.append((await receive())["body"])

    async def main() -> None:
        gone = asyncio.Event()
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if parts:
                return parts.pop(0)
            await gone.wait()
            return {"type": "http.disconnect"}

        held = HoldMiddleware(flower, Arrivals(state))
        request = asyncio.create_task(held({"type": "http", "path": path}, receive, None))  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        waited = not passed
        await asyncio.to_thread(meanwhile)
        if hangs_up:
            gone.set()
        await asyncio.wait_for(request, 20)
        assert waited or not hangs_up

    prepare_flower()
    asyncio.run(main())
    return passed


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits to the end would time out."""
    monkeypatch.setattr(superlink, "_HOLD_SECONDS", 60.0)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("reply_to", ["", "question"])
def test_a_request_is_passed_on_when_the_message_is_there_with_all_its_parts(reply_to: str) -> None:
    state = Mailbox()
    state.message_ins_store["question"] = SimpleNamespace(
        metadata=SimpleNamespace(message_id="question", dst_node_id=9, delivered_at="just now")
    )
    request = pull(reply_to=reply_to) if reply_to else pull(node=5)

    def arrives() -> None:
        state.announce("message", 5, reply_to)
        state.store_object(1, "message")

    assert ask(state, *request, arrives) == [request[1]]


@pytest.mark.usefixtures("patient")
def test_what_is_there_already_is_not_waited_for() -> None:
    state = Mailbox()
    state.announce("message", 5)
    state.store_object(1, "message")
    assert len(ask(state, *pull(node=5), lambda: None)) == 1
    assert len(ask(state, *pull(reply_to="a question that has expired"), lambda: None)) == 1
    assert len(ask(state, NODE_PULL, b"\xff", lambda: None)) == 1
    assert len(ask(state, "/v1/fleet/push-messages", b"", lambda: None)) == 1


@pytest.mark.usefixtures("patient")
def test_who_has_hung_up_is_given_no_message() -> None:
    """A site that was killed: its message waits for it to come back."""
    assert ask(Mailbox(), *pull(node=5), lambda: None, hangs_up=True) == []


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(superlink, "_HOLD_SECONDS", 0.2)
    state = Mailbox()
    assert len(ask(state, *pull(node=5), lambda: state.announce("half a message", 5))) == 1


def test_an_expired_message_has_no_answer() -> None:
    state = Mailbox()
    Arrivals(state)
    assert state.get_message_res({"question"}, 1) == []
