"""A run's models on data they have never seen, such as an external site's.

`evaluation.json`: `run`, `data`, `part`, `images`, `classes`, and `models`: for each client, and for `global` where
there is such a model, `accuracy`, `balanced_accuracy` (mean recall of the classes there are), `auc` (of two classes the
area under the ROC curve; of more its mean over classes against the rest; null where a class is missing) and the other
metrics that fit the classes, `intervals` of each over the images, `confusion` (rows: truth, columns: prediction), and
`domains`: the accuracy on each.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protofed.data import ReadOptions, load
from protofed.data.images import Images
from protofed.data.pixels import Pixels, join
from protofed.errors import UserError
from protofed.inference.classifier import Classifier, ends_in_ensemble
from protofed.inference.frozen_features import FrozenFeatures
from protofed.metrics import METRICS, confusion_matrix
from protofed.runs.metrics import own_metrics
from protofed.runs.opened import GLOBAL, LAST, OpenRun
from protofed.system import one_thread, write_atomically

_BATCH = 64
"""Images that torch sees at once."""


def evaluate(
    run: str | Path,
    data: str,
    *,
    data_root: str | None = None,
    domains: str | None = None,
    labels: str | None = None,
    part: str = "test",
    clients: Sequence[str] | None = None,
    out: str | Path | None = None,
    model_of: str = LAST,
) -> dict[str, Any]:
    """Score the models of a run on a data set with the same classes; `labels` regroups its classes as in a run.

    `clients` are scored with their models after their last training (all unless named), `global` is the server's;
    `model_of="best"` takes those of the best round instead of the last.
    """
    if part not in ("test", "train", "all"):
        raise UserError(f"part={part} is not valid; use test, train or all")
    with one_thread():
        opened = OpenRun(run, model_of=model_of)
        channels, height, width = opened.context.dataset.image_shape
        features = FrozenFeatures(opened.context)
        dataset = load(
            data,
            data_root=data_root,
            domains=domains,
            labels=labels,
            image_size=(height, width),
            channels=channels,
            # Where features are looked up, images need not be decoded.
            reading=ReadOptions(undecoded=features.backbone() is not None),
        )
        numbers = _class_numbers(dataset.classes, opened, data)
        sets = {name: _images(domain.train, domain.test, part, numbers) for name, domain in dataset.domains.items()}
        names = list(clients) if clients else [*opened.clients, *([GLOBAL] if opened.has_global else [])]
        content = {
            "run": str(opened.run.path),
            "round": opened.done,
            "data": dataset.name,
            "part": part,
            "images": sum(len(images) for images in sets.values()),
            "classes": opened.classes,
            "models": {name: _scores(opened, features, name, sets) for name in names},
        }
    if out is not None:
        write_atomically(Path(out), json.dumps(content, indent=2, allow_nan=False).encode() + b"\n")
    return content


def _class_numbers(classes: Sequence[str], opened: OpenRun, data: str) -> Tensor:
    """The run's number of each class of the data, which need not have all of them."""
    known = {name: k for k, name in enumerate(opened.classes)}
    if not known.keys() >= set(classes):
        labels = opened.config["options"].get("labels") or "0=healthy,1-4=diseased"
        raise UserError(
            f"{data} has the classes {', '.join(classes)}, the run {', '.join(known)}; regroup them with --labels, for "
            f'example --labels "{labels}"'
        )
    return torch.tensor([known[name] for name in classes])


def _images(train: Images, test: Images, part: str, numbers: Tensor) -> Images:
    parts = {"train": [train], "test": [test], "all": [train, test]}[part]
    return Images(join([images.x for images in parts]), numbers[torch.cat([images.y for images in parts])])


def _scores(opened: OpenRun, features: FrozenFeatures, client: str, sets: dict[str, Images]) -> dict[str, Any]:
    probabilities, truth, accuracies = [], [], {}
    for name, images in sets.items():
        scores = _probabilities(opened, features, client, images.x)
        accuracies[name] = float((scores.argmax(1) == images.y).double().mean())
        probabilities.append(scores.double().numpy())
        truth.append(images.y.numpy())
    own = metrics(np.concatenate(probabilities), np.concatenate(truth), opened.classes)
    return {**own, "domains": accuracies}


def _probabilities(opened: OpenRun, features: FrozenFeatures, client: str, pixels: Pixels) -> Tensor:
    """Of the server's model, which may be an ensemble, or of a client's as its training left it."""
    if client == GLOBAL and ends_in_ensemble(opened):
        return Classifier(opened.run).probabilities(pixels)
    net, at = opened.model_of(client)
    architecture = 0 if client == GLOBAL else opened.context.architecture_of(client)
    return features.probabilities(net, at, pixels, _BATCH, architecture)


def metrics(
    probabilities: NDArray[np.floating[Any]], y: NDArray[np.int64], classes: Sequence[str] | None = None
) -> dict[str, Any]:
    """Every metric that fits the classes, the confusion matrix, and `intervals` of the metrics over the images."""
    named = classes or [f"class {k}" for k in range(probabilities.shape[1])]
    scores = own_metrics(y, probabilities, named)
    figures = {name: figure for name, figure in scores.items() if name in METRICS}
    return {
        **{name: figure["value"] for name, figure in figures.items()},
        "confusion": confusion_matrix(y, probabilities).tolist(),
        "intervals": {name: figure["interval"] for name, figure in figures.items()},
    }
