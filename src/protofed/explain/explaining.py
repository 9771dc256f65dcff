"""From a run and some images to a folder of explanations.

`explanations.json`:

    title, text    what this is, in words; `items` and `tables`: pictures with captions, and tables, for the report
    run            method, data, path and rounds of the run
    clients        names of the models that were asked, `global` for the server's
    evidence       exact, parts or classes: sums over places, part prototypes, class prototypes; `shifts` of copies
    projected      whether the models were asked with their prototypes moved onto training patches
    images         for each: `name`, `label` (class, or null), `pictures` (files, strongest prototype first) and
                   `clients`: for each `client`, `predicted`, `probability`, `probabilities`, `agrees` (with the image's
                   class; null where that is unknown) and `prototypes`: those that spoke most, each with
                   `prototype`, `class`, `similarity`, `contribution`, `lift`, `for` (it speaks for the prediction),
                   `box` [top, bottom, left, right) in pixels or null for a flat map, `positions` of the map,
                   `scattered` (it has other peaks far from the box); exact evidence has such an entry for the lead
                   of the predicted class over the runner-up (`rival`) and for single classes, with `map` (what every
                   place adds), `bias` and `logit` (the sum of both), and over shifted copies `shifted_logit`
    agreement      between clients (see `agreement`), or null for a single one; `agreement_pictures`: files
    faithfulness   `fractions`, `pictures` and per client the curves (see `Curves`), or null
    projection     accuracy `before` and `after` per client, or null
    findings       how far the pictures can be believed, in sentences
    notes          what to know: maps that are too coarse, flat maps, several peaks
    seconds_per_image, cpu_seconds_per_image   for all clients together, pictures included
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from protofed.engines.loop import LoopEngine
from protofed.errors import UserError
from protofed.explain.agreement import agreement
from protofed.explain.evidence import explain_with, kind_of_evidence, nobody_trained, source_patches
from protofed.explain.exact_pictures import exact_figure
from protofed.explain.explanation import Explanation
from protofed.explain.explanations import Explanations
from protofed.explain.faithfulness import FRACTIONS, faithfulness
from protofed.explain.images import SelectedImages, from_domain, from_files
from protofed.explain.maps import even
from protofed.explain.page import page
from protofed.explain.pictures import Column, colour, figure, matrix
from protofed.explain.plots import draw_curves
from protofed.explain.wording import about, findings, notes, tables, undecided
from protofed.federation import Federation, RoundPolicy
from protofed.runs.opened import GLOBAL, LAST, OpenRun
from protofed.seeding import numpy_generator
from protofed.system import one_thread, write_atomically

FOLDER = "explanations"
"""In the run's own folder, unless another is given: there the report of the run finds it."""
INDEX = "explanations.json"

_COMPRESSION = 4
"""Of PNG files: half the time of the usual 6, a few percent larger. Nothing costs more in an explanation."""


def explain(
    run: str | Path,
    *,
    images: str | Path | None = None,
    domain: str | None = None,
    label: str | None = None,
    count: int | None = 8,
    clients: Sequence[str] | None = None,
    top: int = 3,
    out: str | Path | None = None,
    project: bool = False,
    projected: bool = False,
    faithful: bool = False,
    evidence: str = "auto",
    shifts: int = 1,
    model_of: str = LAST,
    data_root: str | Path | None = None,
) -> Explanations:
    """Explain what the models of a run say about images; pictures, a page and `explanations.json` go to `out`.

    The images are files (`images`: a folder or one file) or test images of a `domain`, of all classes or of the class
    `label`. `clients` are explained with their models after their last training; all of them unless named, and `global`
    means the server's model. `model_of="best"` asks the models of the best round instead of the last. `project` first
    lets clients find the training patches their part prototypes come nearest to, which are then shown beside them;
    `projected` asks the models with the prototypes moved there, which may cost accuracy. `evidence` is `exact`,
    `prototypes` or `auto` (see `kind_of_evidence`), `shifts` makes exact maps as many times finer. Only `domain` and
    `project` need the run's data, which `data_root` helps to find; `out` is `explanations` in the run folder unless
    given.
    """
    if (images is None) == (domain is None):
        raise UserError("give the images to explain: --images FOLDER, or --domain NAME for test images of the run")
    if label is not None and domain is None:
        raise UserError("--label selects among the test images of a --domain")
    with one_thread():
        if model_of != LAST and (project or projected):
            raise UserError("clients project the models of the last round; omit --model-of or the projection")
        accuracies = _project_now(run, data_root) if project else None
        opened = OpenRun(run, model_of=model_of, with_data=domain is not None, data_root=data_root)
        selected = (
            from_domain(opened, domain, count, label)
            if domain is not None
            else from_files(opened, Path(str(images)), count)
        )
        names = list(clients) if clients else [GLOBAL] if nobody_trained(opened) else opened.clients
        folder = Path(out) if out is not None else opened.run.path / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        how = _How(top, projected, evidence, shifts)
        explained = _ExplanationFolder(opened, selected, names, how, folder)
        content = explained.content(accuracies, faithful)
        write_atomically(folder / INDEX, json.dumps(content, indent=2, allow_nan=False).encode() + b"\n")
        write_atomically(folder / "index.html", page(content, folder).encode())
    return Explanations(content, folder)


