"""Rebuilding images from what a client sent, by a decoder that has seen the attacker's half of its images."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from protofed.audit.decoder import Decoder, Effort, rebuilt, train_decoder
from protofed.audit.extractor import Extractor
from protofed.audit.membership import distances
from protofed.audit.metrics import psnr, rms_distance, ssim, ssim_of_whole
from protofed.audit.victim import SentRows, Victim
from protofed.text import duration

RISK = 0.1
"""Root mean square distance below which an image counts as given away (Carlini et al., 2023)."""
_SSIM_WINDOW = 11

Figures = dict[str, Any]


class Reconstruction(NamedTuple):
    """Originals with what an attacker made of them, and the figures."""

    originals: Tensor
    images: Tensor
    figures: Figures


@dataclass(frozen=True)
class TrainedDecoder:
    """The decoder of one client and stage, and what the attack knows beside it."""

    victim: Victim
    stage: str
    features: Tensor
    decoder: Decoder
    class_means: Tensor
    """The mean image of each class in the attacker's half, [C, ...]: what knowing the label alone gives."""
    sent: SentRows | None
    originals: Tensor | None
    """Positions of the images behind the embeddings that were sent."""


def train_stage_decoder(
    victim: Victim,
    stage: str,
    sent: SentRows | None,
    effort: Effort,
    tell: Callable[[str], None] = lambda _: None,
) -> TrainedDecoder:
    """Train the decoder on the attacker's half: what the model makes of its images, and what was sent of them."""
    pixels, features = victim.pixels, victim.features(victim.members, stage)
    known, shown = features[victim.attacker], pixels[victim.attacker]
    originals = None
    if sent is not None:
        sent = SentRows(sent.kind, sent.field, sent.rows.reshape(len(sent.rows), *features.shape[1:]), sent.labels)
        originals = victim.originals_of(sent, features)
        own = torch.isin(originals, victim.attacker)
        known, shown = torch.cat([known, sent.rows[own]]), torch.cat([shown, pixels[originals[own]]])

    def progress(step: int, seconds_left: float) -> None:
        tell(f"  decoder for stage {stage}: {step} of {effort.steps} steps, about {duration(seconds_left)} left")

    decoder = train_decoder(known, shown, effort, victim.context.seed, victim.client, stage, progress=progress)
    return TrainedDecoder(victim, stage, features, decoder, _class_means(victim, pixels), sent, originals)


def rebuild_computed(trained: TrainedDecoder, extractor: Extractor) -> Reconstruction:
    """From the features that the model gives the unseen images."""
    unseen = trained.victim.unseen
    return _scored(trained, trained.features[unseen], unseen, extractor)


def rebuild_sent(trained: TrainedDecoder, extractor: Extractor) -> Reconstruction | None:
    """From the embeddings that were sent, of unseen images; None where there are none."""
    if trained.sent is None or trained.originals is None:
        return None
    unseen = torch.isin(trained.originals, trained.victim.unseen).nonzero()[:, 0]
    if not len(unseen):
        return None
    return _scored(trained, trained.sent.rows[unseen], trained.originals[unseen], extractor)


def rebuild_prototypes(trained: TrainedDecoder, sent: SentRows) -> Reconstruction:
    """From prototypes: no image is theirs, so each is held against the nearest training image of its class."""
    victim, pixels = trained.victim, trained.victim.pixels
    images = rebuilt(trained.decoder, _as_features(sent.rows, trained.features))
    guesses = trained.class_means[sent.labels]
    nearest, near = _nearest(images, sent.labels, victim)
    _, near_guess = _nearest(guesses, sent.labels, victim)
    figures = {
        "prototypes": len(images),
        "rms_to_nearest": float(near.mean()),
        "rms_to_nearest_min": float(near.min()),
        "rms_of_class_mean_to_nearest": float(near_guess.mean()),
        "below_risk_line": float((near < RISK).float().mean()),
        "class_mean_below_risk_line": float((near_guess < RISK).float().mean()),
        "fewest_samples_behind_one": None if sent.counts is None else float(sent.counts.min()),
        **_single_samples(sent, near, near_guess),
    }
    return Reconstruction(pixels[nearest], images, figures)


