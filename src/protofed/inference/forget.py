"""The result of a run without one of its sites, where what the site sent can be taken out again."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from protofed.clients import ClientState
from protofed.errors import BadMessage, UserError, unknown_name
from protofed.federation import RunFolder
from protofed.inference.changed import (
    FORGOTTEN,
    add_record,
    copy_result,
    hashes,
    now,
    opened_with_images,
    refuse_what_is_no_sum,
    write_result,
)
from protofed.records import Record, decode_file
from protofed.runs.opened import OpenRun
from protofed.system import one_thread

_LASTING = (
    "models and broadcasts that were sent before, wherever they are now",
    "what the run records about itself: who took part with how many images of each class (run.json, partition.npz)",
)


@dataclass(frozen=True)
class ForgetResult:
    """What was taken out of a run."""

    client: str
    images: int
    before: str
    after: str
    """SHA-256 of the model."""
    left: tuple[str, ...]
    """The sites whose part remains."""
    accuracy: Any
    """Of the new model; None where the run's images are not at hand."""

    def as_dict(self) -> dict[str, Any]:
        """As forgotten.json has it."""
        return {
            "client": self.client,
            "date": now(),
            "images": self.images,
            "removed": ["its share of the sums", "its stored state", "its kept messages"],
            "cannot_be_removed": list(_LASTING),
            "left": list(self.left),
            "model_sha256": {"before": self.before, "after": self.after},
        }


def forget(run: str | Path, client: str, *, out: str | Path, state: str | Path | None = None) -> ForgetResult:
    """Write the result of a complete run without `client` to `out`, as if it had never taken part.

    A method whose server state is no sum over clients cannot; it is refused with what would be needed. In a deployment
    the site's state is with the site, which hands it over once: `state`, its clients/CLIENT.safetensors.
    """
    target = RunFolder(Path(out))
    target.refuse_if_taken()
    with one_thread():
        host = opened_with_images(run)
        if client not in host.clients:
            raise unknown_name("client", client, host.clients)
        if client not in host.run.folder.committed_clients():
            raise UserError(f"{client} has sent nothing that is part of the result of {host.run.path}")
        refuse_what_is_no_sum(host.context)
        left = tuple(site for site in host.run.folder.committed_clients() if site != client)
        if not left:
            raise UserError(f"without {client} nobody is left")
        server = _without(host, client, left, _state_of(host, client, state))
        target.create()
        try:
            source = host.run.folder.path
            copy_result(source, target, without=client)
            event = {"client": client, "event": "forgotten", "reason": "removed from the result"}
            accuracy = write_result(host, host, target, server, left, event)
            before, after = hashes(source, target.path)
            result = ForgetResult(client, host.context.sizes[client], before, after, left, accuracy)
            add_record(source, target, FORGOTTEN, result.as_dict())
        finally:
            target.release()
    return result


def _state_of(host: OpenRun, client: str, given: str | Path | None) -> ClientState:
    """What the site remembers to have sent."""
    if given is not None:
        like = host.templates.clients[host.context.architecture_of(client)]
        try:
            return decode_file(Path(given), like, f"{client}'s state")
        except (OSError, BadMessage) as problem:
            raise UserError(f"{given} is not the state of a site of this run ({problem})") from None
    state = host.trained_state_of(client)
    if state is None:
        raise UserError(
            f"{host.run.path} does not know what {client} sent: sites of a deployment keep that to themselves, "
            f"and a secure sum hides it; give the site's own clients/{client}.safetensors with --state, or run "
            "again without the site"
        )
    return state


def _without(host: OpenRun, client: str, left: tuple[str, ...], state: ClientState) -> Record:
    at = replace(host.context.at(host.last_round, client), participants=left)
    try:
        return host.method.forget(host.server_state(), state.memory, at)
    except UserError as reason:
        name = host.run.options["method"]
        raise UserError(f"{name} cannot forget {client}: {reason}; otherwise train again without it") from None
