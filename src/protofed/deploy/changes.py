"""Sites that come and go after the exchange of a run whose result is a sum over sites: one is added or subtracted.

Both need what the site has sent. The server keeps only the sum, so it asks the site once more for the upload of the
first round, and gets the same bytes (see ledger.py). With secure=on no single upload leaves a site, and the difference
of two sums would be one: nobody is added or taken out then, unless a site hands over its own state.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from protofed.clients import ClientState, Prepared
from protofed.deploy.engine import AcceptedRounds
from protofed.errors import BadMessage, UserError, unknown_name
from protofed.federation import Federation
from protofed.inference.addition import AdditionResult
from protofed.inference.changed import (
    FORGOTTEN,
    JOINED,
    add_record,
    model_hash,
    now,
    refuse_what_is_no_sum,
    write_summary,
)
from protofed.inference.forget import ForgetResult
from protofed.method import Method
from protofed.records import Record, decode_file, encode
from protofed.runs.opened import Run

_SECURE = "with secure=on no single upload leaves a site, and the sums with and without it would reveal what it sent"


class SumChanges:
    """Takes sites out of the sum of a run in hand, or adds them; every change is committed with its record."""

    def __init__(self, federation: Federation, accepted: AcceptedRounds, method: str) -> None:
        self._federation = federation
        self._accepted = accepted
        self._name = method

    @property
    def adds(self) -> bool:
        """Whether a site that missed the exchange can be added to the result."""
        federation = self._federation
        method = type(federation.context.method)
        return method.include is not Method.include and federation.rounds_done == federation.context.plan.rounds == 1

    def forget(self, client: str, state: Path | None, shut_out: Callable[[str], None]) -> dict[str, Any]:
        """The record of what was taken out, with the accuracy of what remains; a UserError where that cannot be.

        The client is shut out before the others score what remains.
        """
        federation = self._federation
        context, server = federation.context, federation.server
        if client not in context.partition.clients:
            raise unknown_name("client", client, list(context.partition.clients))
        part = federation.folder.committed_clients() if federation.rounds_done else []
        if client not in part:
            raise UserError(f"{client} has sent nothing that is part of the result of {federation.folder.path}")
        what = f"{self._name} cannot forget {client}"
        self._refuse_what_is_no_sum(client, what)
        left = [site for site in part if site != client]
        if not left:
            raise UserError(f"without {client} nobody is left")
        memory = self._asked(client) if state is None else self._read(client, state)
        at = replace(context.at(federation.rounds_done - 1, client), participants=tuple(left))
        try:
            without = _usable(lambda: context.method.forget(server, memory, at))
        except UserError as reason:
            raise UserError(f"{what}: {reason}; otherwise train again without it") from None
        shut_out(client)
        before, after = (model_hash(context.method, each) for each in (server, without))
        # The essentials of the record are committed with the result.
        about = {"date": now(), "before": before, "after": after}
        event = {"client": client, "event": "forgotten", "reason": "removed from the result", **about}
        accuracy = federation.revise(without, left, event)
        federation.folder.remove_copies(client)
        result = ForgetResult(client, context.sizes[client], before, after, tuple(left), accuracy)
        record = result.as_dict()
        self._write(FORGOTTEN, record, accuracy)
        return {**record, "accuracy": accuracy}

    def add(self, client: str, prepared: Prepared) -> None:
        """Add the part of a site that has none yet; `prepared` is the run with it among the clients."""
        federation = self._federation
        before, server = federation.prepared, federation.server
        part = federation.folder.committed_clients()
        context = prepared.context
        sites = [site for site in context.partition.clients if site in {*part, client}]
        federation.enrol(prepared)
        try:
            self._refuse_what_is_no_sum(client, f"{client} cannot be added")
            if context.guard.secure:
                raise UserError(f"{client} cannot be added: {_SECURE}; run again with it")
            upload, sent = federation.upload_of(client)
            at = replace(context.at(federation.rounds_done - 1, client), participants=tuple(sites))
            memory = context.method.memory_of(upload, self._blank(client).memory)
            joined = _usable(lambda: context.method.include(server, memory, at))
        except UserError:
            federation.enrol(before)
            raise
        event = {"client": client, "event": "joined", "reason": "it arrived late and was added to the result"}
        accuracy = federation.revise(joined, sites, event)
        one, other = (model_hash(context.method, each) for each in (server, joined))
        result = AdditionResult(client, context.sizes[client], sent.size.total, one, other, tuple(sites))
        self._write(JOINED, result.as_dict(), accuracy)

    def _refuse_what_is_no_sum(self, client: str, what: str) -> None:
        """Raise where uploads were not simply added up in one exchange."""
        context = self._federation.context
        try:
            refuse_what_is_no_sum(context)
            # Says why where the method can never; nothing is done with what comes back.
            if type(context.method).forget is Method.forget:
                context.method.forget(None, None, context.at(0, client))
            if context.plan.rounds > 1:
                raise UserError("the exchange was followed by rounds, which would have gone differently")
        except UserError as reason:
            raise UserError(f"{what}: {reason}; otherwise train again") from None

    def _asked(self, client: str) -> Record:
        """What a site has sent, from the site itself; other bytes than before are not what is in the sum."""
        federation = self._federation
        if federation.context.guard.secure:
            raise UserError(
                f"{_SECURE}; the site can hand over its own clients/{client}.safetensors (--state), or run again "
                f"without {client}"
            )
        known = self._accepted.digests.get(client)
        upload, _ = federation.upload_of(client)
        if known is not None and self._accepted.digests.get(client) != known:
            self._accepted.digests[client] = known
            raise UserError(f"what {client} sends now differs from what it sent, so it cannot be subtracted")
        return federation.context.method.memory_of(upload, self._blank(client).memory)

    def _read(self, client: str, state: Path) -> Record:
        try:
            return decode_file(state, self._blank(client), f"{client}'s state").memory
        except (OSError, BadMessage) as problem:
            raise UserError(f"what was handed over is not the state of a site of this run ({problem})") from None

    def _blank(self, client: str) -> ClientState:
        prepared = self._federation.prepared
        return prepared.templates.clients[prepared.context.architecture_of(client)]

    def _write(self, name: str, record: dict[str, Any], accuracy: Any) -> None:
        """The record, and where the run is complete already its results."""
        federation = self._federation
        folder = federation.folder
        add_record(folder.path, folder, name, record)
        run = Run(folder.path)
        if run.complete:
            federation.write_results(folder.path)
            write_summary(folder, run.summary, accuracy)


def _usable(change: Callable[[], Record]) -> Record:
    """The new state of the server; what a member sent may lead to none that is finite, and ends no run."""
    try:
        state = change()
        encode(state, "server")
    except (ArithmeticError, BadMessage, LookupError, RuntimeError, ValueError) as problem:
        raise UserError(f"the server's state would not be usable ({type(problem).__name__})") from None
    return state


def record_for_site(record: Mapping[str, Any], run: str) -> bytes:
    """What a site is told of its part: the record without the scores of others."""
    return json.dumps({"run": run, **{key: value for key, value in record.items() if key != "accuracy"}}).encode()
