"""Domain protocols: every client gets images of one domain."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from protofed.data.images import Dataset
from protofed.data.partition.partition import IntArray, Partition
from protofed.data.partition.request import PartitionRequest, fraction_of, parse_whole
from protofed.errors import UserError, unknown_name
from protofed.seeding import numpy_generator


def by_domain(dataset: Dataset, request: PartitionRequest, ensure_all_classes: bool) -> Partition:
    """Clients that hold images of one domain each."""
    numbers = _clients_per_domain(dataset, request)
    served = [name for name, number in numbers.items() if number]
    if not served:
        raise UserError(
            "no domain has a client; give at least one, for example --clients " + f"{next(iter(numbers))}=1"
        )
    share_of = _shares(dataset, served, request)
    labels = dataset.pooled_labels().numpy()
    train: dict[str, IntArray] = {}
    domain_of: dict[str, str] = {}
    warnings: list[str] = []
    for name in served:
        ids = [f"{name}-{number}" for number in range(numbers[name])]
        rng = numpy_generator(request.seed, "partition", name)
        order = np.array(dataset.offsets[name], dtype=np.int64)
        rng.shuffle(order)
        wanted_sizes, sizes = _sizes(name, len(order), len(ids), share_of[name], len(dataset.classes))
        dealt = _deal(order, sizes, labels, rng, ensure_all_classes)
        for client, wanted, (indices, lacking) in zip(ids, wanted_sizes, dealt, strict=True):
            absent = [dataset.classes[label] for label in lacking]
            warnings.extend(_shortfalls(client, name, wanted, len(indices), absent))
            train[client] = indices
            domain_of[client] = name
    held_out = tuple(name for name in dataset.domains if name not in served)
    unserved = [name for name in held_out if name != request.value]
    if unserved:
        warnings.append(f"no client holds {', '.join(unserved)}; tested as held out")
    empty = {client: np.empty(0, dtype=np.int64) for client in train}
    return Partition(request.text, tuple(train), train, empty, domain_of, held_out, tuple(warnings))


def _deal(
    order: IntArray, sizes: Sequence[int], labels: IntArray, rng: np.random.Generator, ensure_all_classes: bool
) -> Iterator[tuple[IntArray, list[int]]]:
    """The images of each client of a domain, and the classes of the domain that it still lacks."""
    remainder = order
    present = np.unique(labels[order])
    for size in sizes:
        indices, remainder = remainder[:size], remainder[size:]
        lacking: list[int] = []
        if ensure_all_classes:
            indices, remainder, lacking = _complete_classes(indices, remainder, labels, present, rng)
        yield np.sort(indices), lacking


def _shortfalls(client: str, domain: str, wanted: int, size: int, absent: Sequence[str]) -> Iterator[str]:
    """Warnings where a client gets less than it should."""
    if size < wanted:
        yield f"client {client} gets {size} images instead of {wanted}: domain {domain} has no more"
    if absent:
        yield f"client {client} lacks class {', '.join(absent)}: domain {domain} has none left to swap in"


def _clients_per_domain(dataset: Dataset, request: PartitionRequest) -> dict[str, int]:
    """How many clients each domain has, in the order of the domains."""
    clients = request.clients
    names = list(dataset.domains)
    left_out = {request.value} if request.kind == "leave-out" else set()
    for name in left_out:
        if name not in names:
            raise unknown_name("domain", name, names)
        if len(names) == 1:
            raise UserError(f"leave-out={name} leaves no domain to train on; the data has no other domain")
    if request.kind in ("equal", "one-per-domain"):
        if clients is not None:
            raise UserError(
                f"protocol {request.text} sets the clients itself; omit --clients or use --protocol domains"
            )
        return dict.fromkeys(names, parse_whole(request.value or "1", f"protocol {request.text}", "clients per domain"))
    if clients is None:
        return {name: int(name not in left_out) for name in names}
    if isinstance(clients, int) or "=" not in clients:
        raise UserError(f"clients {clients} names no domain; write {names[0]}=N,... or use --protocol equal=N or iid=N")
    given = _per_domain(clients, names, "clients")
    for name in left_out & set(given):
        raise UserError(f"domain {name} is left out, so it cannot have clients; drop it from --clients")
    return {
        name: parse_whole(given[name], "clients", f"{name} needs a number of clients", least=0) if name in given else 0
        for name in names
    }


def _shares(dataset: Dataset, served: Sequence[str], request: PartitionRequest) -> dict[str, int | None]:
    """How many images a client of each domain should get; None where the domain is divided evenly."""
    sizes = {name: len(dataset.domains[name].train) for name in served}
    if request.fraction is not None:
        fractions = _spread(request.fraction, dataset, served, "fraction")
        return {name: fraction_of(fractions[name], sizes[name], f"domain {name}") for name in served}
    if request.samples_per_client is not None:
        numbers = _spread(request.samples_per_client, dataset, served, "samples per client")
        return {name: parse_whole(numbers[name], "samples per client", "a client's images") for name in served}
    return dict.fromkeys(served)


def _spread(given: str | float, dataset: Dataset, served: Sequence[str], what: str) -> dict[str, str]:
    """One value for all domains, or `a=..,b=..` with a value for every domain that has clients."""
    text = str(given)
    if "=" not in text:
        return dict.fromkeys(served, text)
    values = _per_domain(text, list(dataset.domains), what)
    missing = [name for name in served if name not in values]
    if missing:
        raise UserError(f"{what} {text!r} does not mention {', '.join(missing)}; add {missing[0]}=...")
    return values


def _per_domain(text: str, names: Sequence[str], what: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise UserError(f"{what}: {part.strip()!r} is not DOMAIN=VALUE; for example {names[0]}=1")
        if name not in names:
            raise unknown_name("domain", name, names)
        if name in values:
            raise UserError(f"{what} {text!r} names {name} more than once; name every domain once")
        values[name] = value
    return values


def _sizes(name: str, available: int, clients: int, share: int | None, classes: int) -> tuple[list[int], list[int]]:
    """Wanted and possible number of images for each client of a domain, in turn.

    Without a wish the domain is divided evenly, but not into crumbs of fewer images than there are classes.
    """
    fitting = max(1, available // classes) if share is None else math.ceil(available / share)
    if clients > fitting:
        each = f"at least {classes} images (as many as classes)" if share is None else f"{share} images"
        raise UserError(
            f"domain {name} has {available} training images; with {each} each, {fitting} clients fit, not {clients}"
        )
    if share is None:
        even = [available // clients + (number < available % clients) for number in range(clients)]
        return even, even
    return [share] * clients, [min(share, available - number * share) for number in range(clients)]


def _complete_classes(
    indices: IntArray, remainder: IntArray, labels: IntArray, present: IntArray, rng: np.random.Generator
) -> tuple[IntArray, IntArray, list[int]]:
    """Swap in one image of every class a client lacks, for one of a class it has at least two of.

    The exchange is with what no client has yet, so an image is never with two clients. Also returns the classes that
    could not be had.
    """
    missing = np.setdiff1d(present, labels[indices])
    if not len(missing):
        return indices, remainder, []
    indices, remainder = indices.copy(), remainder.copy()
    lacking: list[int] = []
    for label in missing:
        held = np.bincount(labels[indices], minlength=int(labels.max()) + 1)
        wanted = np.flatnonzero(labels[remainder] == label)
        spare = np.flatnonzero(held[labels[indices]] >= 2)
        if len(wanted) and len(spare):
            incoming, outgoing = rng.choice(wanted), rng.choice(spare)
            indices[outgoing], remainder[incoming] = remainder[incoming], indices[outgoing]
        else:
            lacking.append(int(label))
    return indices, remainder, lacking
