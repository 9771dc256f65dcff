"""What features look like: t-SNE maps of test images over rounds and runs, with scores, and distances of manifolds.

`embeddings.json`:

    title, text  what this is, and how to read it; `items` and `tables`: pictures with captions, and
                 tables of the scores, for the page and the report
    samples      test images in every panel
    panels       for each run and round: `run`, `method`, `round`, `view` (`global`: the server's model on all domains,
                 `personal`: every client's own model on its domain), `silhouette` (by class, of the features),
                 `silhouette_map` (the same of the t-SNE map), `mixing` (by domain), `points` [n, 2], `y`, `domain`
    classes, domains   the names behind `y` and `domain`
    hausdorff    per run: `rounds`, and `before` and `after` completion with received features: the mean over clients
                 and classes, and `clients`: {client: {class: [values]}}; or null (see `manifold_distances`)
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protofed.data.images import Images
from protofed.data.pixels import Pixels
from protofed.errors import UserError, unknown_name
from protofed.explain.embeddings_page import embeddings_page
from protofed.explain.images import class_number_of
from protofed.explain.plots import draw_embeddings, draw_hausdorff
from protofed.models.net import Net
from protofed.records import Features, Record
from protofed.runs.opened import GLOBAL, OpenRun, batches, snapshots_of
from protofed.seeding import stable_seed
from protofed.system import one_thread, write_atomically
from protofed.text import Table

INDEX = "embeddings.json"
_MOST_POINTS = 400
_ABOUT = (
    "Each point is a test image, placed by t-SNE so that images with similar features are near each other; distances "
    "between groups mean little. The silhouette says how well classes are separated (1 wholly, 0 not at all, below 0 "
    "mixed up), of the features and of the map. Mixing of domains compares all images of a class: twice the share of "
    "cases in which an image of another domain is nearer than one of the own. 1 is what chance gives where domains "
    "make no difference, 0 means wholly apart. It has no number of neighbours, so it does not depend on how many "
    "images are drawn."
)

FloatArray = NDArray[np.float64]


def embed(
    runs: Sequence[str | Path],
    *,
    out: str | Path,
    rounds: Sequence[int] | None = None,
    domains: Sequence[str] | None = None,
    label: str | None = None,
    samples: int = 600,
    hausdorff: bool = False,
    data_root: str | Path | None = None,
) -> dict[str, Any]:
    """Draw the features of test images for runs on the same data, a row per run and a column per round.

    `rounds` are those of which there are snapshots; without any, all snapshots and the end of the run. `domains` picks
    some, `label` a single class. `samples` bounds the images in a panel.
    """
    if not runs:
        raise UserError("embed needs a run folder, or several on the same data")
    folder = Path(out)
    with one_thread():
        rows = [
            [OpenRun(path, done=done, with_data=True, data_root=data_root) for done in _moments(path, rounds)]
            for path in runs
        ]
        _refuse_unlike(rows)
        first = rows[0][0]
        test_images = _test_images(first, domains, label, samples)
        panels = [[_panel(opened, test_images) for opened in row] for row in rows]
        folder.mkdir(parents=True, exist_ok=True)
        draw_embeddings(panels, folder / "embeddings.png")
        items = [{"image": "embeddings.png", "caption": "t-SNE of test features, by class and by domain"}]
        distances = None
        if hausdorff:
            distances = {_title(row[0]): _over_rounds(row) for row in rows}
            draw_hausdorff([opened.done for opened in rows[0]], distances, folder / "hausdorff.png")
            caption = "Hausdorff distance of clients' class manifolds to the union of all"
            items.append({"image": "hausdorff.png", "caption": caption})
    content: dict[str, Any] = {
        "title": f"Features of {Path(first.config['data']['name']).name}",
        "samples": sum(len(images) for images in test_images.values()),
        "classes": first.classes,
        "domains": list(test_images),
        "panels": [_without_names(panel) for row in panels for panel in row],
        "hausdorff": distances,
        "items": items,
    }
    content["text"] = _ABOUT
    content["tables"] = [table.as_dict() for table in _tables(content)]
    write_atomically(folder / "index.html", embeddings_page(content, folder).encode())
    write_atomically(folder / INDEX, json.dumps(content, allow_nan=False).encode() + b"\n")
    return content


def _without_names(panel: Mapping[str, Any]) -> dict[str, Any]:
    """A panel as the file has it: the names that all panels share stand there once."""
    return {key: value for key, value in panel.items() if key not in ("classes", "domains", "title")}


def _refuse_unlike(rows: Sequence[Sequence[OpenRun]]) -> None:
    if len({len(row) for row in rows}) > 1:
        raise UserError("these runs have kept different rounds; use --rounds to name rounds that all of them have")
    first = rows[0][0]
    for row in rows:
        if row[0].classes != first.classes:
            raise UserError(f"{row[0].run.path} has other classes than {first.run.path}; use runs on the same data")


def _tables(content: Mapping[str, Any]) -> list[Table]:
    """The scores of every panel, and the distances where they were asked for."""
    keys = ("silhouette", "silhouette_map", "mixing")
    scores = Table(
        "Separation of classes and mixing of domains",
        ["run", "method", "round", "silhouette by class", "on the map", "mixing of domains"],
        [
            [Path(panel["run"]).name, panel["method"], str(panel["round"]), *(_number(panel[key]) for key in keys)]
            for panel in content["panels"]
        ],
    )
    if content["hausdorff"] is None:
        return [scores]
    distances = Table(
        "Hausdorff distance of class manifolds to the union",
        ["run", "round", "own", "completed"],
        [
            [name, str(done), _number(before), _number(after)]
            for name, lines in content["hausdorff"].items()
            for done, before, after in zip(lines["rounds"], lines["before"], lines["after"], strict=True)
        ],
    )
    return [scores, distances]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _moments(path: str | Path, rounds: Sequence[int] | None) -> list[int | None]:
    if rounds:
        return list(rounds)
    kept = [done for done in snapshots_of(path) if done < len(OpenRun(path).run.rounds)]
    return [*kept, None]


def _test_images(opened: OpenRun, domains: Sequence[str] | None, label: str | None, samples: int) -> dict[str, Images]:
    """As many test images of each domain, evenly spaced."""
    wanted = None if label is None else class_number_of(opened, label)
    known = opened.context.dataset.domains
    names = list(domains) if domains else list(known)
    for name in names:
        if name not in known:
            raise unknown_name("domain", name, known)
    each = max(1, samples // len(names))
    return {name: _spaced(_of_class(known[name].test, wanted), each) for name in names}


def _of_class(images: Images, label: int | None) -> Images:
    return images if label is None else images.take((images.y == label).nonzero()[:, 0])


def _spaced(images: Images, count: int) -> Images:
    if len(images) <= count:
        return images
    order = torch.argsort(images.y, stable=True)  # so that classes keep their shares
    return images.take(order[torch.arange(count) * len(images) // count])


def _panel(opened: OpenRun, test_images: Mapping[str, Images]) -> dict[str, Any]:
    """One map and its scores."""
    view = "global" if opened.has_global else "personal"
    h, y, domain = _features(opened, test_images, view)
    points = _tsne(h, opened.config["seed"])
    scores = {
        "silhouette": silhouette(h, y),
        "silhouette_map": silhouette(points, y),
        "mixing": mixing(h, y, domain),
    }
    shown = ", ".join(f"{name} {'-' if value is None else format(value, '.2f')}" for name, value in scores.items())
    return {
        "run": str(opened.run.path),
        "method": opened.config["method"]["name"],
        "round": opened.done,
        "view": view,
        **scores,
        "points": np.round(points, 3).tolist(),
        "y": y.tolist(),
        "domain": domain.tolist(),
        "classes": opened.classes,
        "domains": list(test_images),
        "title": f"{_title(opened)}, round {opened.done}\n{shown.replace('silhouette_map', 'on map')}",
    }


def _title(opened: OpenRun) -> str:
    return f"{opened.config['method']['name']} ({opened.run.path.name})"


def _features(
    opened: OpenRun, test_images: Mapping[str, Images], view: str
) -> tuple[FloatArray, NDArray[np.int64], NDArray[np.int64]]:
    """Features of all domains: by the server's model, or by the first client of each domain.

    A domain that is no client's own is seen by the first client of all.
    """
    parts, labels, places = [], [], []
    first_of = {domain: client for client, domain in reversed(opened.domains.items())}
    for number, (name, images) in enumerate(test_images.items()):
        client = GLOBAL if view == "global" else first_of.get(name, opened.clients[0])
        net, _ = opened.model_of(client)
        parts.append(_features_of(opened, net, images.x).numpy())
        labels.append(images.y.numpy())
        places.append(np.full(len(images), number))
    return np.concatenate(parts).astype(np.float64), np.concatenate(labels), np.concatenate(places)


@torch.no_grad()
def _features_of(opened: OpenRun, net: Net, pixels: Pixels) -> Tensor:
    """Features of images, flat, [n, d]."""
    with net.eval():
        return torch.cat([net.features(opened.normalised(x)).flatten(1) for x in batches(pixels)])


def _tsne(h: FloatArray, seed: int) -> FloatArray:
    """Two coordinates by t-SNE; the perplexity fits small sets."""
    from sklearn.manifold import TSNE

    perplexity = min(30.0, max(2.0, (len(h) - 1) / 3))
    state = stable_seed(seed, "_tsne") % 2**31
    # A set of equal points has no principal components to start from.
    start = "pca" if np.ptp(h, axis=0).max() > 0 and min(h.shape) >= 2 else "random"
    return np.asarray(TSNE(perplexity=perplexity, init=start, random_state=state).fit_transform(h), dtype=np.float64)


def silhouette(h: FloatArray, y: NDArray[np.int64]) -> float | None:
    """How well classes are separated: 1 wholly, 0 not at all, below 0 mixed up; None where there is one class."""
    from sklearn.metrics import silhouette_score

    if not 1 < len(np.unique(y)) < len(y):
        return None
    return float(silhouette_score(h, y))


def mixing(h: FloatArray, y: NDArray[np.int64], domain: NDArray[np.int64]) -> float | None:
    """How well domains are mixed within their classes: 1 as if domains made no difference, 0 wholly apart.

    Twice the probability that of two other images of an image's class, one from its own domain and one from another,
    the one from the other domain is nearer. All images of the class are looked at, not a number of neighbours, so that
    the expected score depends neither on how many there are nor on how they are divided between domains. None where
    no image has both kinds of company.
    """
    from scipy.spatial.distance import cdist  # scipy takes long to import

    probabilities: list[float] = []
    for k in np.unique(y):
        rows, places = h[y == k], domain[y == k]
        distance = cdist(rows, rows)
        np.fill_diagonal(distance, np.nan)
        for own, place in zip(distance, places, strict=True):
            same = np.sort(own[(places == place) & ~np.isnan(own)])
            others = own[places != place]
            if len(same) and len(others):
                farther = len(same) - np.searchsorted(same, others, side="right")
                equal = np.searchsorted(same, others, side="right") - np.searchsorted(same, others, side="left")
                probabilities.append(float((farther + equal / 2).mean() / len(same)))
    return 2 * float(np.mean(probabilities)) if probabilities else None


def _over_rounds(row: Sequence[OpenRun]) -> dict[str, Any]:
    each = [manifold_distances(opened) for opened in row]
    clients = {
        client: {
            name: {when: [distances[client][name][when] for distances in each] for when in ("before", "after")}
            for name in row[0].classes
        }
        for client in row[0].clients
    }
    return {
        "rounds": [opened.done for opened in row],
        **{when: [_mean(_all(distances, when)) for distances in each] for when in ("before", "after")},
        "clients": clients,
    }


def _all(distances: Mapping[str, Mapping[str, Mapping[str, float | None]]], when: str) -> list[float]:
    values = (entry[when] for classes in distances.values() for entry in classes.values())
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def manifold_distances(opened: OpenRun) -> dict[str, dict[str, dict[str, float | None]]]:
    """Per client and class, the Hausdorff distance of its features to the union of all clients' (FedMP, Eq. 4).

    Where clients send features of single images, their manifolds are what they sent last, and `after` is the distance
    once they are completed with the features of others that the server would send next. Otherwise the features are
    those of the clients' training images by their own models, and nothing completes them.
    """
    sent = opened.features_sent()
    own = {client: _rows(sent[client]) if sent else _own_features(opened, client) for client in opened.clients}
    result: dict[str, dict[str, dict[str, float | None]]] = {}
    for client, (h, y) in own.items():
        received = _first_features(opened.received_by(client)) if sent else None
        others, labels = (h[:0], y[:0]) if received is None else _rows(received)
        result[client] = {}
        for k, name in enumerate(opened.classes):
            union = np.concatenate([rows[of_class == k] for rows, of_class in own.values()])
            mine, added = h[y == k], others[labels == k]
            result[client][name] = {
                "before": hausdorff_distance(mine, union) if len(mine) else None,
                "after": hausdorff_distance(np.concatenate([mine, added]), union) if len(mine) and len(added) else None,
            }
    return result


def _own_features(opened: OpenRun, client: str) -> tuple[FloatArray, NDArray[np.int64]]:
    """Of some of the client's training images, evenly spaced."""
    net, _ = opened.model_of(client)
    held = opened.context.samples(client)
    count = min(_MOST_POINTS, len(held))
    places = torch.arange(count) * len(held) // count
    return _features_of(opened, net, held.pixels(places)).double().numpy(), held.y[places].numpy()


def _rows(features: Features) -> tuple[FloatArray, NDArray[np.int64]]:
    return features.rows.flatten(1).double().numpy(), features.labels.numpy()


def _first_features(record: Record) -> Features | None:
    return next((value for value in vars(record).values() if isinstance(value, Features)), None)


def hausdorff_distance(one: FloatArray, other: FloatArray) -> float:
    """The larger of the two ways from a point of one set to the nearest of the other, at its longest."""
    from scipy.spatial.distance import cdist  # scipy takes long to import

    distance = cdist(one, other)
    return float(max(distance.min(1).max(), distance.min(0).max()))
