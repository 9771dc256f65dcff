"""Training images that are bad on purpose at some clients: wrong labels, noisy pixels. Tests stay as they are."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protofed.data.images import Dataset, Domain, Images
from protofed.data.partition.partition import Partition
from protofed.data.partition.request import parse_number
from protofed.data.pixels import Pixels, empty_pixels, filled, pieces
from protofed.errors import UserError, unknown_name
from protofed.seeding import numpy_generator

_WHITE = 255


def corrupted(
    dataset: Dataset,
    partition: Partition,
    *,
    label_noise: str | None = None,
    image_noise: str | None = None,
    seed: int = 0,
) -> Dataset:
    """The same data with what some clients train on made worse; both texts are `CLIENT=AMOUNT,...`.

    `label_noise`: the share of a client's labels that become another class, each with the same chance. `image_noise`:
    the standard deviation of Gaussian noise on a client's pixels, which are between 0 and 1. What clients keep for
    tests of their own is not touched. No image is with two clients, so nobody else sees the difference.
    """
    wrong = _amounts(label_noise, "label_noise", partition, most=1.0)
    noisy = _amounts(image_noise, "image_noise", partition)
    if wrong:
        dataset = _relabelled(dataset, partition, wrong, seed)
    if noisy:
        dataset = _with_noise(dataset, partition, noisy, seed)
    return dataset


def _amounts(text: str | None, what: str, partition: Partition, most: float = float("inf")) -> dict[str, float]:
    """The amount of every client that is named."""
    amounts: dict[str, float] = {}
    for part in filter(None, (text or "").split(",")):
        client, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            example = partition.clients[0]
            raise UserError(f"data.{what}: {part.strip()!r} is not CLIENT=AMOUNT; for example {example}=0.4")
        if client not in partition.clients:
            raise unknown_name("client", client, partition.clients)
        amounts[client] = parse_number(value, f"data.{what}", client)
        if not 0 <= amounts[client] <= most:
            raise UserError(
                f"data.{what}: {client}={value} is out of range; it must be at least 0 and at most {most:g}"
            )
    return amounts


def _relabelled(dataset: Dataset, partition: Partition, shares: Mapping[str, float], seed: int) -> Dataset:
    labels, classes = dataset.pooled_labels().clone(), len(dataset.classes)
    for client, share in shares.items():
        rng = numpy_generator(seed, "label noise", client)
        own = partition.train[client]
        chosen = torch.from_numpy(rng.permutation(own)[: round(share * len(own))])
        # A step of 1 to classes - 1 never ends at the class it began with.
        steps = torch.from_numpy(rng.integers(1, max(2, classes), len(chosen)))
        labels[chosen] = (labels[chosen] + steps) % classes
    parts = torch.split(labels, [len(domain.train) for domain in dataset.domains.values()])
    domains = {
        name: replace(domain, train=Images(domain.train.x, y))
        for (name, domain), y in zip(dataset.domains.items(), parts, strict=True)
    }
    return replace(dataset, domains=domains)


def _with_noise(dataset: Dataset, partition: Partition, amounts: Mapping[str, float], seed: int) -> Dataset:
    offsets = dataset.offsets
    images = sum(map(len, offsets.values()))
    deviation = np.zeros(images, dtype=np.float32)
    for client, amount in amounts.items():
        deviation[partition.train[client]] = amount
    total = images * prod(dataset.image_shape)
    domains: dict[str, Domain] = {}
    for name, domain in dataset.domains.items():
        places = offsets[name]
        own = deviation[places.start : places.stop]
        pixels = _noisy_pixels(domain.train.x, own, seed, total) if own.any() else domain.train.x
        domains[name] = replace(domain, train=Images(pixels, domain.train.y))
    return replace(dataset, domains=domains)


def _noisy_pixels(x: Pixels, deviation: NDArray[np.float32], seed: int, total: int) -> Pixels:
    """The images of a domain with noise on some of them, which depends on an image's place in the domain."""
    array = empty_pixels(tuple(x.shape), total)
    start = 0
    for part in pieces(x):
        noisy = part.clone()
        for row in np.flatnonzero(deviation[start : start + len(part)]).tolist():
            noisy[row] = _noisy_image(part[row], float(deviation[start + row]), seed, start + row)
        array[start : start + len(part)] = noisy.numpy()
        start += len(part)
    return filled(array)


def _noisy_image(image: Tensor, deviation: float, seed: int, place: int) -> Tensor:
    rng = numpy_generator(seed, "image noise", place)
    noise = torch.from_numpy(rng.standard_normal(tuple(image.shape), dtype=np.float32)) * (deviation * _WHITE)
    return (image + noise).round_().clamp_(0, _WHITE).to(torch.uint8)
