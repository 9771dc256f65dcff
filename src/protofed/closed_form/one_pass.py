"""One exchange without training: sites send statistics of features that never change, and the head follows from sums.

Subclasses are the methods; what they send and how a head is computed from it is all they add.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from protofed.closed_form.sums import ClassSums, ClassSumsUpload, added_up, doubled, means_of, subtracted
from protofed.errors import UserError
from protofed.method import At, Method, Plan, Samples, Step, SumSensitivity, Terms, U, Whole, knob
from protofed.models import Split, everything, head
from protofed.models.net import Net
from protofed.models.unit_length import HEAD, with_unit_features
from protofed.records import ClassTable, Record, Tally, Weights
from protofed.verbs import NEVER, cross_entropy, exact_class_means, joined

_NAMED = 5
"""Sites that a warning names."""


class ComputedHead(Record):
    """What the server sends: the head."""

    weights: Weights


class OnePassServer(Record):
    """The head, which is broadcast, the rest of the model, which never changes, and what the head is computed from."""

    shared: ComputedHead
    rest: Weights
    total: ClassSums


S = TypeVar("S", bound=OnePassServer)


class OnePass(Method[U]):
    """What the family has in common: features of length 1 that never change, and a head computed from sums over sites.

    A subclass says what a site sends (`statistics`, whose fields are class tables that add up) and what head follows
    from the sums (`closed_form`).
    """

    trains_backbone = False
    shares = head
    steps = (Step(trains=head),)
    sends_down = "weights of the head"

    min_count: Whole = knob("leave out classes for which a site has fewer images", default=1)

    @property
    def separable(self) -> bool:
        """Sums of single images; `sum_sensitivity` says what one of them can change."""
        return True

    def sum_sensitivity(self, unit: Literal["sample", "client"], bound: float, at: At) -> Mapping[str, SumSensitivity]:
        """An image changes one class sum by at most its length, and one count by 1."""
        if unit == "sample" and self.min_count > 1:
            raise UserError(
                "guard: with min_count one image can let several others in, so its effect is not bounded; noise "
                "covers small classes, so omit min_count"
            )
        return {"sums": SumSensitivity(min(bound, 1.0))}

    def cautions(self, each: Sequence[At], classes: Sequence[str]) -> list[str]:
        """Where a class mean is the feature of a single image, and which classes are left out."""
        few = {at.client: (at.held > 0) & (at.held < max(self.min_count, 2)) for at in each}
        named = [
            f"{client} ({', '.join(classes[k] for k in found.nonzero())})"
            for client, found in few.items()
            if found.any()
        ]
        covered = all(at.noise > 0 for at in each)
        if not named or covered:
            return []
        sites = ", ".join(named[:_NAMED]) + (f" and {len(named) - _NAMED} more sites" if len(named) > _NAMED else "")
        if self.min_count == 1:
            return [f"a class with one image sends that image's feature (min_count=2 leaves it out): {sites}"]
        return [f"classes with fewer than {self.min_count} images are left out: {sites}"]

    def plan(self, plan: Plan) -> Plan:
        """One exchange, in which nothing is trained."""
        return replace(plan, epochs=(0,))

    def build(self, base: Split, at: At) -> Split:
        """h = phi(x) / |phi(x)|, and a linear head."""
        return with_unit_features(base)

    def loss(self, net: Net, x: Tensor, y: Tensor, at: At) -> Terms:
        """Cross-entropy, where training follows."""
        return {"ce": cross_entropy(net(x), y)}

    def no_statistics(self, net: Net, at: At) -> Any:
        """The record of `statistics` of nobody."""
        return ClassSums(net.empty_table())

    def statistics(self, net: Net, data: Samples, at: At) -> Any:
        """What a site has to say of its images, as means and counts."""
        h, y = self.rows(net, data, at)
        return ClassSums(exact_class_means(h, y, at.classes))

    def rows(self, net: Net, data: Samples, at: At) -> tuple[Tensor, Tensor]:
        """Features and labels of the images that statistics are made of."""
        seen = self.observations(net, data, at)
        h, y = seen["h"], seen["y"]
        enough = torch.bincount(y, minlength=at.classes)[y] >= self.min_count
        return (h, y) if bool(enough.all()) else (h[enough], y[enough])

    def closed_form(self, server: Any, at: At) -> tuple[Tensor, Tensor]:
        """W [C, D] and b [C] from the sums, in float64; `at.participants` are those who sent them."""
        raise TypeError(f"{type(self).__name__} must define closed_form(server, at)")

    def server_state(self, net: Net, at: At) -> OnePassServer:
        """A head of zeros, nothing added up yet."""
        rest = net.pick(everything - head)
        return OnePassServer(ComputedHead(net.pick(head)), rest, doubled(self.no_statistics(net, at)))

    def client_state(self, net: Net, at: At) -> Record:
        """What a site has sent, which it remembers so that it can be taken back; nothing yet."""
        return self.no_statistics(net, at)  # type: ignore[no-any-return]

    def broadcast(self, server: OnePassServer, at: At) -> ComputedHead:
        """The head."""
        return server.shared

    def upload(self, net: Net, data: Samples, at: At) -> tuple[U, Record]:
        """The statistics, once."""
        sent = self.statistics(net, data, at) if at.round == 0 else self.no_statistics(net, at)
        return self.packed(sent, net, at), sent if at.round == 0 else at.memory

    def packed(self, sent: Any, net: Net, at: At) -> Any:
        """The statistics as an upload."""
        return ClassSumsUpload(added_up(sent.sums))

    def aggregate(self, server: Any, total: Any, at: At) -> Any:
        """The head that follows from the sums."""
        sums = {name: getattr(total, name) for name in vars(server.total)}
        return self.with_head(replace(server, total=replace(server.total, **sums)), at)

    def with_head(self, server: S, at: At) -> S:
        """The server's state with the head computed anew; a class that nobody has is never predicted."""
        W, b = self.closed_form(server, at)
        absent = server.total.sums.count.view(-1, at.classes).sum(0) <= 0
        b = torch.where(absent, NEVER, b)
        return replace(server, shared=replace(server.shared, weights=head_weights(W, b, server.shared.weights)))

    def forget(self, server: Any, memory: Any, at: At) -> Any:
        """A subtraction."""
        self.refuse_unless_sum()
        return self.with_head(replace(server, total=subtracted(server.total, memory)), at)

    def include(self, server: Any, memory: Any, at: At) -> Any:
        """An addition."""
        self.refuse_unless_sum()
        return self.with_head(replace(server, total=subtracted(server.total, memory, sign=-1)), at)

    def memory_of(self, upload: Any, like: Any) -> Any:
        """The statistics, which are sent as they are."""
        return replace(like, **{name: getattr(upload, name).value for name in vars(like)})

    def refuse_unless_sum(self) -> None:
        """Raise where the server's state is more than a sum over sites and what follows from it."""

    def global_weights(self, server: OnePassServer) -> Weights:
        """The head on what never changes."""
        return joined(server.shared.weights, server.rest)

    def client_weights(self, server: Any, upload: Any, at: At) -> Weights:
        """The head of one site's statistics alone."""
        tally: Tally[Any] = Tally()
        tally.add(str(at.client), upload)
        alone = self.aggregate(server, tally.total(), replace(at, participants=(str(at.client),)))
        return self.global_weights(alone)

    def global_prototypes(self, server: Any) -> ClassTable | None:
        """The class means."""
        return means_of(server.total.sums)