def _project_now(run: str | Path, data_root: str | Path | None) -> dict[str, Any]:
    """Let every client project its part prototypes onto its own training patches; accuracy before and after."""
    opened = OpenRun(run, with_data=True, data_root=data_root)
    if "prototypes" not in opened.context.model.stage_names:
        raise UserError(f"{opened.config['method']['name']} has no part prototypes to project; omit --project")
    folder = opened.run.folder
    folder.lock()
    try:
        engine = LoopEngine(opened.prepared)
        federation = Federation(opened.prepared, engine, folder, RoundPolicy())
        federation.resume()
        return federation.project()
    finally:
        folder.release()


@dataclass(frozen=True)
class _How:
    """What the user chose about the evidence."""

    top: int
    projected: bool
    by: str
    shifts: int


class _ExplanationFolder:
    """The parts of a folder of explanations."""

    def __init__(
        self,
        opened: OpenRun,
        images: SelectedImages,
        clients: Sequence[str],
        how: _How,
        folder: Path,
    ) -> None:
        self._opened = opened
        self._images = images
        self._clients = clients
        self._folder = folder
        self._how = how
        start, cpu_start = time.perf_counter(), time.process_time()
        self._views: dict[str, list[Explanation]] = {}
        self._sources: dict[str, Mapping[int, Any]] = {}
        self._kind = kind_of_evidence(opened, clients[0], how.by)
        for client in clients:
            self._views[client] = explain_with(
                opened, client, images.pixels, how.top, how.projected, how.by, how.shifts
            )
            prototypes = sorted({each.prototype for view in self._views[client] for each in view.evidence})
            self._sources[client] = {} if client == GLOBAL else source_patches(opened, client, prototypes)
        self._pictures = [self._drawn(number) for number in range(len(images.names))]
        self._seconds = (time.perf_counter() - start) / len(images.names)
        self._cpu_seconds = (time.process_time() - cpu_start) / len(images.names)

    def content(self, accuracies: dict[str, Any] | None, faithful: bool) -> dict[str, Any]:
        """explanations.json."""
        opened = self._opened
        several = len(self._clients) > 1
        agreed = agreement(self._views, opened.classes, opened.config["seed"]) if several else None
        projection = accuracies or opened.run.summary.get("projection")
        method, data = opened.config["method"]["name"], opened.config["data"]["name"]
        content: dict[str, Any] = {
            "title": f"Why: {method} on {Path(data).name}",
            "run": {
                "method": method,
                "data": data,
                "path": str(opened.run.path),
                "rounds": opened.done,
            },
            "clients": list(self._clients),
            "evidence": self._kind,
            "shifts": self._how.shifts,
            "projected": self._how.projected,
            "images": [self._image(number) for number in range(len(self._images.names))],
            "agreement": agreed,
            "agreement_pictures": self._agreement_pictures(agreed) if agreed else [],
            "faithfulness": self._faithfulness() if faithful else None,
            "projection": projection,
            "notes": self._notes(projection),
            "seconds_per_image": round(self._seconds, 4),
            "cpu_seconds_per_image": round(self._cpu_seconds, 4),
        }
        content["findings"] = findings(content)
        return content | {
            "text": " ".join([about(content), *content["findings"], *(f"{note}." for note in content["notes"])]),
            "items": self._items(content),
            "tables": [table.as_dict() for table in tables(content).values()],
        }

    def _items(self, content: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The pictures that the report of the run shows: of each image that of the strongest prototypes."""
        patches = any(self._sources.values())  # pieces of the clients' training images, beside the prototypes
        shown: list[dict[str, Any]] = [
            {
                "image": image["pictures"][0],
                "caption": ": ".join(filter(None, (image["name"], image["label"]))),
                "training_images": patches,
            }
            for image in content["images"]
        ]
        curves = content["faithfulness"]["pictures"] if content["faithfulness"] else []
        others = {"agreement of clients": content["agreement_pictures"], "deletion and insertion": curves}
        return shown + [{"image": name, "caption": words} for words, names in others.items() for name in names]

    def _image(self, number: int) -> dict[str, Any]:
        label = self._images.labels[number]
        classes = self._opened.classes
        return {
            "name": self._images.names[number],
            "label": classes[label] if label >= 0 else None,
            "pictures": self._pictures[number],
            "clients": [_view(views[number], label, classes) for views in self._views.values()],
        }

    def _drawn(self, number: int) -> list[str]:
        """One picture for each rank of prototypes; their file names."""
        image = colour(self._images.pixels[number].numpy())
        if self._kind == "exact":
            name = f"{number:03d}-evidence.png"
            views = [views[number] for views in self._views.values()]
            drawn = exact_figure(image, views, self._opened.classes, self._images.labels[number])
            drawn.save(self._folder / name, compress_level=_COMPRESSION)
            return [name]
        ranks = min(len(views[number].evidence) for views in self._views.values())
        names = []
        for rank in range(ranks):
            columns = [self._column(client, number, rank) for client in self._clients]
            name = f"{number:03d}-prototype{rank + 1}.png"
            figure(image, columns, self._opened.classes).save(self._folder / name, compress_level=_COMPRESSION)
            names.append(name)
        return names

    def _column(self, client: str, number: int, rank: int) -> Column:
        """What one client says about one image, by one of its prototypes."""
        view, label = self._views[client][number], self._images.labels[number]
        evidence = view.evidence[rank]
        right = None if label < 0 else view.predicted == label
        return Column(client, view, evidence, self._sources[client].get(evidence.prototype), right)

    def _agreement_pictures(self, agreed: Mapping[str, Any]) -> list[str]:
        names = []
        for key, title in (("iou", "IoU of boxes"), ("rank_correlation", "rank correlation of maps")):
            values = {(pair["clients"][0], pair["clients"][1]): pair[key] for pair in agreed["pairs"]}
            name = f"agreement-{key.replace('_', '-')}.png"
            matrix(values, list(self._views), title).save(self._folder / name)
            names.append(name)
        return names

    def _faithfulness(self) -> dict[str, Any] | None:
        opened, seed = self._opened, self._opened.config["seed"]
        curves = {}
        for client, views in self._views.items():
            rng = numpy_generator(seed, "faithfulness", client)
            measured = faithfulness(opened, client, self._images.pixels, views, rng, projected=self._how.projected)
            if measured is not None:
                curves[client] = measured.as_dict()
        if not curves:
            return None
        draw_curves(curves, FRACTIONS, self._folder / "faithfulness.png")
        return {"fractions": list(FRACTIONS), "clients": curves, "pictures": ["faithfulness.png"]}

    def _notes(self, projection: Mapping[str, Any] | None) -> list[str]:
        strongest = [view.strongest for views in self._views.values() for view in views]
        blank = sum(
            self._shows_nothing(client, number) for client in self._clients for number in range(len(self._images.names))
        )
        views = [view.probabilities for views in self._views.values() for view in views]
        return [*notes(strongest, blank, projection), *(undecided(views) if self._kind == "exact" else [])]

    def _shows_nothing(self, client: str, number: int) -> bool:
        box = self._views[client][number].strongest.box
        image = self._images.pixels[number].numpy()
        return box is not None and even(image[:, box.top : box.bottom, box.left : box.right])


def _view(explanation: Explanation, label: int, classes: Sequence[str]) -> dict[str, Any]:
    predicted = explanation.predicted
    return {
        "client": explanation.client,
        "predicted": classes[predicted],
        "probability": explanation.probabilities[predicted],
        "probabilities": [round(float(np.float64(value)), 6) for value in explanation.probabilities],
        "agrees": None if label < 0 else predicted == label,
        "prototypes": [each.as_dict(classes) for each in explanation.evidence],
    }
