"""FedAdapter: a frozen backbone with small adapters; the adapters and the head are all that is trained and sent.

Cai, Wu, Wang, Lin, Xu. FedAdapter: Efficient Federated Learning for Modern NLP. 2022. In the form FedAdapterProto
compares itself with: for residual networks, and without the search for the size of the adapters.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from protofed.method import At, Method, NonNegative, Samples, Step, Terms, U, Whole, knob
from protofed.methods.fedavg import ModelUpload, SharedModel
from protofed.models import Group, Split, everything, head, nothing, of_type
from protofed.models.adapters import Adapter, with_adapters
from protofed.models.net import Net
from protofed.records import Mean, Record, Weights
from protofed.registry import register
from protofed.verbs import cross_entropy, joined, proximal

adapters: Group = of_type(Adapter)
"""alpha"""


class FrozenBackboneServer(Record):
    """theta_g, which is broadcast, and the rest of the model as it was in the beginning, where it stays."""

    shared: SharedModel
    rest: Weights


class FrozenBackbone(Method[U]):
    """What the methods of this family have in common: the backbone never moves and never travels."""

    trains_backbone = False
    run_defaults: ClassVar[Mapping[str, Any]] = {"optimizer": "adam", "lr": 1e-3}
    trained: ClassVar[Group]
    """The little that is trained."""

    load_global: bool = knob(
        "start a round from the global weights, or keep the client's own and only pull them towards the global ones",
        default=True,
    )

    freeze: bool = knob("freeze the backbone, or let every client train its own", default=True)
    freeze_bn: bool = knob(
        "keep the running statistics of a frozen backbone, or let them drift during each client's training",
        default=True,
    )

    @property
    def shares(self) -> Group:
        """theta; all that is trained unless a method says otherwise."""
        return self.trained

    @property
    def loads(self) -> Group:
        """What a client takes over from the server."""
        return self.shares if self.load_global else nothing

    @property
    def steps(self) -> tuple[Step, ...]:
        """One step on the part that is not frozen."""
        return (Step(trains=self.trained if self.freeze else everything),)

    @property
    def freezes_statistics(self) -> bool:
        """Unless they drift, as in the released code."""
        return self.freeze_bn

    @property
    def kind(self) -> Literal["global", "personal", "both"]:
        """A backbone that moves is each client's own, as it does not travel."""
        moves = not (self.freeze and self.freeze_bn)
        return "both" if moves and self.load_global else super().kind

    def server_state(self, net: Net, at: At) -> FrozenBackboneServer:
        """The initial model, in two parts."""
        return FrozenBackboneServer(SharedModel(net.pick(self.shares)), net.pick(everything - self.shares))

    def broadcast(self, server: FrozenBackboneServer, at: At) -> SharedModel:
        """Only what is shared."""
        return server.shared

    def prox(self, net: Net, group: Group, mu: float, at: At) -> Tensor:
        """mu/2 |theta - theta_g|^2 over a group; before the first average there is nothing to be pulled to."""
        return proximal(net.params(group), at.down.weights.params, mu if at.round > 0 else 0.0)

    def global_weights(self, server: FrozenBackboneServer) -> Weights | None:
        """The frozen backbone with the averaged rest, unless clients keep some of what they train."""
        return joined(server.shared.weights, server.rest) if self.kind == "global" else None


class AveragesShared(FrozenBackbone[ModelUpload]):
    """All that is shared is averaged alike."""

    def upload(self, net: Net, data: Samples, at: At) -> tuple[ModelUpload, Record]:
        """theta_i, what was trained and is shared."""
        return ModelUpload(Mean(net.pick(self.shares), self.weight(at))), at.memory

    def aggregate(self, server: FrozenBackboneServer, total: ModelUpload, at: At) -> FrozenBackboneServer:
        """The weighted mean."""
        return FrozenBackboneServer(SharedModel(total.weights), server.rest)


class WithAdapters(FrozenBackbone[U]):
    """The adapters' own hyper-parameters and regulariser."""

    reduction: Whole = knob("ratio of a stage's channels to its adapter's channels", default=16)
    beta: NonNegative = knob("weight of the squared norm of the adapters", default=1e-5)
    adapter_init: Literal["zero_up", "kaiming"] = knob(
        "adapters start as the identity, or with random weights", default="zero_up"
    )
    adapter_kernel: Whole = knob("kernel size of the adapters' convolutions", default=1)

    def adapted(self, base: Split) -> Split:
        """The model with its adapters."""
        return with_adapters(base, reduction=self.reduction, kernel=self.adapter_kernel, init=self.adapter_init)

    def norm(self, net: Net) -> Tensor:
        """beta |alpha|^2."""
        return self.beta * torch.stack([alpha.pow(2).sum() for alpha in net.params(adapters).values()]).sum()


@register("fedadapter")
class FedAdapter(WithAdapters[ModelUpload], AveragesShared):
    """Small bottleneck adapters fit a frozen residual network to the task; they are averaged along with the head."""

    paper = "Cai et al., FedAdapter: Efficient Federated Learning for Modern NLP, 2022 (as used by FedAdapterProto)"
    sends_up = "weights of the adapters and the head, sample count"
    sends_down = "weights of the adapters and the head"
    readings = (
        "C2: the paper loads the global weights, the released code only pulls towards them; we load them "
        "(load_global).",
        "C3: the released code trains the backbone, and lets its normalisation drift even when it does not; here "
        "the whole backbone is fixed (freeze, freeze_bn).",
        "Proximal term: the paper does not say whether it covers the head; it covers everything that is sent.",
        "Regulariser: we use the paper's squared norm; the released code adds up unsquared norms.",
        "Initial weights: the released code starts adapters at random; here they start as the identity (adapter_init).",
        "C7: trained with Adam, as in the released code, at a learning rate of 0.001 unless the user sets another.",
    )
    presets = {"authors": {"load_global": False, "freeze": False, "freeze_bn": False, "adapter_init": "kaiming"}}
    trained = adapters + head
    separable = True

    mu: NonNegative = knob("strength of the pull of adapters and head towards the global ones", default=0.01)

    def build(self, base: Split, at: At) -> Split:
        """An adapter after each stage; the head stays."""
        return self.adapted(base)

    def loss(self, net: Net, x: Tensor, y: Tensor, at: At) -> Terms:
        """Cross-entropy, small adapters, near the global ones."""
        return {
            "ce": cross_entropy(net(x), y),
            "adapter": self.norm(net),
            "prox": self.prox(net, self.shares, self.mu, at),
        }


@register("fedadapter_noprox")
class FedAdapterNoProx(FedAdapter):
    """FedAdapter without the proximal term: adapters are trained freely and averaged."""

    mu: NonNegative = knob("strength of the pull of adapters and head towards the global ones", default=0.0)
