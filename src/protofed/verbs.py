"""The words method files are written in. Pure tensor functions; "client lacks class k" is a zero count.

Formulas in the comments use the papers' letters: h features [n, d], y labels [n], k classes.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from protofed.models.layers import in_full_precision
from protofed.models.net import Net
from protofed.records import ClassTable, Mean, PrototypeSet, Record, Tally, Weights

T = TypeVar("T")

cross_entropy = functional.cross_entropy

NEVER = -1e9
"""A logit whose probability is zero; minus infinity would make the gradient of an all-masked row undefined."""


@in_full_precision
def cosine(h: Tensor, rows: Tensor) -> Tensor:
    """Cosine similarity of every h with every row, [n, m]."""
    return functional.normalize(h, dim=1, eps=1e-8) @ functional.normalize(rows, dim=1, eps=1e-8).T


def one_hot(y: Tensor, classes: int, like: Tensor) -> Tensor:
    """One-hot labels as numbers of the type of `like`, [n, C]; unlike `F.one_hot` it can be vectorised."""
    return (y[:, None] == torch.arange(classes, device=y.device)).to(like.dtype)


def class_means(h: Tensor, y: Tensor, classes: int, weight: Tensor | None = None) -> ClassTable:
    """Mean of h per class, weighted by `weight` per sample where given; the counts are the samples."""
    member = one_hot(y, classes, h)  # [n, C]
    count = member.sum(0)
    share = member if weight is None else member * weight[:, None]
    mass = share.sum(0)
    return ClassTable((share.T @ h) / torch.where(mass > 0, mass, 1.0)[:, None], count)


def exact_class_means(h: Tensor, y: Tensor, classes: int) -> ClassTable:
    """`class_means`, added up in float64."""
    means = class_means(h.double(), y, classes)
    return ClassTable(means.rows.to(h.dtype), means.count.to(h.dtype))


def pack_symmetric(matrix: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix as one vector: D(D+1)/2 numbers."""
    return matrix.reshape(-1).index_select(0, _upper_triangle(len(matrix), matrix.device))


@lru_cache(maxsize=2)
def _upper_triangle(dim: int, device: torch.device) -> Tensor:
    """Places of the upper triangle in a matrix that is read row by row; every site of a run needs the same."""
    row, column = torch.triu_indices(dim, dim, device=device)
    places: Tensor = row * dim + column
    return places


def unpack_symmetric(packed: Tensor, dim: int) -> Tensor:
    """The symmetric matrix whose upper triangle this is."""
    row, column = torch.triu_indices(dim, dim, device=packed.device)
    matrix = packed.new_empty(dim, dim)
    matrix[row, column] = packed
    matrix[column, row] = packed
    return matrix


def second_moment(h: Tensor) -> ClassTable:
    """The mean of h h' over all samples, packed, as a table of one row; added up in float64."""
    number = h.new_tensor([float(len(h))])
    wide = h.double()
    mean = pack_symmetric(wide.T @ wide) / number.double().clamp(min=1)
    return ClassTable(mean.to(h.dtype)[None], number)


def pull(h: Tensor, targets: ClassTable, y: Tensor, reduction: str = "mse", missing: str = "skip") -> Tensor:
    """Distance of each h to the prototype of its class.

    `mse`: mean over all samples and coordinates; a sample whose class has no prototype adds 0 and is counted.
    `sq_l2`: mean over the samples that have a prototype of the squared distance.
    `missing="zero"` takes the zero vector for a missing prototype instead of leaving the sample out, as soon as there
    is any prototype.
    """
    difference = h - targets.rows[y]
    held = targets.held.any().expand(targets.held.shape) if missing == "zero" else targets.held
    valid = held[y].to(h.dtype)
    squared = (difference * valid[:, None]).pow(2)
    if reduction == "mse":
        return squared.mean()
    return squared.sum() / valid.sum().clamp(min=1)


