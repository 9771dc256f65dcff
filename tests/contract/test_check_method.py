"""The public checker itself: it passes what is right and names what is wrong."""

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from protofed.method import Positive, knob
from protofed.methods.fedavg import FedAvg, ModelUpload, SharedModel
from protofed.records import Each, Features, Mean, Record, Weights
from protofed.registry import method_names
from protofed.testing import check_method

# Each of these methods is FedAvg with one mistake.


class Fine(FedAvg):
    """Nothing wrong here."""

    paper = "none"


class Anonymous(FedAvg):
    paper = "none"


class Unpublished(FedAvg):
    """Says not where it comes from."""

    paper = ""


class NeedsAnArgument(FedAvg):
    """A field without a default."""

    paper = "none"
    rate: float


class BadDefault(FedAvg):
    """The default is not a value of the knob."""

    paper = "none"
    rate: Positive = knob("a rate", default=-1.0)


class Undescribed(FedAvg):
    """A knob nobody explains."""

    paper = "none"
    rate: float = knob("", default=1.0)


class BadPreset(FedAvg):
    """A preset with a setting that does not exist."""

    paper = "none"
    presets = {"mine": {"rat": 1.0}}  # noqa: RUF012


class NotFinite(FedAvg):
    """Logarithm of zero."""

    paper = "none"

    def loss(self, net: Any, x: Tensor, y: Tensor, at: Any) -> Any:
        """Infinite."""
        return {"ce": super().loss(net, x, y, at)["ce"], "extra": torch.zeros(()).log()}


class NeedsEveryClass(FedAvg):
    """Fails where a class is absent."""

    paper = "none"

    def upload(self, net: Any, data: Any, at: Any) -> Any:
        """The model, unless a class is missing."""
        if at.held.min() == 0:
            raise KeyError("class 3")
        return super().upload(net, data, at)


class NeedsTwoClients(FedAvg):
    """Compares clients with one another."""

    paper = "none"

    def aggregate(self, server: SharedModel, total: Any, at: Any) -> SharedModel:
        """The mean, of at least two."""
        if len(at.participants) < 2:
            raise ZeroDivisionError("nobody to compare with")
        return super().aggregate(server, total, at)


class NeedsEverybody(FedAvg):
    """Takes for granted that all clients take part."""

    paper = "none"

    def aggregate(self, server: SharedModel, total: Any, at: Any) -> SharedModel:
        """The mean, of all."""
        assert len(at.participants) == len(at.clients), "somebody is missing"
        return super().aggregate(server, total, at)


class EachUpload(Record):
    """Models one by one."""

    weights: Each[Weights]


class TakesTheFirst(FedAvg):
    """The first model that arrives is the next one."""

    paper = "none"

    def upload(self, net: Any, data: Any, at: Any) -> Any:
        """The model."""
        return EachUpload(Each(net.pick())), at.memory

    def aggregate(self, server: SharedModel, total: Any, at: Any) -> SharedModel:
        """Whoever came first."""
        return SharedModel(next(iter(total.weights.values())))


class UnseededChance(FedAvg):
    """Draws from numpy's global generator, or so."""

    paper = "none"

    def loss(self, net: Any, x: Tensor, y: Tensor, at: Any) -> Any:
        """Cross-entropy on noisy images."""
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(torch.Generator().seed() % 2**31))
        return super().loss(net, x + noise, y, at)


class Remembers(FedAvg):
    """Keeps state outside its records: how many batches this process has seen."""

    paper = "none"
    seen: ClassVar[list[int]] = []

    def server_state(self, net: Any, at: Any) -> SharedModel:
        """The initial model. This is called when a run begins and when one is resumed."""
        self.seen.clear()
        return super().server_state(net, at)

    def loss(self, net: Any, x: Tensor, y: Tensor, at: Any) -> Any:
        """Cross-entropy, which counts more and more."""
        self.seen.append(at.round)
        return {"ce": super().loss(net, x, y, at)["ce"] * len(self.seen)}


class LeakyUpload(Record):
    """A model and pictures."""

    weights: Mean[Weights]
    pictures: Each[Features]


class Leaks(FedAvg):
    """Sends its first image along."""

    paper = "none"

    def upload(self, net: Any, data: Any, at: Any) -> Any:
        """The model, and an image."""
        x, y = next(data.batches(1))
        return LeakyUpload(Mean(net.pick(), 1.0), Each(Features(x.flatten(1), y, at.classes))), at.memory


class Shrinks(FedAvg):
    """The structure of its upload depends on the data."""

    paper = "none"

    def upload(self, net: Any, data: Any, at: Any) -> Any:
        """Only the tensors that are large enough."""
        full = net.pick()
        params = {name: tensor for name, tensor in full.params.items() if len(data.y) < 4 or tensor.numel() > 20}
        return ModelUpload(Mean(Weights(params, full.stats), 1.0)), at.memory


def test_what_is_right_passes() -> None:
    check_method(Fine)
    check_method(Fine, weighting="uniform", persist_optimizer=True)
    assert not any("fine" in name for name in method_names())


def test_other_engines_and_models() -> None:
    check_method(Fine, engine="workers")
    check_method(Fine, model="resnet10", **{"model.width": 4, "data.augment": "flip"})


@pytest.mark.parametrize(
    ("method", "complaint"),
    [
        (Anonymous, "Anonymous has no docstring"),
        (Unpublished, "set `paper`"),
        (NeedsAnArgument, "cannot be constructed with its defaults: TypeError"),
        (BadDefault, "the default of BadDefault.rate is not one of its valid values"),
        (Undescribed, "Undescribed.rate has no description"),
        (BadPreset, "the preset mine of BadPreset cannot be used"),
        (NotFinite, "NotFinite .*not finite"),
        (NeedsEveryClass, "NeedsEveryClass fails in an ordinary federation: KeyError: 'class 3'"),
        (NeedsTwoClients, "NeedsTwoClients fails with one client: ZeroDivisionError"),
        (NeedsEverybody, "somebody is missing"),
        (TakesTheFirst, "aggregate depends on the order in which uploads arrive: weights/params/"),
        (UnseededChance, "two runs with the same seed differ in .*model.safetensors"),
        (Remembers, "stopped and resumed differs from an uninterrupted one in .*model.safetensors"),
        (Leaks, "the upload of a-0 in round 1 contains a training image, in pictures/value/rows"),
        (Shrinks, "Shrinks fails in an ordinary federation: .*is missing"),
    ],
)
def test_what_is_wrong_is_named(method: Any, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_method(method)


def test_settings_are_checked() -> None:
    with pytest.raises(AssertionError, match="Fine does not take these settings: UserError: unknown setting"):
        check_method(Fine, speed=3)


def test_advice_on_knobs_can_be_followed() -> None:
    class Silent(FedAvg):
        """It has a knob without a word."""

        strength: float = knob("", default=1.0)

    with pytest.raises(AssertionError, match=r"write knob\('what it does', default=\.\.\.\)"):
        check_method(Silent)
    assert knob("what it does", default=1.0).default == 1.0