class FineTuned(OnePass[U]):
    """A one-pass method after which the head may be trained, by FedAvg."""

    finetune: Annotated[int, Field(ge=0)] = knob("number of FedAvg rounds on the head that follow", default=0)

    def plan(self, plan: Plan) -> Plan:
        """The exchange, and as many rounds as are asked for, of as many epochs as a round is to have."""
        return replace(plan, epochs=(0,) + (plan.epochs[0],) * self.finetune)

    def aggregate(self, server: OnePassServer, total: Any, at: At) -> OnePassServer:
        """After the first round the head is the mean of those that were trained."""
        if at.round == 0:
            return super().aggregate(server, total, at)  # type: ignore[no-any-return]
        return replace(server, shared=ComputedHead(total.weights))

    def sum_sensitivity(self, unit: Literal["sample", "client"], bound: float, at: At) -> Mapping[str, SumSensitivity]:
        """Of the exchange; what training would add to it is not covered."""
        if self.finetune:
            raise UserError("guard: noise covers the sums, but not the training that follows; omit finetune")
        return super().sum_sensitivity(unit, bound, at)

    def refuse_unless_sum(self) -> None:
        """What training took from a site stays in the head."""
        if self.finetune:
            raise UserError(
                "the head was trained after it was computed, and what it learnt stays in it; run with finetune=0"
            )


def head_weights(W: Tensor, b: Tensor, like: Weights) -> Weights:
    """`like` with W and b for its head."""
    values = {f"{HEAD}.weight": W, f"{HEAD}.bias": b}
    params = {name: values[name].to(tensor) if name in values else tensor for name, tensor in like.params.items()}
    return Weights(params, like.stats)
