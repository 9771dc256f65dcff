"""Flower's SuperLink with its Control API locked, its state in memory and its polls held, run as a separate program.

All its interfaces share one port. Sites prove who they are by their keys, but whoever reaches the port could also
administer it: start runs, or register a key of his own. Here administration takes the secret that lies in a file on
the server, so that only those who can read that file are administrators.

Messages are in memory: in Flower's database a request costs three times as much, and a server that ends takes the run
with it anyhow. Who is a member, and who was one, is kept in a file (`KeptNodes`).

Whoever asks for a message that is not there yet is answered when it is, or after two seconds (`HoldMiddleware`), so
that nobody has to ask again and again. What a node was at work on when it was killed is handed out to it again when it
is back (`OpenQuestions`), so that nobody waits for an answer that will not come.

It is run by its file and imports nothing of protofed, so that a process that only carries messages does not load
PyTorch. What it takes from Flower's inside is therefore here and not in deploy/flower.py: see `main`.

    python -P superlink.py SECRET_FILE NODES_FILE [arguments of flower-superlink ...]
"""

import asyncio
import hmac
import json
import sys
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

SECRET_HEADER = "x-protofed-administrator"

_NODE_PULL, _REPLY_PULL = "/v1/fleet/pull-messages", "/v1/runtime/pull-messages"
_HOLD_SECONDS = 2.0
"""So long a request for messages waits for one; far less than Flower's clients wait for an answer, 30 s."""
_MOST_HELD = 64
"""So many requests of the server are held at once: it has 100 connections, and needs some for other things."""
_LONGEST_PULL = 2**16
_HEARTBEAT_SECONDS = 10.0
"""A node that is not heard of for twice as long is gone; that of supernode.py."""

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[Any]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_Key = int | str
"""What is waited for: a message to a node, by its number, or the answer to a message, by its id."""


