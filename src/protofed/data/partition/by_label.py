"""Label protocols: all domains are pooled, and their images dealt out by label."""

import numpy as np

from protofed.data.images import Dataset
from protofed.data.partition.partition import IntArray, Partition, stratified_split
from protofed.data.partition.request import PartitionRequest, fraction_of, parse_number, parse_whole
from protofed.errors import UserError
from protofed.seeding import numpy_generator

_REDRAWS = 1000
# The papers ask for at least 500 of 70,000 images with 10 clients; smaller sets scale it down, and with many clients
# a tenth of the even share is asked for at most.
_SMALLEST_PART = 500 / 70_000
_SMALLEST_SHARE = 0.1


def by_label(dataset: Dataset, request: PartitionRequest, holdout: float, min_size: int | None) -> Partition:
    """Clients that hold images of all domains, dealt out by label; `holdout` of each client's are kept for its test."""
    labels = dataset.pooled_labels().numpy()
    number = _number_of_clients(request)
    rng = numpy_generator(request.seed, "partition", request.kind)
    pool, warnings = _pool(labels, number, request, rng)
    if number > len(pool):
        raise UserError(
            f"{len(pool)} training images are not enough for {number} clients; at most {len(pool)} are possible"
        )
    if request.kind == "dirichlet":
        alpha = parse_number(request.value, f"protocol {request.text}", "alpha")
        if alpha <= 0:
            raise UserError(f"protocol {request.text}: alpha must be above 0, for example dirichlet=0.3,clients=10")
        least = _smallest_share(request, min_size, len(pool), number)
        shares = _dirichlet(labels[pool], number, alpha, least, rng)
    elif request.kind == "iid":
        shares = [np.asarray(part) for part in np.array_split(rng.permutation(len(pool)), number)]
    else:
        per_client = parse_whole(request.value, f"protocol {request.text}", "shards per client")
        shares = _shards(labels[pool], number, per_client, rng)

    train: dict[str, IntArray] = {}
    kept: dict[str, IntArray] = {}
    for position, share in enumerate(shares):
        client = f"client-{position}"
        own = np.sort(pool[share])
        training, testing = stratified_split(labels[own], holdout, numpy_generator(request.seed, "holdout", client))
        train[client], kept[client] = own[training], own[testing]
        if holdout and not len(testing):
            warnings.append(f"client {client} has only one image, so none is held out for its personal test")
    return Partition(request.text, tuple(train), train, kept, dict.fromkeys(train, ""), (), tuple(warnings))


def _number_of_clients(request: PartitionRequest) -> int:
    clients = request.clients
    inside = request.value if request.kind == "iid" else request.settings.get("clients")
    if inside is not None and clients is not None and str(clients).strip() != inside:
        raise UserError(f"protocol {request.text} and --clients {clients} disagree; give the number of clients once")
    amount = inside if inside is not None else clients
    if amount is None:
        raise UserError(f"protocol {request.text} needs a number of clients, for example {request.text},clients=10")
    return parse_whole(amount, f"protocol {request.text}", "clients")


def _pool(
    labels: IntArray, clients: int, request: PartitionRequest, rng: np.random.Generator
) -> tuple[IntArray, list[str]]:
    """The images to deal out, all of them unless a client's average share is given; and warnings."""
    total = len(labels)
    everything = np.arange(total)
    amount = request.samples_per_client if request.fraction is None else request.fraction
    if amount is None:
        return everything, []
    if "=" in str(amount):
        raise UserError(f"{amount!r} names domains, but this protocol pools them; give one number")
    share = (
        fraction_of(amount, total, "the pooled training set")
        if request.fraction is not None
        else parse_whole(amount, "samples per client", "a client's images")
    )
    wanted = share * clients
    if wanted >= total:
        short = f"{clients} clients with {share} images each would need {wanted}; all {total} are distributed"
        return everything, [short] if wanted > total else []
    return stratified_split(labels, wanted / total, rng)[1], []


def _smallest_share(request: PartitionRequest, min_size: int | None, total: int, clients: int) -> int:
    inside = request.settings.get("min")
    if inside is not None:
        least = parse_whole(inside, f"protocol {request.text}", "min")
    elif min_size is not None:
        least = parse_whole(min_size, "the minimum size", "min")
    else:
        scaled = int(total * min(_SMALLEST_PART, _SMALLEST_SHARE / clients))
        least = min(max(2, scaled), total // clients)
    if least * clients > total:
        raise UserError(f"{clients} clients with at least {least} images each need {least * clients}, not {total}")
    return least


def _dirichlet(labels: IntArray, clients: int, alpha: float, least: int, rng: np.random.Generator) -> list[IntArray]:
    """Self-balancing Dirichlet: class by class, clients that already have their even part get no more.

    Everything is drawn again while a client has fewer than `least` images.
    """
    total = len(labels)
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    for _ in range(_REDRAWS):
        held = np.zeros(clients, dtype=np.int64)
        bounds: list[IntArray] = []
        for indices, drawn in zip(members, rng.dirichlet(np.full(clients, alpha), size=len(members)), strict=True):
            open_to = np.where(held < total / clients, drawn, 0.0)
            # A tiny alpha can put all of the draw on clients that are full already.
            if not open_to.sum() > 0:
                break
            ends = np.rint(np.cumsum(open_to / open_to.sum()) * len(indices)).astype(np.int64)
            held += np.diff(ends, prepend=0)
            bounds.append(ends[:-1])
        if len(bounds) == len(members) and held.min() >= least:
            pieces = [np.split(rng.permutation(part), ends) for part, ends in zip(members, bounds, strict=True)]
            return [np.concatenate(share) for share in zip(*pieces, strict=True)]
    raise UserError(
        f"no Dirichlet draw in {_REDRAWS} gave all {clients} clients at least {least} images; "
        f"use a larger alpha than {alpha:g}, fewer clients, or a smaller min"
    )


def _shards(labels: IntArray, clients: int, per_client: int, rng: np.random.Generator) -> list[IntArray]:
    """Images sorted by label, cut into equal runs, each client getting `per_client` runs at random."""
    number = clients * per_client
    if number > len(labels):
        raise UserError(
            f"{len(labels)} training images cannot be divided into {number} shards; use fewer shards or clients"
        )
    shuffled = rng.permutation(len(labels))
    runs = np.array_split(shuffled[np.argsort(labels[shuffled], kind="stable")], number)
    dealt = rng.permutation(number).reshape(clients, per_client)
    return [np.concatenate([runs[run] for run in own]) for own in dealt]
