"""A method may name an optimiser and a rate; the user's word goes before its own."""

from typing import Any, ClassVar

import pytest

from protofed.cli import main
from protofed.methods.fedavg import FedAvg
from protofed.registry import register
from protofed.runs.options import make_options


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("adam", 0.001, 16)),
        ({"lr": 0.5}, ("adam", 0.5, 16)),
        ({"optimizer": "adam"}, ("adam", 0.001, 16)),
        ({"optimizer": "sgd"}, ("sgd", 0.01, 16)),  # the rate was made for Adam
        ({"batch": 4}, ("adam", 0.001, 4)),
    ],
)
def test_the_user_goes_before_the_method(given: dict[str, Any], expected: tuple[object, ...]) -> None:
    @register("wishful")
    class Wishful(FedAvg):
        """FedAvg that would rather have Adam."""

        run_defaults: ClassVar = {"optimizer": "adam", "lr": 0.001, "batch": 16}

    options = make_options({"method": "wishful", **given})
    assert (options.optimizer, options.lr, options.batch) == expected
    assert make_options(options.model_dump()) == options, "stored options are complete"


def test_methods_without_a_wish_and_unknown_ones_have_the_general_defaults() -> None:
    for method in ("fedavg", "no-such-method"):
        options = make_options({"method": method})
        assert (options.optimizer, options.lr, options.batch) == ("sgd", 0.01, 32)


def test_the_run_says_what_it_took(tiny_data: str, tmp_path: Any, capsys: Any) -> None:
    small = ["--model", "resnet10", "--set", "model.width=2", "--set", "prototype_dim=4", "--rounds", "1"]
    given = ["run", "fedprototypical", "--data", tiny_data, *small, "--engine", "loop", "--out", str(tmp_path / "run")]
    assert main(given) == 0
    assert "fedprototypical trains with optimizer adam, lr 0.001, its own default" in capsys.readouterr().out
