"""Where a run's images were, and where they are now: never other images of the same name."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from protofed.data import Dataset, load
from protofed.data.catalog import data_root_of
from protofed.errors import UserError
from protofed.federation import RunFolder
from protofed.runs.options import make_options
from protofed.system import write_atomically


def place_record(dataset: Dataset) -> dict[str, Any] | None:
    """As run.json has it; None where the images are not on this machine."""
    return None if dataset.place is None else asdict(dataset.place)


def data_here(config: Mapping[str, Any], data_root: str | Path | None = None) -> dict[str, Any]:
    """The options that find the images of a run again, wherever this is called from.

    With `data_root` they are looked for in that folder first, under the name they had. Runs of before places were
    written down are read as their options say.
    """
    data, options = config["data"], config["options"]
    if "place" not in data:
        return {"data": options["data"], "data_root": data_root or options["data_root"]}
    place = data["place"]
    if place is None:
        raise UserError("the images of this run are held by its sites and cannot be read here")
    if place["path"] is None:
        return {"data": options["data"], "data_root": data_root or place["root"] or options["data_root"]}
    was = Path(place["path"])
    root = data_root_of(data_root)
    for path in (*([root / was.name] if root else []), was):
        if path.exists():
            return {"data": str(path), "data_root": None}
    raise UserError(
        f"the images of this run were at {was}, but nothing is there now; record their new place with `protofed "
        f"data relocate RUN NEW`, or give the folder that contains {was.name} as --data-root"
    )


def refuse_other_images(dataset: Dataset, config: Mapping[str, Any]) -> None:
    """Refuse images that are not those the run was begun with."""
    recorded = config["data"].get("place")
    if not recorded or dataset.place is None or dataset.place.fingerprint == recorded["fingerprint"]:
        return
    where = dataset.place.path or dataset.name
    raise UserError(
        f"{where} does not hold the images of this run: files, labels or names differ from the original ones; "
        "record the right place with `protofed data relocate RUN NEW`"
    )


def relocate(run: str | Path, new: str | Path) -> Path:
    """Write down that the images of a run are now at `new`, once they are seen to be the same; the folder itself."""
    folder = RunFolder(Path(run))
    config = folder.read_json("run.json")
    place = config["data"].get("place")
    if place is None or place["path"] is None:
        raise UserError(f"the data of {run} was read by name ({config['options']['data']}), not from its own folder")
    path = Path(new).expanduser().resolve()
    options = make_options(config["options"])
    refuse_other_images(load(str(path), image_size=options.image_size, reading=options.reading()), config)
    content = {**config, "data": {**config["data"], "place": {**place, "path": str(path)}}}
    write_atomically(folder.path / "run.json", json.dumps(content, indent=2, allow_nan=False).encode() + b"\n")
    return path
