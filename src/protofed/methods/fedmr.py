"""FedMR: features that fill all dimensions inside a class, and margins that reserve room for classes a client lacks.

Fan, Yao, Zhang, Zhang, Wang. Federated Learning under Partially Class-Disjoint Data via Manifold Reshaping. TMLR 2023.
"""

from typing import Literal

import torch
from torch import Tensor

from protofed.method import At, Method, NonNegative, Notes, Samples, Terms, knob
from protofed.methods.fedavg import ModelUpload, SharedModel
from protofed.methods.fedproto import ModelAndPrototypes
from protofed.methods.fpl import SeparatePrototypeUpload
from protofed.models.net import Net
from protofed.records import ClassTable, Each, Mean, Record
from protofed.registry import register
from protofed.verbs import class_means, cross_entropy, one_hot, stack_tables


class ModelAndMargins(ModelAndPrototypes):
    """Server state and broadcast: the model, the class means G and the margins D.

    D has one row per pair of classes, held where a client owns both.
    """

    D: ClassTable


@register("fedmr")
class FedMR(Method[ModelUpload]):
    """A global model for clients that hold different classes: features of a class are decorrelated, so that they do
    not collapse, and kept closer to their own global class mean than to the others."""

    paper = "Fan et al., Federated Learning under Partially Class-Disjoint Data via Manifold Reshaping, TMLR 2023"
    sends_up = "weights, sample count; class means and counts (variant=full)"
    sends_down = "weights; global class means and the margins between them (variant=full)"
    readings = (
        "L_inter is in the paper but not in the released code; we include it (variant).",
        "L_intra: the paper scales the squared norm of the correlation matrix; the released code takes the mean "
        "of its squared off-diagonal entries and divides by the number of samples; we follow the code.",
        "Weights: the released code counts batches; we count samples (weighting).",
        "A pair of classes that no client holds together has no margin; it is left out of L_inter.",
    )
    presets = {"authors": {"variant": "intra_only"}}

    mu_intra: NonNegative = knob("weight of the decorrelation inside classes", default=1e-5)
    mu_inter: NonNegative = knob("weight of the margins between classes", default=0.5)
    variant: Literal["full", "intra_only"] = knob(
        "both terms, or only the first, with FedAvg's messages", default="full"
    )

    def server_state(self, net: Net, at: At) -> SharedModel:
        """The initial model, no class mean and no margin yet."""
        if self.variant == "intra_only":
            return SharedModel(net.pick())
        G = net.empty_table()
        return ModelAndMargins(net.pick(), G, ClassTable.empty(at.classes * (at.classes - 1) // 2, 1, like=G.rows))

    def loss(self, net: Net, x: Tensor, y: Tensor, at: At) -> tuple[Terms, Notes]:
        """CE + mu_intra L_intra + mu_inter L_inter."""
        h = net.features(x)
        terms = {
            "ce": cross_entropy(net.head(h), y),
            "intra": self.mu_intra * decorrelation(h, y, at.classes),
        }
        if self.variant == "full":
            terms["inter"] = self.mu_inter * margin_loss(h, y, at.down.G, at.down.D)
        return terms, {"h": h, "y": y}

    def upload(self, net: Net, data: Samples, at: At) -> tuple[ModelUpload, Record]:
        """The model, and the mean feature of each class."""
        weights = Mean(net.pick(), self.weight(at))
        if self.variant == "intra_only":
            return ModelUpload(weights), at.memory
        observed = self.observations(net, data, at)
        P = class_means(observed["h"], observed["y"], at.classes)
        # One by one: a margin is a distance between two means of the same client.
        return SeparatePrototypeUpload(weights, Each(P)), at.memory

    def aggregate(self, server: SharedModel, total: ModelUpload, at: At) -> SharedModel:
        """Averaged weights; the means over all samples, and the margins over the clients that own both classes."""
        if not (isinstance(server, ModelAndMargins) and isinstance(total, SeparatePrototypeUpload)):
            return SharedModel(total.weights)  # variant=intra_only
        tables = list(total.P.values())
        G, D = global_means(tables), margins(tables)
        return ModelAndMargins(total.weights, self.refreshed(G, server.G), self.refreshed(D, server.D))


def decorrelation(h: Tensor, y: Tensor, classes: int) -> Tensor:
    """L_intra: mean squared off-diagonal entry of C = Z'Z of each class, over the samples of classes that have two."""
    member = one_hot(y, classes, h)
    count = member.sum(0)
    used = (count[y] > 1).to(h.dtype)
    centred = h - class_means(h, y, classes).rows[y]
    variance = (member.T @ centred.pow(2)) / (count - 1).clamp(min=1)[:, None]
    Z = centred / (variance[y] + 1e-8).sqrt() * used[:, None]
    # |Z'Z|^2 = |ZZ'|^2, so the matrix that is built is n x n and not d x d; the diagonal of Z'Z is taken off.
    squares = ((Z @ Z.T).pow(2) * (y[:, None] == y)).sum()
    diagonal = (member.T @ Z.pow(2)).pow(2).sum()
    d = h.shape[1]
    return (squares - diagonal) / max(d * (d - 1), 1) / used.sum().clamp(min=1)


def margin_loss(h: Tensor, y: Tensor, G: ClassTable, D: ClassTable) -> Tensor:
    """L_inter: the mean of `hinges` over the pairs that have a margin; exactly zero where there are none."""
    terms, known = hinges(h, y, G, D)
    return (terms * known).sum() / known.sum().clamp(min=1)


def hinges(h: Tensor, y: Tensor, G: ClassTable, D: ClassTable) -> tuple[Tensor, Tensor]:
    """max(0, |h - G[a]| - |h - G[b]| + D_ab) of each sample of class a and every class b, and whether it counts."""
    a, b = y[:, None], torch.arange(len(G.count), device=y.device)
    distance = torch.linalg.vector_norm(h[:, None] - G.rows, dim=2)  # [n, C]
    pair = pair_index(a, b, len(G.count))
    known = (a != b) & D.held[pair] & G.held & G.held[y][:, None]
    return (distance.gather(1, a) - distance + D.rows[pair, 0]).relu(), known


def pair_index(a: Tensor, b: Tensor, classes: int) -> Tensor:
    """Where the pair {a, b} stands in the order (0, 1), (0, 2), ..., (1, 2), ...; anything valid where a = b."""
    low, high = torch.minimum(a, b), torch.maximum(a, b)
    return (low * (2 * classes - low - 3) // 2 + high - 1).clamp(0, classes * (classes - 1) // 2 - 1)


def global_means(tables: list[ClassTable]) -> ClassTable:
    """G[k], in which every sample of every client counts the same."""
    rows, count = stack_tables(tables)
    total = count.sum(0)
    mean = (rows.double() * count[:, :, None]).sum(0) / total.clamp(min=1)[:, None]
    return ClassTable(mean.to(rows.dtype), total)


def margins(tables: list[ClassTable]) -> ClassTable:
    """D_ab, the distance between two class means of a client, averaged over the clients that own both classes."""
    rows, count = stack_tables(tables)
    a, b = torch.triu_indices(count.shape[1], count.shape[1], offset=1, device=rows.device)
    both = ((count[:, a] > 0) & (count[:, b] > 0)).to(rows.dtype)  # [M, pairs]
    distance = torch.linalg.vector_norm(rows[:, a] - rows[:, b], dim=2)
    owners = both.sum(0)
    return ClassTable(((distance * both).sum(0) / owners.clamp(min=1))[:, None], owners)