def info_nce(h: Tensor, prototypes: ClassTable, y: Tensor, tau: float) -> Tensor:
    """-log softmax of cos(h, prototype) / tau at the own class, over the classes that have a prototype.

    Mean over the samples whose class has one; exactly zero where there is none.
    """
    logits = (cosine(h, prototypes.rows) / tau).masked_fill(~prototypes.held, NEVER)
    own = logits.log_softmax(1).gather(1, y[:, None])[:, 0]
    valid = prototypes.held[y].to(h.dtype)
    return -(own * valid).sum() / valid.sum().clamp(min=1)


def nearest_prototype(h: Tensor, prototypes: ClassTable, held: Tensor) -> Tensor:
    """Probabilities from the mean squared distance to the prototypes of the classes in `held`, [n, C].

    Where no class has both a sample and a prototype, every class is as likely as any other.
    """
    distance = (h[:, None, :] - prototypes.rows).pow(2).mean(2)
    return (-distance).masked_fill(~(prototypes.held & (held > 0)), NEVER).softmax(1)


def head_or_nearest(net: Net, x: Tensor, inference: str, prototypes: ClassTable, held: Tensor) -> Tensor:
    """Class probabilities by the model's head, or by the nearest prototype among the classes in `held`."""
    if inference == "head":
        return net(x).softmax(1)
    return nearest_prototype(net.features(x), prototypes, held)


def stack_tables(tables: Iterable[ClassTable]) -> tuple[Tensor, Tensor]:
    """The clients' prototypes side by side: rows [M, C, d] and counts [M, C]."""
    listed = list(tables)
    return torch.stack([table.rows for table in listed]), torch.stack([table.count for table in listed])


def ema(new: ClassTable, old: ClassTable, share_of_new: float) -> ClassTable:
    """share x new + (1 - share) x old where both exist; otherwise `new`, never a mix with nothing."""
    both = (new.held & old.held)[:, None]
    return ClassTable(torch.where(both, share_of_new * new.rows + (1 - share_of_new) * old.rows, new.rows), new.count)


def beta_draw(alpha: float, size: int, rng: torch.Generator) -> Tensor:
    """Samples of Beta(alpha, alpha), by inversion so that they come from the given generator."""
    from scipy.special import betaincinv  # scipy takes long to import, and few methods need it

    uniform = torch.rand(size, generator=rng, dtype=torch.float64)
    return torch.from_numpy(np.asarray(betaincinv(alpha, alpha, uniform.numpy())))


def finch(vectors: Tensor) -> list[Tensor]:
    """First-neighbour clustering by cosine (Sarfraz et al., CVPR 2019): label vectors, finest partition first.

    Each vector is linked with its nearest other one; connected components are clusters, replaced by the mean of their
    original vectors, until one more level would leave a single cluster or merge nothing. That level is discarded
    unless it is the first.
    """
    labels = torch.arange(len(vectors), device=vectors.device)
    partitions: list[Tensor] = []
    centres = vectors
    while len(centres) > 1:
        merged = _first_neighbour_components(centres)[labels]
        clusters = int(merged.max()) + 1
        if partitions and clusters in (1, len(centres)):
            break
        labels = merged
        partitions.append(labels)
        if clusters == 1:
            break
        centres = class_means(vectors, labels, clusters).rows
    return partitions or [labels]


def _first_neighbour_components(vectors: Tensor) -> Tensor:
    """Labels of the components when every vector is linked with its nearest other one (ties: lowest index)."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    similarity = cosine(vectors.double(), vectors.double())
    similarity.fill_diagonal_(-torch.inf)
    neighbour = similarity.cpu().numpy().argmax(1)  # numpy promises the lowest index among equals
    size = len(vectors)
    links = coo_matrix((np.ones(size), (np.arange(size), neighbour)), shape=(size, size))
    return torch.from_numpy(connected_components(links, directed=False)[1]).long().to(vectors.device)


def finch_centres(vectors: Tensor) -> Tensor:
    """Plain means of the clusters of FINCH's coarsest partition, [clusters, d]."""
    labels = finch(vectors)[-1]
    return class_means(vectors, labels, int(labels.max()) + 1).rows


