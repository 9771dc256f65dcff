"""One federation, whatever form its images come in."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pydicom")


def test_dicom_folders_of_patients_and_a_table_give_the_same_run(tmp_path: Path, benchmark: Any) -> None:
    forms_of = benchmark("same_images")
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (90, 12, 12), dtype=np.uint8), np.arange(90) % 3
    forms = forms_of.write_forms(tmp_path, list(forms_of.samples(x, y, ["healthy", "benign", "ill"])))
    options = ["--model", "mlp", "--set", "model.hidden=8", "--rounds", "2", "--engine", "loop", "--quiet"]
    runs = forms_of.run_forms(tmp_path, forms, options)
    results = {
        name: (
            json.loads((run / "run.json").read_text())["partition"],
            json.loads((run / "summary.json").read_text())["accuracy_final"],
            (run / "model.safetensors").read_bytes(),
        )
        for name, run in runs.items()
    }
    assert results["dicom"] == results["png"] == results["csv"]
    splits = [json.loads((run / "run.json").read_text())["data"]["place"]["reading"]["sites"] for run in runs.values()]
    assert [split["Zürich"]["groups"] for split in splits] == [15, 15, 15]
    assert [split["Zürich"]["grouped_by"] for split in splits] == ["patient tags", "folder", "column Patient ID"]
