"""Bytes of the reference models equal the closed forms of the papers, for one client and round."""

from pathlib import Path

import pytest

from protofed.records import encode
from protofed.runs.assembly import assemble
from protofed.runs.options import make_options

RESNET50 = 23_512_130
RESNET50_BATCH_NORM = 53_120
RESNET10 = 4_903_242


def uploaded(make_data, method, model, classes, settings=None):
    data = make_data(["a"], classes=classes, train=8, test=classes, size=32, channels=3)
    options = make_options({"method": method, "data": data, "model": model, "set": settings or {}})
    return encode(assemble(options, Path("unused")).prepared.templates.upload, "a-0").size


@pytest.mark.parametrize(
    ("method", "floats"),
    [
        ("fedavg", RESNET50),
        ("fedbn", RESNET50 - RESNET50_BATCH_NORM),
        ("fedadapterproto", 2_017_284),
        ("fedprototypical", 1_316_884),
        ("fedadapter", 700_400 + 4_098),
        ("fedmp", RESNET50),
    ],
)
def test_weights_of_resnet50_with_two_classes(make_data, method, floats):
    assert uploaded(make_data, method, "resnet50", 2).weights == 4 * floats


@pytest.mark.parametrize(
    ("method", "floats"), [("fedavg", RESNET10), ("fedprox", RESNET10), ("scaffold", 2 * RESNET10), ("i2pfl", RESNET10)]
)
def test_weights_of_resnet10_with_ten_classes(make_data, method, floats):
    size = uploaded(make_data, method, "resnet10", 10)
    assert size.weights == 4 * floats
    assert size.other >= 4 * 5_760, "running statistics are not weights, but they travel"


def test_prototype_methods_send_the_rows_they_hold(make_data, tiny_run):
    data = make_data(["a", "b"], classes=10, train=40, test=10, size=28, absent={"b": [0, 1, 2, 3]})
    up = {}
    for method in ("conffedproto", "fedavg"):
        run = tiny_run(method, data, model="lenet5", rounds=1)
        up[method] = run.rounds[0]["bytes"]["up"]
    assert up["conffedproto"]["prototypes"] == 4 * 120 * (10 + 6)
    assert up["conffedproto"]["weights"] == 0
    assert up["conffedproto"]["other"] < 2 * 400, "a small header for each client"
    assert up["fedavg"]["weights"] == 2 * 4 * 44_426
    assert up["fedavg"]["total"] > 25 * up["conffedproto"]["total"]
