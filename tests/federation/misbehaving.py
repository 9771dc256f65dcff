"""Methods that go wrong, given to runs as `misbehaving.py:Class` so that no registry learns of them."""

import math
import os
import signal
from typing import Any

from torch import Tensor

from protofed.method import At, knob
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedproto import FedProto
from protofed.records import map_tensors


class Breaks(FedAvg):
    """Raises at the clients whose name starts with a letter of `who`, from a round on."""

    who: str = knob("first letters of the clients that break", default="b")
    since: int = knob("first round in which they break", default=0)
    until: int = knob("first round in which they do not break any more", default=1000)

    def loss(self, net: Any, x: Tensor, y: Tensor, at: At) -> Any:
        """Cross-entropy, or an error."""
        if at.client is not None and at.client[0] in self.who and self.since <= at.round < self.until:
            raise ValueError(f"no luck at {at.client}")
        return super().loss(net, x, y, at)


class AggregatesWithout(Breaks):
    """Breaks at some clients, and fails where the server is told that they took part."""

    def aggregate(self, server: Any, total: Any, at: At) -> Any:
        """The mean, unless somebody is said to have taken part who has not."""
        if any(client[0] in self.who for client in at.participants):
            raise ValueError(f"told of {at.participants}")
        return super().aggregate(server, total, at)


class OneCounts(FedAvg):
    """In an ensemble only one client counts."""

    who: str = knob("the client", default="a-0")

    def member_weight(self, at: At) -> float:
        """All or nothing."""
        return float(at.client == self.who)


class Dies(FedAvg):
    """In one round the process that trains client b is killed in the middle of a batch."""

    since: int = knob("the round in which it dies", default=1)

    def loss(self, net: Any, x: Tensor, y: Tensor, at: At) -> Any:
        """Cross-entropy, or death."""
        if at.client == "b-0" and at.round == self.since:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(net, x, y, at)


class Diverges(FedProto):
    """The loss of client b is not a number."""

    def loss(self, net: Any, x: Tensor, y: Tensor, at: At) -> Any:
        """FedProto's, times infinity at b."""
        terms, notes = super().loss(net, x, y, at)
        return ({name: value * math.inf for name, value in terms.items()} if at.client == "b-0" else terms), notes


class Explodes(FedAvg):
    """From a round on nobody's weights are finite any more."""

    since: int = knob("first round, from 0, that nobody survives", default=3)

    def loss(self, net: Any, x: Tensor, y: Tensor, at: At) -> Any:
        """Cross-entropy, in the end times infinity."""
        terms = super().loss(net, x, y, at)
        return {name: value * math.inf for name, value in terms.items()} if at.round >= self.since else terms


class Overflows(FedAvg):
    """What clients send is finite, what the server makes of it is not, from its second round on."""

    def aggregate(self, server: Any, total: Any, at: At) -> Any:
        """The mean, or infinity."""
        mean = super().aggregate(server, total, at)
        return map_tensors(mean, lambda tensor: tensor * math.inf) if at.round else mean


class Forgets(FedAvg):
    """Unlearns: from a round on its clients climb the loss instead of going down."""

    since: int = knob("first round, from 0, in which they climb", default=6)

    def loss(self, net: Any, x: Tensor, y: Tensor, at: At) -> Any:
        """Cross-entropy, in the end that of the next class."""
        return super().loss(net, x, (y + 1) % at.classes if at.round >= self.since else y, at)


class Linear(FedAvg):
    """Has a second, negative term, and weights its cross-entropy."""

    ce_term = "mine"

    def ce_share(self, at: At) -> float:
        """A quarter, and nothing in the second round."""
        return 0.25 if at.round != 1 else 0.0

    def loss(self, net: Any, x: Tensor, y: Tensor, at: At) -> Any:
        """A part of the cross-entropy, and less than nothing."""
        ce = super().loss(net, x, y, at)["ce"]
        return {"mine": self.ce_share(at) * ce, "linear": 0 * ce - 5.0}


class Choosy(FedAvg):
    """Refuses to upload from few samples."""

    least: int = knob("fewest samples", default=1)

    def upload(self, net: Any, data: Any, at: At) -> Any:
        """The model, if there are enough samples; the rehearsal, with its two blank images, passes."""
        if 2 < len(data.y) < self.least:
            raise RuntimeError("too few")
        return super().upload(net, data, at)
