"""How the training images are dealt out to clients: by domain or by label, and the partition that comes of it."""

from dataclasses import replace

from protofed.data.images import Dataset
from protofed.data.partition.by_domain import by_domain
from protofed.data.partition.by_label import by_label
from protofed.data.partition.partition import Partition, stratified_split
from protofed.data.partition.request import parse_protocol
from protofed.errors import UserError

__all__ = ["Partition", "deals_by_label", "make_partition", "stratified_split"]


def make_partition(
    dataset: Dataset,
    protocol: str | None = None,
    *,
    clients: str | int | None = None,
    fraction: str | float | None = None,
    samples_per_client: str | int | None = None,
    seed: int = 0,
    ensure_all_classes: bool = False,
    holdout: float = 0.2,
    min_size: int | None = None,
) -> Partition:
    """Distribute the training images by a protocol such as `domains`, `leave-out=photo` or
    `dirichlet=0.3,clients=10`.

    Domain protocols give every client images of one domain: `fraction` of it or `samples_per_client`, or an even part.
    Label protocols pool all domains and keep `holdout` of each client's share for its personal test; there `fraction`
    and `samples_per_client` are what a client gets on average.
    """
    if not 0 <= holdout < 1:
        raise UserError(f"holdout must be at least 0 and below 1, not {holdout:g}")
    if fraction is not None and samples_per_client is not None:
        raise UserError("give either fraction or samples per client, not both")
    written = parse_protocol(protocol or ("one-per-domain" if clients is None else "domains"))
    request = replace(written, clients=clients, fraction=fraction, samples_per_client=samples_per_client, seed=seed)
    if not request.by_label:
        return by_domain(dataset, request, ensure_all_classes)
    if ensure_all_classes:
        raise UserError(f"ensure_all_classes needs a domain protocol; protocol {request.text} splits by label")
    return by_label(dataset, request, holdout, min_size)


def deals_by_label(protocol: str | None) -> bool:
    """Whether a protocol pools all domains and distributes their images by label."""
    return protocol is not None and parse_protocol(protocol).by_label
