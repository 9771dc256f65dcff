"""What the last evaluation of a run predicts for every test image, for `predictions.npz`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from protofed.clients import Evaluate, RunContext, Score
from protofed.metrics import KeptPredictions, PredictedSet


@dataclass(frozen=True)
class KeptScore(Score):
    """A score, and the class probabilities it comes from."""

    probabilities: NDArray[Any] = field(kw_only=True, compare=False)


class ScoredImages:
    """The labels and numbers of the images that models are tested on.

    An image's number is its place in the data: first the test images, domain by domain, then the training images, of
    which clients may hold some out.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        tests = [len(domain.test) for domain in context.dataset.domains.values()]
        ends = np.cumsum([0, *tests])
        self._first = dict(zip(context.dataset.domains, ends.tolist(), strict=False))
        self._held_out_from = int(ends[-1])
        self._labels: NDArray[np.int64] | None = None

    def score(self, job: Evaluate, probabilities: NDArray[Any]) -> KeptScore:
        """The score of a job, with its parts where clients' own test sets were scored together."""
        if job.domain is not None:
            return _kept_score(self.domain(job.domain), probabilities)
        pieces = np.split(probabilities, np.cumsum(self.sizes(job))[:-1])
        parts = tuple(
            _kept_score(self.client(client, job.validates), own)
            for client, own in zip((str(job.client), *job.alike), pieces, strict=True)
        )
        correct = sum(part.correct for part in parts)
        return KeptScore(correct, len(probabilities), parts, probabilities=probabilities)

    def sizes(self, job: Evaluate) -> list[int]:
        """How many images each test set of a job has."""
        if job.domain is not None:
            return [len(self._context.dataset.domains[job.domain].test)]
        return [self._context.test_size(client, job.validates) for client in (str(job.client), *job.alike)]

    def domain(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Labels and numbers of a domain's test set."""
        labels = self._context.dataset.domains[name].test.y.numpy()
        return labels, np.arange(len(labels)) + self._first[name]

    def client(self, name: str, validates: bool = False) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Labels and numbers of the images that a client holds out, or validates on."""
        if self._labels is None:
            self._labels = self._context.dataset.pooled_labels().numpy()
        places = self._context.own_test(name, validates).numpy()
        return self._labels[places], places + self._held_out_from

    def predicted(self, test: tuple[NDArray[np.int64], NDArray[np.int64]], score: Score) -> PredictedSet | None:
        """A test set with what was predicted for it; None where the probabilities were not kept."""
        return PredictedSet(test[0], score.probabilities, test[1]) if isinstance(score, KeptScore) else None


def kept_predictions(
    context: RunContext, views: Mapping[str, Mapping[str, Score]], own_tests: bool
) -> KeptPredictions | None:
    """The content of predictions.npz; `own_tests`: clients are tested on images of their own, not on their domain's.

    None where no probabilities were kept.
    """
    images = ScoredImages(context)
    kept: dict[str, dict[str, PredictedSet]] = {}
    for view, scores in views.items():
        for part, score in scores.items():
            if view == "personal":
                test = images.client(part) if own_tests else images.domain(context.tested_on[part])
            else:
                test = images.domain(part)
            predicted = images.predicted(test, score)
            if predicted is not None and len(predicted):
                kept.setdefault(view, {})[part] = predicted
    return KeptPredictions(context.dataset.classes, kept) if kept else None


def together(images: ScoredImages, scores: Mapping[str, Score]) -> PredictedSet | None:
    """What clients predict for the images they validate on, as one set; None where there are none."""
    sets = [images.predicted(images.client(client, validates=True), score) for client, score in scores.items()]
    kept: Sequence[PredictedSet] = [each for each in sets if each is not None and len(each)]
    if not kept:
        return None
    return PredictedSet(
        np.concatenate([each.labels for each in kept]),
        np.concatenate([each.probabilities for each in kept]),
        np.concatenate([each.samples for each in kept]),
    )


def _kept_score(test: tuple[NDArray[np.int64], NDArray[np.int64]], probabilities: NDArray[Any]) -> KeptScore:
    # By torch, as scores without probabilities are made.
    correct = torch.from_numpy(np.array(probabilities)).argmax(1).numpy() == test[0]
    return KeptScore(int(correct.sum()), len(correct), probabilities=probabilities)
