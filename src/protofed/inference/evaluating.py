"""A run's models on data they have never seen, such as an external site's.

`evaluation.json`: `run`, `data`, `part`, `images`, `classes`, and `models`: for each client, and for `global` where
there is such a model, `accuracy`, `balanced_accuracy` (mean recall of the classes there are), `auc` (of two classes the
area under the ROC curve; of more its mean over classes against the rest; null where a class is missing), `confusion`
(rows: truth, columns: prediction), and `domains`: the accuracy on each.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protofed.data import load
from protofed.data.images import Images
from protofed.data.pixels import Pixels, join
from protofed.errors import UserError
from protofed.inference.classifier import Classifier, ends_in_ensemble
from protofed.runs.opened import GLOBAL, LAST, OpenRun, batches
from protofed.system import one_thread, write_atomically


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

    `clients` are scored with their models as their training left them (all unless named), `global` is the server's;
    `model_of="best"` takes those of the best round instead of the last.
    """
    if part not in ("test", "train", "all"):
        raise UserError(f"part={part} is not valid; it is test, train or all")
    with one_thread():
        opened = OpenRun(run, model_of=model_of)
        channels, height, width = opened.context.dataset.image_shape
        dataset = load(
            data, data_root=data_root, domains=domains, labels=labels, image_size=(height, width), channels=channels
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
            "models": {name: _scores(opened, name, sets) for name in names},
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


def _scores(opened: OpenRun, client: str, sets: dict[str, Images]) -> dict[str, Any]:
    probabilities, truth, accuracies = [], [], {}
    for name, images in sets.items():
        scores = _probabilities(opened, client, images.x)
        accuracies[name] = float((scores.argmax(1) == images.y).double().mean())
        probabilities.append(scores.double().numpy())
        truth.append(images.y.numpy())
    return {**metrics(np.concatenate(probabilities), np.concatenate(truth)), "domains": accuracies}


@torch.no_grad()
def _probabilities(opened: OpenRun, client: str, pixels: Pixels) -> Tensor:
    """Of the server's model, which may be an ensemble, or of a client's as its training left it."""
    if client == GLOBAL and ends_in_ensemble(opened):
        return Classifier(opened.run).probabilities(pixels)
    net, at = opened.model_of(client)
    with net.eval():
        return torch.cat([opened.method.predict(net, opened.normalised(x), at) for x in batches(pixels)])


def metrics(probabilities: NDArray[np.float64], y: NDArray[np.int64]) -> dict[str, Any]:
    """Accuracy, balanced accuracy, area under the curve and confusion matrix from probabilities [n, C]."""
    from sklearn.metrics import accuracy_score, confusion_matrix, recall_score

    predicted, present = probabilities.argmax(1), np.unique(y)
    return {
        "accuracy": float(accuracy_score(y, predicted)),
        # balanced_accuracy_score is the same, but warns where a class is predicted that the data does not have.
        "balanced_accuracy": float(recall_score(y, predicted, labels=present, average="macro")),
        "auc": _auc(probabilities, y) if len(present) == probabilities.shape[1] else None,
        "confusion": confusion_matrix(y, predicted, labels=range(probabilities.shape[1])).tolist(),
    }


def _auc(probabilities: NDArray[np.float64], y: NDArray[np.int64]) -> float:
    """Of two classes the area under the ROC curve; of more, its mean over classes against the rest."""
    from sklearn.metrics import roc_auc_score

    classes = probabilities.shape[1]
    if classes == 2:
        return float(roc_auc_score(y, probabilities[:, 1]))
    return float(roc_auc_score(np.eye(classes, dtype=np.int64)[y], probabilities, average="macro"))
