"""Predictions for a folder in which not everything can be read."""

import csv
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from protofed.errors import UserError
from protofed.inference import Classifier, predict


def test_what_cannot_be_read_is_skipped_and_listed(
    tiny_run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    classifier = Classifier(tiny_run("fedavg", rounds=1).path)
    folder = tmp_path / "new"
    folder.mkdir()
    pages = [Image.fromarray(np.full((8, 8), 80 * number, dtype=np.uint8)) for number in range(3)]
    pages[0].save(folder / "one.png")
    pages[0].save(folder / "stack.tif", save_all=True, append_images=pages[1:])
    for name in ("broken.png", "cut.png"):
        (folder / name).write_bytes((folder / "one.png").read_bytes()[: 20 if name == "cut.png" else 0])
    with caplog.at_level(logging.WARNING):
        counts = predict(classifier, folder, tmp_path / "out.csv")
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert [row["file"] for row in rows] == ["one.png", "stack.tif#1", "stack.tif#2", "stack.tif#3"]
    assert sum(counts.values()) == 4
    assert [sum(name in text for text in caplog.messages) for name in ("broken.png", "cut.png")] == [1, 1]
    for name in ("one.png", "stack.tif"):
        (folder / name).unlink()
    with pytest.raises(UserError, match=r"2 problems.*broken\.png.*cut\.png"):
        predict(classifier, folder, tmp_path / "none.csv")
    assert not (tmp_path / "none.csv").exists()