class _ControlAuthMiddleware:
    """Lets through only requests of nodes and tasks, which Flower checks, and those with the administrator's secret."""

    def __init__(self, app: Callable[[_Scope, _Receive, _Send], Awaitable[None]], secret: bytes) -> None:
        self._app = app
        self._secret = secret

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Pass on or refuse one request."""
        if scope["type"] == "http" and not self._is_allowed(scope):
            await send({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body", "body": b"for the administrator of this federation only"})
        else:
            await self._app(scope, receive, send)

    def _is_allowed(self, scope: _Scope) -> bool:
        if scope["path"].startswith(("/v1/fleet/", "/v1/runtime/")) or scope["path"] == "/health":
            return True
        secret = dict(scope["headers"]).get(SECRET_HEADER.encode(), b"")
        return hmac.compare_digest(secret, self._secret)


class OpenQuestions:
    """Messages to nodes are kept until the server has their answer, and handed out again where a node was restarted.

    Flower forgets what is in a message once a node has fetched it, so what a killed site was at work on would be lost,
    and the round would wait for it until its deadline. It stands before `delete_messages` of Flower's state and its
    handler of receipts, and changes its tables of messages; where these change, the SuperLink does not start, or a
    site that was restarted is waited for in vain.
    """

    def __init__(self, state: Any) -> None:
        self._state, self._delete = state, state.delete_messages
        state.delete_messages = self.delete

    @staticmethod
    def keep_after_receipt(*_: Any, **__: Any) -> Any:
        """Instead of Flower's handler of a node's receipt, which deletes what is in the message."""
        from flwr.proto.message_pb2 import ConfirmMessageReceivedResponse

        return ConfirmMessageReceivedResponse()

    def delete(self, message_ins_ids: set[str]) -> None:
        """Forget questions that are answered, or for whose answer it is too late."""
        self._delete(message_ins_ids)
        for question in message_ins_ids:
            self._state.object_store.delete(question)

    def ask_again(self, node_id: int) -> None:
        """Hand out to a node that begins anew what it has not answered; half of an answer is none."""
        state = self._state
        with state.lock:
            for question, message in state.message_ins_store.items():
                if message.metadata.dst_node_id != node_id:
                    continue
                answer = state.message_ins_id_to_message_res_id.get(question)
                if answer is not None and not is_whole(state, answer):
                    self._forget_half(question, answer)
                    answer = None
                if answer is None:
                    message.metadata.delivered_at = ""

    def _forget_half(self, question: str, answer: str) -> None:
        state = self._state
        state._cleanup_push_session(state._object_push_session_by_root[answer], cleanup_messages=False)
        del state.message_ins_id_to_message_res_id[question], state.message_res_store[answer]
        state.object_store.delete(answer)


def is_whole(state: Any, message_id: str) -> bool:
    """Whether all parts of a message are there."""
    return message_id not in state._object_push_session_by_root


class KeptNodes:
    """Registered nodes and those that were, in a file: they keep their numbers, and a revoked key stays revoked.

    It stands before methods of Flower's state and puts nodes into its tables; where these change, the SuperLink
    does not start, or sites connect anew after a restart of the server.
    """

    def __init__(self, state: Any, file: Path, begins_anew: Callable[[int], None] = lambda _: None) -> None:
        self._state, self._file, self._begins_anew = state, file, begins_anew
        self._create, self._delete = state.create_node, state.delete_node
        self._activate, self._messages = state.activate_node, state.get_message_ins
        if file.exists():
            for kept in json.loads(file.read_text()):
                self._restore(kept)
        state.create_node, state.delete_node = self.create, self.delete
        state.activate_node, state.get_message_ins = self.activate, self.messages_for

    def create(self, *arguments: Any, **named: Any) -> int:
        """Register a node."""
        node_id: int = self._create(*arguments, **named)
        self._write()
        return node_id

    def delete(self, owner_aid: str, node_id: int) -> None:
        """Unregister a node."""
        with self._state.lock:
            node = self._state.nodes.get(node_id)
            if node is not None and node.online_until is None:
                node.online_until = 0.0  # Flower takes it for a number, also where the node has never been online
            self._delete(owner_aid, node_id)
        self._write()

    def activate(self, node_id: int, heartbeat_interval: float) -> bool:
        """Let a node connect. One that was killed counts as online for a minute, in which Flower would refuse it."""
        with self._state.lock:
            self._state.deactivate_node(node_id)
            activated = bool(self._activate(node_id, heartbeat_interval))
            if activated:
                self._begins_anew(node_id)
            return activated

    def messages_for(self, node_id: int, *arguments: Any, **named: Any) -> Any:
        """What a node has to fetch. One that asks is online; else the server would wait for its next heartbeat."""
        self._activate(node_id, _HEARTBEAT_SECONDS)
        return self._messages(node_id, *arguments, **named)

    def _restore(self, kept: dict[str, Any]) -> None:
        state, key = self._state, bytes.fromhex(kept["public_key"])
        node_id = self._create(kept["owner_aid"], kept["owner_name"], key, 0, name=kept["name"])
        node = state.nodes.pop(node_id)
        node.node_id = kept["node_id"]
        state.nodes[node.node_id] = node
        state.node_public_key_to_node_id[key] = node.node_id
        state.owner_to_node_ids[kept["owner_aid"]].remove(node_id)
        state.owner_to_node_ids[kept["owner_aid"]].add(node.node_id)
        if kept["unregistered"]:
            node.online_until = 0.0
            self._delete(kept["owner_aid"], node.node_id)

    def _write(self) -> None:
        with self._state.lock:
            kept = [
                {
                    "node_id": node.node_id,
                    "name": node.name,
                    "public_key": node.public_key.hex(),
                    "owner_aid": node.owner_aid,
                    "owner_name": node.owner_name,
                    "unregistered": bool(node.unregistered_at),
                }
                for node in self._state.nodes.values()
            ]
            draft = self._file.with_suffix(".draft")
            draft.write_text(json.dumps(kept, indent=2) + "\n")
            draft.replace(self._file)


class Arrivals:
    """Tells who waits for a message that it has come, with all its parts; its methods run in the event loop.

    It stands before `store_object` of Flower's state and reads its tables of messages. Where these change, the
    SuperLink does not start; where a message comes in without it, who waits finds it at the end of its two seconds.
    """

    def __init__(self, state: Any) -> None:
        self._state, self._store_object, self._replies = state, state.store_object, state.get_message_res
        self._waiting: dict[_Key, set[asyncio.Event]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        state.store_object, state.get_message_res = self.store_object, self.replies

    async def wait(self, keys: list[_Key], gone: Awaitable[Any]) -> bool:
        """Until something has come for one of them, or two seconds; False where who asks is gone before that."""
        self._loop = asyncio.get_running_loop()
        event, left = asyncio.Event(), asyncio.ensure_future(gone)
        for key in keys:
            self._waiting.setdefault(key, set()).add(event)
        come = asyncio.ensure_future(event.wait())
        try:
            if not self._is_there(keys):
                await asyncio.wait([come, left], timeout=_HOLD_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            return not left.done()
        finally:
            for key in keys:
                self._waiting[key].discard(event)
                if not self._waiting[key]:
                    del self._waiting[key]
            for task in (come, left):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    def held(self) -> int:
        """How many requests for answers wait."""
        return sum(len(events) for key, events in self._waiting.items() if isinstance(key, str))

    def store_object(self, run_id: int, session_id: str, *arguments: Any, **named: Any) -> bool:
        """Take in a part of a message; in Flower's threads."""
        state = self._state
        session = state._object_push_sessions.get(session_id)
        roots = [] if session is None else list(session.root_object_ids)
        stored: bool = self._store_object(run_id, session_id, *arguments, **named)
        if self._loop is not None and session_id not in state._object_push_sessions:
            for root in roots:
                message = state.message_ins_store.get(root) or state.message_res_store.get(root)
                if message is not None:
                    key = message.metadata.reply_to_message_id or message.metadata.dst_node_id
                    self._loop.call_soon_threadsafe(self._wake, key)
        return stored

    def replies(self, message_ids: set[str], run_id: int) -> list[Any]:
        """The answers that are there as a whole. Flower 1.41.0 gives out halves, and their rest may never come.

        It also trips over a message that has just expired.
        """
        with self._state.lock:
            asked = {message_id for message_id in message_ids if not self._is_coming(message_id)}
        try:
            return list(self._replies(asked, run_id)) if asked else []
        except KeyError:
            return []

    def _wake(self, key: _Key) -> None:
        for event in self._waiting.get(key, ()):
            event.set()

    def _is_there(self, keys: list[_Key]) -> bool:
        state = self._state
        with state.lock:
            for key in keys:
                if isinstance(key, str):
                    reply = state.message_ins_id_to_message_res_id.get(key)
                    if key not in state.message_ins_store or (reply is not None and is_whole(state, reply)):
                        return True
                elif any(
                    message.metadata.dst_node_id == key
                    and not message.metadata.delivered_at
                    and is_whole(state, message.metadata.message_id)
                    for message in state.message_ins_store.values()
                ):
                    return True
        return False

    def _is_coming(self, message_id: str) -> bool:
        """Whether part of the answer is there, and its sender still is."""
        state = self._state
        reply = state.message_ins_id_to_message_res_id.get(message_id)
        question = state.message_ins_store.get(message_id)
        if reply is None or question is None or is_whole(state, reply):
            return False
        node = state.nodes.get(question.metadata.dst_node_id)
        return node is not None and (node.online_until or 0.0) > time.time()


