"""Protocols: how the training images are dealt out to clients, by domain or by label."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from protofed.data.images import Dataset
from protofed.data.partition import Partition
from protofed.data.splits import IntArray, stratified_split
from protofed.errors import UserError, unknown_name
from protofed.seeding import numpy_generator

_REDRAWS = 1000
# The papers ask for at least 500 of 70,000 images with 10 clients; smaller sets scale it down, and where there are
# many clients a tenth of the even share is asked for at most.
_SMALLEST_PART = 500 / 70_000
_SMALLEST_SHARE = 0.1
_PROTOCOLS = ("domains", "equal", "one-per-domain", "leave-out", "dirichlet", "iid", "shards")
_BY_LABEL = ("dirichlet", "iid", "shards")
_FORMS = "domains, equal=N, one-per-domain, leave-out=DOMAIN, dirichlet=ALPHA,clients=N, iid=N, shards=K,clients=N"


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
    """Deal out the training images by a protocol such as `domains`, `leave-out=photo` or `dirichlet=0.3,clients=10`.

    Domain protocols give every client images of one domain: `fraction` of it or `samples_per_client`, or an even part.
    Label protocols pool all domains and keep `holdout` of each client's share for its personal test; there `fraction`
    and `samples_per_client` are what a client gets on average.
    """
    if not 0 <= holdout < 1:
        raise UserError(f"holdout must be at least 0 and below 1, not {holdout:g}")
    if fraction is not None and samples_per_client is not None:
        raise UserError("give either fraction or samples per client, not both")
    form = _parse_protocol(protocol or ("one-per-domain" if clients is None else "domains"))
    if form.kind in _BY_LABEL:
        if ensure_all_classes:
            raise UserError(f"ensure_all_classes needs a domain protocol; protocol {form.text} deals out by label")
        return _by_label(dataset, form, clients, fraction, samples_per_client, seed, holdout, min_size)
    return _by_domain(dataset, form, clients, fraction, samples_per_client, seed, ensure_all_classes)


def deals_by_label(protocol: str | None) -> bool:
    """Whether a protocol pools all domains and deals their images out by label."""
    return protocol is not None and _parse_protocol(protocol).kind in _BY_LABEL


@dataclass(frozen=True)
class _Form:
    """A protocol as written: its kind, the value after the first `=`, and further settings."""

    text: str
    kind: str
    value: str
    settings: dict[str, str]


def _parse_protocol(text: str) -> _Form:
    first, *others = (part.strip() for part in text.split(","))
    kind, _, value = (piece.strip() for piece in first.partition("="))
    if kind not in _PROTOCOLS:
        raise UserError(f"{unknown_name('protocol', kind, _PROTOCOLS)}; protocols are {_FORMS}")
    takes_value = kind not in ("domains", "one-per-domain")
    if takes_value != bool(value):
        raise UserError(f"protocol {text!r} {'needs a' if takes_value else 'takes no'} value; protocols are {_FORMS}")
    allowed = {"dirichlet": ("clients", "min"), "shards": ("clients",), "iid": ()}.get(kind, ())
    settings: dict[str, str] = {}
    for part in others:
        key, _, setting = (piece.strip() for piece in part.partition("="))
        if key not in allowed or not setting:
            raise UserError(f"protocol {text!r}: {part!r} is not understood; protocols are {_FORMS}")
        settings[key] = setting
    return _Form(text, kind, value, settings)


# --- domain protocols ------------------------------------------------------------------------------------------------


def _by_domain(
    dataset: Dataset,
    form: _Form,
    clients: str | int | None,
    fraction: str | float | None,
    samples_per_client: str | int | None,
    seed: int,
    ensure_all_classes: bool,
) -> Partition:
    numbers = _clients_per_domain(dataset, form, clients)
    served = [name for name, number in numbers.items() if number]
    if not served:
        raise UserError(
            "no domain has a client; give at least one, for example --clients " + f"{next(iter(numbers))}=1"
        )
    share_of = _shares(dataset, served, fraction, samples_per_client)
    labels = dataset.pooled_labels().numpy()
    train: dict[str, IntArray] = {}
    domain_of: dict[str, str] = {}
    warnings: list[str] = []
    for name in served:
        ids = [f"{name}-{number}" for number in range(numbers[name])]
        rng = numpy_generator(seed, "partition", name)
        order = np.array(dataset.offsets[name], dtype=np.int64)
        rng.shuffle(order)
        remainder = order
        present = np.unique(labels[order])
        sizes = _sizes(name, len(order), len(ids), share_of[name], len(dataset.classes))
        for client, wanted, size in zip(ids, *sizes, strict=True):
            taken, remainder = remainder[:size], remainder[size:]
            if size < wanted:
                warnings.append(f"client {client} gets {size} images instead of {wanted}: domain {name} has no more")
            if ensure_all_classes:
                taken, remainder, lacking = _complete_classes(taken, remainder, labels, present, rng)
                if lacking:
                    absent = ", ".join(dataset.classes[label] for label in lacking)
                    warnings.append(f"client {client} lacks class {absent}: domain {name} has none left to swap in")
            train[client] = np.sort(taken)
            domain_of[client] = name
    held_out = tuple(name for name in dataset.domains if name not in served)
    unserved = [name for name in held_out if name != form.value]
    if unserved:
        warnings.append(f"no client holds {', '.join(unserved)}; tested as held out")
    empty = {client: np.empty(0, dtype=np.int64) for client in train}
    return Partition(form.text, tuple(train), train, empty, domain_of, held_out, tuple(warnings))


def _clients_per_domain(dataset: Dataset, form: _Form, clients: str | int | None) -> dict[str, int]:
    """How many clients each domain has, in the order of the domains."""
    names = list(dataset.domains)
    left_out = {form.value} if form.kind == "leave-out" else set()
    for name in left_out:
        if name not in names:
            raise unknown_name("domain", name, names)
        if len(names) == 1:
            raise UserError(f"leave-out={name} leaves no domain to train on; the data has no other domain")
    if form.kind in ("equal", "one-per-domain"):
        if clients is not None:
            raise UserError(f"protocol {form.text} sets the clients itself; drop --clients or use --protocol domains")
        return dict.fromkeys(names, _whole(form.value or "1", f"protocol {form.text}", "clients per domain"))
    if clients is None:
        return {name: int(name not in left_out) for name in names}
    if isinstance(clients, int) or "=" not in clients:
        raise UserError(f"clients {clients} names no domain; write {names[0]}=N,... or use --protocol equal=N or iid=N")
    given = _per_domain(clients, names, "clients")
    for name in left_out & set(given):
        raise UserError(f"domain {name} is left out, so it cannot have clients; drop it from --clients")
    return {
        name: _whole(given[name], "clients", f"{name} needs a number of clients", least=0) if name in given else 0
        for name in names
    }


def _shares(
    dataset: Dataset, served: Sequence[str], fraction: str | float | None, samples_per_client: str | int | None
) -> dict[str, int | None]:
    """How many images a client of each domain should get; None where the domain is divided evenly."""
    sizes = {name: len(dataset.domains[name].train) for name in served}
    if fraction is not None:
        fractions = _spread(fraction, dataset, served, "fraction")
        return {name: _fraction_of(fractions[name], sizes[name], f"domain {name}") for name in served}
    if samples_per_client is not None:
        numbers = _spread(samples_per_client, dataset, served, "samples per client")
        return {name: _whole(numbers[name], "samples per client", "a client's images") for name in served}
    return dict.fromkeys(served)


def _spread(given: str | float, dataset: Dataset, served: Sequence[str], what: str) -> dict[str, str]:
    """One value for all domains, or `a=..,b=..` with a value for every domain that has clients."""
    text = str(given)
    if "=" not in text:
        return dict.fromkeys(served, text)
    values = _per_domain(text, list(dataset.domains), what)
    missing = [name for name in served if name not in values]
    if missing:
        raise UserError(f"{what} {text!r} says nothing about {', '.join(missing)}; add {missing[0]}=...")
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
    taken: IntArray, remainder: IntArray, labels: IntArray, present: IntArray, rng: np.random.Generator
) -> tuple[IntArray, IntArray, list[int]]:
    """Swap in one image of every class a client lacks, for one of a class it has at least two of.

    The exchange is with what no client has yet, so an image is never with two clients. Also returns the classes that
    could not be had.
    """
    missing = np.setdiff1d(present, labels[taken])
    if not len(missing):
        return taken, remainder, []
    taken, remainder = taken.copy(), remainder.copy()
    lacking: list[int] = []
    for label in missing:
        held = np.bincount(labels[taken], minlength=int(labels.max()) + 1)
        wanted = np.flatnonzero(labels[remainder] == label)
        spare = np.flatnonzero(held[labels[taken]] >= 2)
        if len(wanted) and len(spare):
            incoming, outgoing = rng.choice(wanted), rng.choice(spare)
            taken[outgoing], remainder[incoming] = remainder[incoming], taken[outgoing]
        else:
            lacking.append(int(label))
    return taken, remainder, lacking


# --- label protocols -------------------------------------------------------------------------------------------------


def _by_label(
    dataset: Dataset,
    form: _Form,
    clients: str | int | None,
    fraction: str | float | None,
    samples_per_client: str | int | None,
    seed: int,
    holdout: float,
    min_size: int | None,
) -> Partition:
    labels = dataset.pooled_labels().numpy()
    number = _number_of_clients(form, clients)
    rng = numpy_generator(seed, "partition", form.kind)
    pool, warnings = _pool(labels, number, fraction, samples_per_client, rng)
    if number > len(pool):
        raise UserError(f"{len(pool)} training images do not suffice for {number} clients; at most {len(pool)} fit")
    if form.kind == "dirichlet":
        alpha = _number(form.value, f"protocol {form.text}", "alpha")
        if alpha <= 0:
            raise UserError(f"protocol {form.text}: alpha must be above 0, for example dirichlet=0.3,clients=10")
        least = _smallest_share(form, min_size, len(pool), number)
        shares = _dirichlet(labels[pool], number, alpha, least, rng)
    elif form.kind == "iid":
        shares = [np.asarray(part) for part in np.array_split(rng.permutation(len(pool)), number)]
    else:
        shares = _shards(labels[pool], number, _whole(form.value, f"protocol {form.text}", "shards per client"), rng)

    train: dict[str, IntArray] = {}
    kept: dict[str, IntArray] = {}
    for position, share in enumerate(shares):
        client = f"client-{position}"
        mine = np.sort(pool[share])
        training, testing = stratified_split(labels[mine], holdout, numpy_generator(seed, "holdout", client))
        train[client], kept[client] = mine[training], mine[testing]
        if holdout and not len(testing):
            warnings.append(f"client {client} has one image only, so none is held out for its personal test")
    return Partition(form.text, tuple(train), train, kept, dict.fromkeys(train, ""), (), tuple(warnings))


def _number_of_clients(form: _Form, clients: str | int | None) -> int:
    inside = form.value if form.kind == "iid" else form.settings.get("clients")
    if inside is not None and clients is not None and str(clients).strip() != inside:
        raise UserError(f"protocol {form.text} and --clients {clients} disagree; give the number of clients once")
    given = inside if inside is not None else clients
    if given is None:
        raise UserError(f"protocol {form.text} needs a number of clients, for example {form.text},clients=10")
    return _whole(given, f"protocol {form.text}", "clients")


def _pool(
    labels: IntArray,
    clients: int,
    fraction: str | float | None,
    samples_per_client: str | int | None,
    rng: np.random.Generator,
) -> tuple[IntArray, list[str]]:
    """The images to deal out, all of them unless a client's average share is given; and warnings."""
    total = len(labels)
    everything = np.arange(total)
    given = fraction if fraction is not None else samples_per_client
    if given is None:
        return everything, []
    if "=" in str(given):
        raise UserError(f"{given!r} names domains, but this protocol pools them; give one number")
    share = (
        _fraction_of(given, total, "the pooled training set")
        if fraction is not None
        else _whole(given, "samples per client", "a client's images")
    )
    wanted = share * clients
    if wanted >= total:
        short = f"{clients} clients with {share} images each would need {wanted}; all {total} are dealt out"
        return everything, [short] if wanted > total else []
    return stratified_split(labels, wanted / total, rng)[1], []


