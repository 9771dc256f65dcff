"""Folders to report on: a real small comparison, and a large one made up in the true format."""

import json
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest

import protofed
from protofed.studies.comparison import summarise

TINY = {"model": "mlp", "set": {"model.hidden": 16}, "batch": 8, "engine": "loop"}
METHODS = ["fedavg", "i2pfl", "fedproto"]


@pytest.fixture(scope="session")
def compared(tiny_data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods with a global model and one without, two seeds, three rounds."""
    folder = tmp_path_factory.mktemp("compared") / "cmp"
    protofed.compare(METHODS, out=folder, seeds=[0, 1], data=tiny_data, rounds=3, **TINY)
    return folder


@pytest.fixture(scope="session")
def large(compared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine methods, three seeds, a hundred rounds: copies of a real run whose figures are drawn."""
    folder = tmp_path_factory.mktemp("large") / "cmp"
    content = json.loads((compared / "comparison.json").read_text())
    like = protofed.Run(compared / content["methods"]["fedavg"]["runs"][0])
    names = [f"method{number}" for number in range(9)]
    rng = np.random.default_rng(0)
    runs = {name: {seed: _made_up(folder, like, name, seed, rng) for seed in range(3)} for name in names}
    found = summarise(runs, names[0], None, {}, folder)
    about = {"baseline": names[0], "seeds": [0, 1, 2], "options": content["options"], "settings": {}}
    whole = {**about, **found, "complete": True, "missing": []}
    (folder / "comparison.json").write_text(json.dumps(whole))
    return folder


def _made_up(folder: Path, like: protofed.Run, name: str, seed: int, rng: np.random.Generator) -> protofed.Run:
    path = folder / f"{name}-seed{seed}"
    path.mkdir(parents=True)
    config, summary = like.config, like.summary
    config["method"]["name"] = config["options"]["method"] = name
    config["seed"] = seed
    config["plan"]["epochs"] = [1] * 100
    lines = []
    for number in range(1, 101):
        record = deepcopy(like.rounds[-1])
        record["round"] = number
        for view in ("global", "personal"):
            parts = record["accuracy"][view]
            for part in parts:
                parts[part] = float(1 - np.exp(-number / 30) * rng.uniform(0.6, 0.9))
        lines.append(json.dumps(record))
    summary["accuracy"] = record["accuracy"]
    (path / "run.json").write_text(json.dumps(config))
    (path / "rounds.jsonl").write_text("\n".join(lines) + "\n")
    (path / "summary.json").write_text(json.dumps(summary))
    return protofed.Run(path)
