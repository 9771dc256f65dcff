"""A newcomer to a run whose result is a sum over sites: what it would have sent is added, and nothing is trained."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from protofed.clients import ClientSide, Trained, prepare
from protofed.clients import Train as TrainJob
from protofed.data.partition import Partition
from protofed.errors import UserError
from protofed.federation import RunFolder
from protofed.inference.changed import (
    JOINED,
    add_record,
    copy_result,
    hashes,
    now,
    refuse_what_is_no_sum,
    write_result,
)
from protofed.models.net import Net
from protofed.records import encode
from protofed.runs.assembly import Assembly
from protofed.runs.description import describe_run
from protofed.runs.opened import OpenRun


@dataclass(frozen=True)
class AdditionResult:
    """What was added to a run."""

    client: str
    images: int
    up: int
    """Bytes that the newcomer sends, once."""
    before: str
    after: str
    """SHA-256 of the model."""
    sites: tuple[str, ...]
    """Those whose parts are in the result now."""

    def as_dict(self) -> dict[str, Any]:
        """As joined.json has it."""
        return {
            "client": self.client,
            "date": now(),
            "images": self.images,
            "added": ["its share of the sums", "its stored state"],
            "bytes": {"up": self.up},
            "sites": list(self.sites),
            "model_sha256": {"before": self.before, "after": self.after},
        }


def add_site(host: OpenRun, newcomer: Assembly, folder: Path) -> AdditionResult:
    """Write the result of `host` with one more site to `folder`, as if it had taken part from the start."""
    (client,) = newcomer.context.partition.clients
    refuse_what_is_no_sum(host.context)
    if client in host.run.folder.committed_clients():
        raise UserError(f"{client} is already in the result; let a site with another name join, or forget it first")
    target = RunFolder(folder)
    target.refuse_if_taken()
    target.create()
    try:
        source = host.run.folder.path
        copy_result(source, target, without=client)
        _enrol(host, newcomer, target)
        up = _state(host, newcomer, target)
        # Opened once more, with the newcomer among its clients; there is no summary yet that it could not read.
        joined = OpenRun(folder)
        sites = tuple(site for site in joined.clients if site in {*host.run.folder.committed_clients(), client})
        at = replace(joined.context.at(joined.context.plan.rounds - 1, client), participants=sites)
        memory = joined.state_of(client).memory
        try:
            server = host.method.include(host.server_state(), memory, at)
        except UserError as reason:
            raise UserError(f"{client} cannot be added to a run of {host.run.options['method']}: {reason}") from None
        event = {"client": client, "event": "joined", "reason": "added to the result"}
        write_result(host, joined, target, server, sites, event)
        before, after = hashes(source, target.path)
        result = AdditionResult(client, joined.context.sizes[client], up, before, after, sites)
        add_record(source, target, JOINED, result.as_dict())
    except BaseException:
        shutil.rmtree(folder)
        raise
    finally:
        target.release()
    return result


def _enrol(host: OpenRun, newcomer: Assembly, target: RunFolder) -> None:
    """Write the newcomer into run.json and partition.npz, its images behind those of the others."""
    config, partition = dict(host.config), Partition.load(host.run.path / "partition.npz")
    own, other = describe_run(newcomer), newcomer.context.partition
    (client,) = other.clients
    entry = own["partition"]["clients"][client]
    if client in partition.clients:
        if config["partition"]["clients"][client] != entry:
            raise UserError(f"a site called {client} took part with other images; give the newcomer another name")
        return
    domain = entry["domain"]
    domains = config["data"]["domains"]
    if domain in domains:
        raise UserError(f"the run already has a domain {domain}; give the newcomer's images another name")
    start = sum(each["train"] for each in domains.values())
    enlarged = replace(
        partition,
        clients=(*partition.clients, client),
        train={**partition.train, client: np.asarray(other.train[client]) + start},
        holdout={**partition.holdout, client: np.asarray(other.holdout[client]) + start},
        domain={**partition.domain, client: domain},
    )
    clients = {**config["partition"]["clients"], client: entry}
    config["data"] = {**config["data"], "domains": {**domains, domain: own["data"]["domains"][domain]}}
    config["partition"] = {**config["partition"], "hash": enlarged.hash, "clients": clients}
    target.write_json("run.json", config)
    enlarged.save(target.path / "partition.npz")


def _state(host: OpenRun, newcomer: Assembly, target: RunFolder) -> int:
    """The newcomer makes its upload, and remembers what it sent; its size in bytes."""
    context = newcomer.context
    (client,) = context.partition.clients
    weights = host.method.global_weights(host.server_state())
    assert weights is not None, "what is computed at the server is a global model"
    net = Net(context.model)
    net.load(weights)
    dataset = replace(context.dataset, normalise=host.context.dataset.normalise)
    # Where domains balance, what it sends depends on which there are.
    partition = replace(context.partition, domain={**host.domains, **context.partition.domain})
    prepared = prepare(replace(context, dataset=dataset, partition=partition, clients_folder=target.clients))
    first = encode(prepared.templates.down, "server")
    sent = ClientSide(prepared).perform(TrainJob(0, client), first)
    if not isinstance(sent, Trained):
        raise UserError(f"the newcomer has nothing to add: {sent}")
    target.store.commit([client], 0)
    return sent.size.total