def _smallest_share(form: _Form, min_size: int | None, total: int, clients: int) -> int:
    inside = form.settings.get("min")
    if inside is not None:
        least = _whole(inside, f"protocol {form.text}", "min")
    elif min_size is not None:
        least = _whole(min_size, "the minimum size", "min")
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
            f"{len(labels)} training images cannot be cut into {number} shards; use fewer shards or clients"
        )
    shuffled = rng.permutation(len(labels))
    runs = np.array_split(shuffled[np.argsort(labels[shuffled], kind="stable")], number)
    dealt = rng.permutation(number).reshape(clients, per_client)
    return [np.concatenate([runs[run] for run in mine]) for mine in dealt]


# --- numbers as users write them -------------------------------------------------------------------------------------


def _number(given: str | float, where: str, what: str) -> float:
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{where}: {what}: {given!r} is not a number")
    return value


def _whole(given: str | float, where: str, what: str, least: int = 1) -> int:
    value = _number(given, where, what)
    if value != int(value) or value < least:
        raise UserError(f"{where}: {what}: {given!r} is not a whole number of at least {least}")
    return int(value)


def _fraction_of(given: str | float, total: int, of: str) -> int:
    """int(fraction * total), as the papers count, safe from 0.29 * 100 being 28.999..."""
    value = _number(given, "fraction", of)
    if not 0 < value <= 1:
        raise UserError(f"fraction {given} for {of} is out of range; it must be above 0 and at most 1")
    share = int(value * total + 1e-9)
    if not share:
        raise UserError(f"fraction {given} of {of} ({total} images) is no image; it must be at least {1 / total:.2g}")
    return share
