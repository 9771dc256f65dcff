"""A type checker knows what `aggregate` may read of the uploads."""

from pathlib import Path

import pytest
from mypy import api

import protofed

SRC = Path(protofed.__file__).parents[1]

METHOD = """
from torch import Tensor

from protofed.method import At, Method
from protofed.records import ClassTable, Each, Mean, Record, Weights


class MineServer(Record):
    weights: Weights
    P: dict[str, ClassTable]


class MineUpload(Record):
    weights: Mean[Weights]
    P: Each[ClassTable]


class OtherUpload(Record):
    weights: Mean[Weights]


class Mine(Method[MineUpload]):
    def aggregate(self, server: MineServer, total: MineUpload, at: At) -> MineServer:
        return MineServer(total.weights, {**server.P, **total.P})
"""


# Torch and the like take mypy a minute and have no part in this; protofed itself is checked elsewhere.
SETTINGS = """
[mypy]
strict = True
mypy_path = {src}
follow_imports = skip

[mypy-protofed.*]
follow_imports = silent
"""


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory):
    """What mypy says of a file; what it learnt of protofed is kept from one file to the next."""
    folder = tmp_path_factory.mktemp("typed")
    (folder / "mypy.ini").write_text(SETTINGS.format(src=SRC))

    def check(source: str) -> str:
        file = folder / "mine.py"
        file.write_text(source)
        options = ["--config-file", str(folder / "mypy.ini"), "--cache-dir", str(folder / "cache")]
        said, trouble, _ = api.run([*options, "--no-error-summary", str(file)])
        assert not trouble
        return said

    return check


@pytest.mark.parametrize(
    ("right", "wrong", "complaint"),
    [
        ("total.weights", "total.weights", ""),
        ("total.weights,", "total.model,", '"MineUpload" has no attribute "model"  [attr-defined]'),
        ("total.weights,", "total.weights.value,", '"Weights" has no attribute "value"  [attr-defined]'),
        ("**total.P", '"a": total.P', 'expected "str": "ClassTable"'),
        ("total: MineUpload", "total: OtherUpload", 'supertype defines the argument type as "MineUpload"'),
    ],
    ids=["right", "a field the upload lacks", "as if it were one client's", "all clients as one", "another upload"],
)
def test_mypy_refuses_a_total_that_is_not_that_of_the_upload(complaints, right, wrong, complaint) -> None:
    assert right in METHOD
    said = complaints(METHOD.replace(right, wrong))
    assert ("error:" in said) == bool(complaint), said
    assert complaint in said
