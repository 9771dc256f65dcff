"""An exchange before the first round: clients send their class means, and the head starts from them."""

from pathlib import Path
from typing import NamedTuple

import torch

from protofed.clients import Failed, Job, Prepared, Summarise, Trained
from protofed.clients.class_means import HeadStatistics, empty_means, head_from_means, with_head
from protofed.clients.prepared import initial_server
from protofed.errors import BadMessage
from protofed.federation.engine import Engine, in_order
from protofed.records import Bytes, Mean, Message, Nothing, Record, Tally, decode, encode


class HeadStart(NamedTuple):
    """The server's state with a head of class means, and the bytes that were exchanged for it."""

    server: Record
    up: Bytes
    down: Bytes


def start_from_class_means(prepared: Prepared, engine: Engine, folder: Path) -> HeadStart:
    """Ask every client for its class means; whoever fails has no say, and all must not."""
    context, request = prepared.context, encode(Nothing(), "server")
    jobs: list[tuple[Job, Message]] = [(Summarise(0, client), request) for client in context.partition.clients]
    empty = empty_means(context.model)
    template = HeadStatistics(Mean(empty, torch.zeros(len(empty.count), dtype=torch.float64)))
    tally, up, down = Tally(), Bytes(), Bytes()
    reasons = []
    for job, result in in_order(engine.perform(jobs), [job for job, _ in jobs], folder):
        assert isinstance(job, Summarise)
        down += request.size
        if isinstance(result, Trained):
            up += result.size
            try:
                tally.add(job.client, decode(result.blob, template, job.client))
            except BadMessage as problem:
                reasons.append(str(problem))
        else:
            assert isinstance(result, Failed)
            reasons.append(f"{job.client}: {result.reason}\n{result.trace}")
    if not tally.clients:
        raise RuntimeError(f"no client could send its class means; {reasons[0]}")
    total = tally.total()
    assert isinstance(total, HeadStatistics)
    head = head_from_means(context.model, total.means)
    return HeadStart(initial_server(context, with_head(context.model, head)), up, down)
