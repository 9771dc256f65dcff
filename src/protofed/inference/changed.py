"""The result of a complete run whose server state was changed afterwards: a site was taken out, or one was added."""

import json
import shutil
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors.torch import save

from protofed.clients import RunContext
from protofed.engines.loop import LoopEngine
from protofed.errors import UserError
from protofed.federation import Federation, RoundPolicy, RunFolder
from protofed.method import Method
from protofed.records import Record, encode
from protofed.runs.metrics import run_metrics
from protofed.runs.opened import OpenRun, Run

FORGOTTEN, JOINED = "forgotten.json", "joined.json"
"""What was taken out of a run or added to it, when, and what could not be."""

_COPIED = ("run.json", "partition.npz", "summary.json", "backbone.safetensors", FORGOTTEN, JOINED)
_MODEL = "model.safetensors"


def opened_with_images(run: str | Path) -> OpenRun:
    """With its images where they can be found, so that a new model can be scored.

    Those of a site that was added afterwards were never among them.
    """
    if (Path(run) / JOINED).exists():
        return OpenRun(run)
    try:
        host = OpenRun(run, with_data=True)
        host.context  # noqa: B018 (reads the images)
    except UserError:
        return OpenRun(run)
    return host


def refuse_what_is_no_sum(context: RunContext) -> None:
    """Raise where the run's uploads were not simply added up as sites remember them."""
    if context.robust is not None:
        raise UserError("robust aggregation is not a sum, so no client's share can be separated")
    if context.max_share is not None:
        raise UserError(
            "max_share caps weights by those of all clients, so no client's share can be separated from the sum"
        )
    if context.guard.noisy or context.guard.quantise:
        raise UserError("what was sent is not what the site remembers: the guard rounded it or added noise")


def copy_result(source: Path, target: RunFolder, without: str) -> None:
    """What a run says about itself, and the states of its sites but one."""
    for name in _COPIED:
        if (source / name).exists():
            shutil.copyfile(source / name, target.path / name)
    for state in RunFolder(source).clients.glob("*.safetensors"):
        if state.name.split(".safetensors")[0].removesuffix(".projection") != without:
            shutil.copyfile(state, target.clients / state.name)


def write_result(
    host: OpenRun, like: OpenRun, target: RunFolder, server: Record, sites: Sequence[str], event: Mapping[str, str]
) -> Any:
    """Model, prototypes, round and summary of the new server state; its accuracy, None without images.

    `like` is the federation of the new result, `host` the run it was made from.
    """
    prepared = like.prepared.with_context(clients_folder=target.clients)
    engine = LoopEngine(prepared)
    federation = Federation(prepared, engine, target, RoundPolicy())
    accuracy = federation.adopt(server, host.done, scored=like.with_data)
    engine.close()
    federation.write_results(target.path)
    (*earlier, last) = host.run.rounds
    assert not earlier, "what is a sum was exchanged once"
    line = {**last, "participants": list(sites), "accuracy": accuracy, "events": [*last["events"], dict(event)]}
    target.commit_round(host.last_round, line, encode(server, "server"), list(sites))
    write_summary(target, host.run.summary, accuracy)
    return accuracy


def write_summary(target: RunFolder, before: Mapping[str, Any], accuracy: Any) -> None:
    """The summary of a result that was changed, from the one before."""
    summary = {name: value for name, value in before.items() if name != "metrics"}
    metrics = run_metrics(Run(target.path))
    again = {"accuracy": accuracy, "accuracy_final": accuracy, **({} if metrics is None else {"metrics": metrics})}
    target.write_json("summary.json", {**summary, **again})


def model_hash(method: Method, server: Record) -> str:
    """SHA-256 of the model that a server state is written as."""
    weights = method.global_weights(server)
    assert weights is not None, "what is computed at the server is a global model"
    return sha256(save(weights.tensors())).hexdigest()


def hashes(before: Path, after: Path) -> tuple[str, str]:
    """SHA-256 of the models of two run folders."""
    one, other = (sha256((place / _MODEL).read_bytes()).hexdigest() for place in (before, after))
    return one, other


def now() -> str:
    """For a record."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def add_record(source: Path, target: RunFolder, name: str, record: Mapping[str, Any]) -> None:
    """Append to the file of what was taken out of a run, or added to it."""
    key = name.removesuffix(".json")
    known = json.loads((source / name).read_text())[key] if (source / name).exists() else []
    target.write_json(name, {"run": str(source), key: [*known, dict(record)]})