def _as_features(rows: Tensor, features: Tensor) -> Tensor:
    """In the shape of features and, where all of those have length 1, in their length: a mean of them is shorter."""
    rows = rows.reshape(len(rows), *features.shape[1:])
    unit = features.ndim == 2 and bool(((features.norm(dim=1) - 1).abs() < 1e-3).all())
    return functional.normalize(rows, dim=1) if unit else rows


def _single_samples(sent: SentRows, near: Tensor, near_guess: Tensor) -> Figures:
    """Prototypes that are the embedding of one sample: its image is the only one of its class to be compared with."""
    single = None if sent.counts is None else sent.counts == 1
    if single is None or not single.any():
        return {"single_samples": 0, "rms_of_single_samples": None, "rms_of_class_mean_to_single_samples": None}
    return {
        "single_samples": int(single.sum()),
        "rms_of_single_samples": float(near[single].mean()),
        "rms_of_class_mean_to_single_samples": float(near_guess[single].mean()),
    }


def mean_figures(clients: Mapping[str, Figures]) -> Figures:
    """Each figure averaged over clients, as FedMP's table does; counts are added up."""
    keys = list(next(iter(clients.values())))
    return {key: _combined(key, [figures[key] for figures in clients.values()]) for key in keys}


def similarity(x: Tensor, y: Tensor) -> Tensor:
    """SSIM, with the whole image as one window where it is smaller than a window."""
    return ssim(x, y) if min(x.shape[2:]) >= _SSIM_WINDOW else ssim_of_whole(x, y)


def _scored(trained: TrainedDecoder, features: Tensor, positions: Tensor, extractor: Extractor) -> Reconstruction:
    originals = trained.victim.pixels[positions]
    images = rebuilt(trained.decoder, features)
    guesses = trained.class_means[trained.victim.members.y[positions]]
    rms, guess = rms_distance(images, originals), rms_distance(guesses, originals)
    alike = similarity(images, originals)
    figures = {
        "images": len(images),
        "fid": extractor.distance(images, originals),
        "ssim_max": float(alike.max()),
        "ssim": float(alike.mean()),
        "rms_min": float(rms.min()),
        "rms": float(rms.mean()),
        # Equal images have no finite ratio; float32 pixels cannot tell more than this anyway.
        "psnr": float(psnr(images, originals).clamp(max=99.0).mean()),
        "below_risk_line": float((rms < RISK).float().mean()),
        "class_mean_rms": float(guess.mean()),
        "class_mean_ssim": float(similarity(guesses, originals).mean()),
        "class_mean_below_risk_line": float((guess < RISK).float().mean()),
    }
    return Reconstruction(originals, images, figures)


def _class_means(victim: Victim, pixels: Tensor) -> Tensor:
    """Where the attacker has no image of a class, the mean of all its images."""
    images, labels = pixels[victim.attacker], victim.members.y[victim.attacker]
    means = images.mean(0).repeat(victim.net.classes, 1, 1, 1)
    for label in set(labels.tolist()):
        means[label] = images[labels == label].mean(0)
    return means


def _nearest(images: Tensor, labels: Tensor, victim: Victim) -> tuple[Tensor, Tensor]:
    """The nearest training image of the same class, and its root mean square distance."""
    distance = distances(images, victim.pixels) / images[0].numel() ** 0.5
    distance[labels[:, None] != victim.members.y[None, :]] = float("inf")
    near = distance.min(1)
    return near.indices, near.values


def _combined(key: str, values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    if key in ("images", "prototypes", "single_samples"):
        return sum(known)
    return min(known) if key == "fewest_samples_behind_one" else mean(known)
