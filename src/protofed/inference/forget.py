"""The result of a run without one of its sites, where what the site sent can be taken out again."""

import json
import shutil
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from protofed.engines.loop import LoopEngine
from protofed.errors import UserError, unknown_name
from protofed.federation import Federation, RoundPolicy, RunFolder
from protofed.records import Record
from protofed.runs.opened import OpenRun
from protofed.system import one_thread

FORGOTTEN = "forgotten.json"
"""What was taken out of a run, when, and what could not be."""

_COPIED = ("run.json", "partition.npz", "summary.json", "backbone.safetensors")
_MODEL = "model.safetensors"
_LASTING = (
    "models and broadcasts that were sent before, wherever they are now",
    "what the run says about itself: who took part with how many images of each class (run.json, partition.npz)",
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
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "images": self.images,
            "removed": ["its part of the sums", "its stored state", "its kept messages"],
            "cannot_be_removed": list(_LASTING),
            "left": list(self.left),
            "model_sha256": {"before": self.before, "after": self.after},
        }


def forget(run: str | Path, client: str, *, out: str | Path) -> ForgetResult:
    """Write the result of a complete run without `client` to `out`, as if it had never taken part.

    A method whose server state is no sum over clients cannot; it is refused with what would be needed.
    """
    target = RunFolder(Path(out))
    target.refuse_if_taken()
    with one_thread():
        host = _opened(run)
        _refuse_what_is_no_sum(host, client)
        left = tuple(site for site in host.run.folder.committed_clients() if site != client)
        if not left:
            raise UserError(f"nobody is left without {client}")
        server = _without(host, client, left)
        target.create()
        try:
            result = _write(host, target, client, server, left)
        finally:
            target.release()
    return result


def _opened(run: str | Path) -> OpenRun:
    """With its images where they can be found, so that the new model can be scored."""
    try:
        host = OpenRun(run, with_data=True)
        host.context  # noqa: B018 (reads the images)
    except UserError:
        return OpenRun(run)
    return host


def _refuse_what_is_no_sum(host: OpenRun, client: str) -> None:
    if client not in host.clients:
        raise unknown_name("client", client, host.clients)
    if client not in host.run.folder.committed_clients():
        raise UserError(f"{client} has sent nothing that is in the result of {host.run.path}")
    context = host.context
    if context.robust is not None:
        raise UserError(f"robust={host.run.options['robust']} is no sum, so nobody's part can be taken out of it")
    if context.max_share is not None:
        raise UserError("max_share cuts weights by those of all, so nobody's part can be taken out of the sum")
    if context.guard.noisy or context.guard.quantise:
        raise UserError("what was sent is not what the site remembers: the guard rounded it or added noise to it")


def _without(host: OpenRun, client: str, left: tuple[str, ...]) -> Record:
    state = host.state_of(client)
    at = replace(host.context.at(host.last_round, client), participants=left)
    try:
        return host.method.forget(host.server_state(), state.memory, at)
    except UserError as reason:
        name = host.run.options["method"]
        raise UserError(f"{name} cannot forget {client}: {reason}; else train again without it") from None


def _write(host: OpenRun, target: RunFolder, client: str, server: Record, left: tuple[str, ...]) -> ForgetResult:
    source = host.run.folder.path
    for name in _COPIED:
        if (source / name).exists():
            shutil.copyfile(source / name, target.path / name)
    for state in host.run.folder.clients.glob("*.safetensors"):
        if state.name.split(".safetensors")[0].removesuffix(".projection") != client:
            shutil.copyfile(state, target.clients / state.name)
    prepared = host.prepared.with_context(clients_folder=target.clients)
    engine = LoopEngine(prepared)
    federation = Federation(prepared, engine, target, RoundPolicy())
    has_images = host.with_data
    accuracy = federation.adopt(server, host.done, scored=has_images)
    engine.close()
    federation.write_results(target.path)
    (*earlier, last) = host.run.rounds
    event = {"client": client, "event": "forgotten", "reason": "taken out of the result"}
    line = {**last, "participants": list(left), "accuracy": accuracy, "events": [*last["events"], event]}
    assert not earlier, "what is a sum was exchanged once"
    target.commit_round(host.last_round, line, server, list(left))
    target.write_json("summary.json", {**host.run.summary, "accuracy": accuracy, "accuracy_final": accuracy})
    before, after = (sha256((place / _MODEL).read_bytes()).hexdigest() for place in (source, target.path))
    result = ForgetResult(client, host.context.sizes[client], before, after, left, accuracy)
    known = json.loads((source / FORGOTTEN).read_text())["forgotten"] if (source / FORGOTTEN).exists() else []
    target.write_json(FORGOTTEN, {"run": str(source), "forgotten": [*known, result.as_dict()]})
    return result