class HoldMiddleware:
    """Holds requests for messages until there is one. Who has hung up meanwhile is given none: it would be lost."""

    def __init__(self, app: Callable[[_Scope, _Receive, _Send], Awaitable[None]], arrivals: Arrivals) -> None:
        self._app, self._arrivals = app, arrivals

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Pass on one request, now or later."""
        if scope["type"] != "http" or scope["path"] not in (_NODE_PULL, _REPLY_PULL):
            await self._app(scope, receive, send)
            return
        parts = [await receive()]
        while parts[-1].get("more_body") and sum(len(part.get("body", b"")) for part in parts) < _LONGEST_PULL:
            parts.append(await receive())
        keys = [] if parts[-1].get("more_body") else self._keys(scope["path"], parts)

        async def again() -> Any:
            return parts.pop(0) if parts else await receive()

        if not keys or await self._arrivals.wait(keys, receive()):
            await self._app(scope, again, send)

    def _keys(self, path: str, parts: list[Any]) -> list[_Key]:
        """What a request asks for; nothing where it need not wait."""
        from flwr.proto.fleet_pb2 import PullMessagesRequest
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

        body = b"".join(part.get("body", b"") for part in parts)
        try:
            if path == _NODE_PULL:
                return [PullMessagesRequest.FromString(body).node.node_id]
            asked = PullAppMessagesRequest.FromString(body).message_ids
        except DecodeError:
            return []
        return list(asked) if self._arrivals.held() < _MOST_HELD else []


def main() -> None:
    """Serve until ended.

    This is `flower-superlink` of Flower 1.41.0 with two middlewares, and a handler replaced. Where create_app, the
    lifespan or the parsing of options change, the SuperLink does not start; where the paths in `_is_allowed` change,
    sites are refused, and where those of HoldMiddleware change, rounds take longer.
    """
    secret, nodes = Path(sys.argv.pop(1)).read_bytes(), Path(sys.argv.pop(1))

    import uvicorn
    from flwr.supercore.http_logging import get_uvicorn_log_config
    from flwr.supercore.logger import console_handler
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
    from flwr.superlink.main import create_app
    from flwr.superlink.servicer.fleet import fleet_handlers

    config = _parse_superlink_lifespan_config()
    app = create_app(config, SuperLinkLifespan)
    state = app.state.linkstate_factory.state()
    questions = OpenQuestions(state)
    fleet_handlers.confirm_message_received = questions.keep_after_receipt
    KeptNodes(state, nodes, questions.ask_again)
    app.add_middleware(HoldMiddleware, arrivals=Arrivals(state))
    app.add_middleware(_ControlAuthMiddleware, secret=secret)
    uvicorn.run(
        app,
        host=config.host,
        port=config.port,
        access_log=False,
        log_config=get_uvicorn_log_config(console_handler.level),
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        workers=1,
    )


if __name__ == "__main__":
    main()
