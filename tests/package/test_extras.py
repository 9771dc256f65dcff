"""A missing optional package is named in one line, with the extra that brings it."""

import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from protofed import UserError
from protofed.data.dicom import dicom_values
from protofed.data.sources.digits import _h5
from protofed.engines.flower import prepare_flower
from protofed.explain.plots import draw_curves
from protofed.guards.accounting import require_opacus
from protofed.inference import Classifier
from protofed.inference.export import _to_onnx
from protofed.runs.tensorboard import TensorBoard
from protofed.runs.trackers import MLflow, WandB

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
"""Of protofed."""
NEEDED: dict[str, Callable[[], object]] = {
    "h5py": lambda: _h5(Path("usps.h5")),
    "pydicom": lambda: dicom_values(Path("image.dcm"), 0),
    "matplotlib": lambda: draw_curves({}, [], Path("chart.png")),
    "opacus": require_opacus,
    "tensorboard": TensorBoard,
    "flwr": prepare_flower,
    "mlflow": MLflow,
    "wandb": WandB,
    "onnxscript": lambda: _to_onnx(cast(Classifier, None), Path("model.onnx")),
}


@pytest.mark.parametrize("package", NEEDED)
def test_the_extra_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith((f"{package}.", "torch.utils.tensorboard"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError) as refused:
        NEEDED[package]()
    text = str(refused.value)
    assert "\n" not in text
    extra = re.search(r"pip install 'protofed\[(\w+)\]'", text)
    assert extra is not None, text
    assert any(entry.startswith(package.split(".")[0]) for entry in EXTRAS[extra[1]]), text