def zeros_like(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Zeros in the shape of each tensor: a control variate or a momentum before the first round."""
    return {name: torch.zeros_like(param.detach()) for name, param in params.items()}


def inner_product(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Tensor:
    """<left, right>, over all coordinates of all tensors of `left`."""
    return torch.stack([(tensor * right[name]).sum() for name, tensor in left.items()]).sum()


def proximal(params: Mapping[str, Tensor], reference: Mapping[str, Tensor], mu: float) -> Tensor:
    """(mu / 2) |params - reference|^2, summed over all coordinates of all tensors of `params`."""
    return mu / 2 * torch.stack([(param - reference[name]).pow(2).sum() for name, param in params.items()]).sum()


def joined(*parts: Weights) -> Weights:
    """Parts of a model that have no tensor in common, as one."""
    return Weights(
        {name: tensor for part in parts for name, tensor in part.params.items()},
        {name: tensor for part in parts for name, tensor in part.stats.items()},
    )


def named_as(like: Weights, weights: Weights) -> Weights:
    """The part of `weights` that has the names of `like`."""
    return Weights(
        {name: weights.params[name] for name in like.params}, {name: weights.stats[name] for name in like.stats}
    )


def class_clusters(vectors: Tensor, y: Tensor, classes: int) -> PrototypeSet:
    """The centres that FINCH finds among the vectors of each class."""
    centres = {k: finch_centres(vectors[y == k]) for k in torch.unique(y).tolist()}
    labels = [torch.full((len(rows),), k, device=y.device) for k, rows in centres.items()]
    # The empty heads give the type and shape of a set without any vector.
    return PrototypeSet(torch.cat([vectors[:0], *centres.values()]), torch.cat([y[:0], *labels]), classes)


def cluster_means(C: PrototypeSet) -> ClassTable:
    """The mean of each class's prototypes: each counts the same, however many vectors it stands for."""
    return class_means(C.rows, C.labels, C.classes)


def set_contrast(logits: Tensor, prototypes: PrototypeSet, y: Tensor) -> Tensor:
    """-log of the share the prototypes of the own class have in the softmax over all of them, [n, m] logits.

    Mean over the batch, in which a sample whose class has no prototype adds 0; exactly zero for an empty set.
    """
    own = prototypes.labels == y[:, None]
    share = logits.log_softmax(1).masked_fill(~own, NEVER).logsumexp(1)
    return torch.where(own.any(1), -share, 0.0).mean()


@in_full_precision
def gaussian_mmd(x: Tensor, y: Tensor) -> Tensor:
    """Maximum mean discrepancy of two batches under five Gaussian kernels around their mean squared distance."""
    pooled = torch.cat([x, y])
    length = pooled.pow(2).sum(1)
    squared = (length[:, None] + length - 2 * pooled @ pooled.T).clamp(min=0)
    pairs = len(pooled) * (len(pooled) - 1)
    bandwidth = (squared.detach().sum() / pairs).clamp(min=1e-12) / 4
    kernel = torch.stack([(-squared / (bandwidth * 2**j)).exp() for j in range(5)]).sum(0)
    n = len(x)
    return kernel[:n, :n].mean() + kernel[n:, n:].mean() - kernel[:n, n:].mean() - kernel[n:, :n].mean()


class _Averaged(Record, Generic[T]):
    """Lets `weighted_mean` use the tally."""

    value: Mean[T]


def weighted_mean(values: Mapping[str, T], weights: Mapping[str, float]) -> T:
    """Mean of the clients' values, for weights that only the server knows; summed just as the `Mean` of an upload."""
    tally: Tally[_Averaged[T]] = Tally()
    for client, value in values.items():
        tally.add(client, _Averaged(Mean(value, weights[client])))
    return tally.total().value
