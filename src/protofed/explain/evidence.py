"""What spoke for a decision: the prototypes of a model, how near the image came to them, and where.

Part prototypes (fedprototypical, fedadapterproto) are compared with every patch: the logit is the sum of
weight x similarity of the nearest patch. Class prototypes (every other prototype method) are compared with the
features; the map is the similarity of every position of the last feature stage. A linear head on pooled patches has
evidence that adds up to its logits (`exact`).

A contribution of weight x similarity cannot be ranked as it is: with the similarity -d a prototype that was not found
at all adds most. So prototypes are ranked by their `lift`: how much the place where they were found moves the decision
beyond what an average place of the same image would.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from protofed.closed_form.one_pass import OnePass
from protofed.errors import UserError
from protofed.explain.exact import decides_by_patches, explain_exactly
from protofed.explain.explanation import Evidence, Explanation
from protofed.explain.maps import enlarged, peak_box, peak_of
from protofed.method import At, Method
from protofed.models.groups import part
from protofed.models.net import Net
from protofed.models.protopnet import prototypes_of
from protofed.records import ClassTable
from protofed.runs.opened import GLOBAL, OpenRun, batches
from protofed.verbs import cosine

EvidenceKind = Literal["exact", "parts", "classes"]
"""Sums over patches that are the logits; part prototypes; class prototypes."""


def explain_with(
    opened: OpenRun, client: str, pixels: Tensor, top: int, projected: bool = False, by: str = "auto", shifts: int = 1
) -> list[Explanation]:
    """One client's view of images [n, C, H, W] of the run's shape; uses its model and the images, nothing else.

    `projected`: with its part prototypes as they lie after a projection, where there was one. `by`: see
    `kind_of_evidence`. `shifts`: of exact evidence, how many times finer than the network's own maps it is to be.
    """
    kind = kind_of_evidence(opened, client, by)
    if shifts > 1 and kind != "exact":
        raise UserError("--shifts refines maps of exact evidence; prototypes are looked up in the image itself")
    net, at = opened.model_of(client)
    if kind == "parts" and projected:
        place_projected(opened, client, net)
    table = opened.prototypes() if kind == "classes" else None
    explanations: list[Explanation] = []
    for x in batches(opened.normalised(pixels)):
        if kind == "exact":
            explanations += explain_exactly(net, opened.method, at, client, x, top, shifts)
        elif table is not None:
            explanations += _of_classes(net, opened.method, at, client, x, top, table)
        else:
            explanations += _of_parts(net, opened.method, at, client, x, top)
    return explanations


def kind_of_evidence(opened: OpenRun, client: str, by: str = "auto") -> EvidenceKind:
    """By what a client's decisions can be explained: `exact` or `prototypes`, or `auto`.

    That is part prototypes where the network has them, since it decides by them; exact evidence where the head was
    computed or there are no prototypes; else class prototypes.
    """
    net, _ = opened.model_of(client)
    name, model = opened.config["method"]["name"], opened.config["model"]["name"]
    if has_parts(net):
        if by == "exact":
            raise UserError(f"{name} decides by part prototypes, which are its evidence; omit --evidence")
        return "parts"
    exact, table = decides_by_patches(net, opened.method), opened.prototypes()
    if by == "exact" and not exact:
        raise UserError(f"{name} with {model} has no exact evidence: {_EXACT}")
    if exact and (by == "exact" or (by == "auto" and (table is None or isinstance(opened.method, OnePass)))):
        if client != GLOBAL and nobody_trained(opened):
            raise UserError(f"with {name} all sites use the server's model, so explain that: --clients {GLOBAL}")
        return "exact"
    if table is None:
        raise UserError(f"{name} with {model} cannot be explained: it keeps no prototypes, and {_EXACT}")
    return "classes"


_EXACT = (
    "its logits are not sums over positions, as they would be if the network averaged its feature maps and ended "
    "in one linear layer (resnet10, resnet18, resnet50, efficientnet_lite0)"
)


def nobody_trained(opened: OpenRun) -> bool:
    """Whether sites have nothing of their own in their models, since these were computed at the server."""
    return not any(opened.context.plan.epochs) and opened.method.kind == "global"


def has_parts(net: Net) -> bool:
    """Whether a model decides by part prototypes."""
    return "prototypes" in net.model.stage_names


def place_projected(opened: OpenRun, client: str, net: Net) -> bool:
    """Put the client's projected prototypes into its model, where there are some."""
    vectors = prototypes_of(net.model).vectors
    sources = opened.sources_of(client, vectors.detach())
    if sources is None:
        return False
    with torch.no_grad():
        vectors.copy_(sources.vectors)
    return True


@torch.no_grad()
def source_patches(opened: OpenRun, client: str, prototypes: Sequence[int]) -> dict[int, NDArray[np.uint8]]:
    """The piece of the client's own training images that comes nearest to each prototype, [h, w, C].

    They were found by a projection; without one there are none.
    """
    net, _ = opened.model_of(client)
    sources = opened.sources_of(client, prototypes_of(net.model).vectors.detach()) if has_parts(net) else None
    if sources is None:
        return {}
    projected = [j for j in prototypes if sources.image[j] >= 0]
    if not projected:
        return {}
    pixels = sources.pixels[projected]
    with net.eval():
        maps = net.call("similarity", net.features(opened.normalised(pixels), "prototypes"))
    patches = {}
    for i, j in enumerate(projected):
        box = peak_box(enlarged(maps[i, j], (pixels.shape[2], pixels.shape[3])).numpy())
        if box is not None:
            patches[j] = pixels[i].permute(1, 2, 0).numpy()[box.top : box.bottom, box.left : box.right]
    return patches


@torch.no_grad()
def _of_parts(net: Net, method: Method, at: At, client: str, x: Tensor, top: int) -> list[Explanation]:
    with net.eval():
        probabilities = method.predict(net, x, at)
        maps = net.call("similarity", net.features(x, "prototypes"))  # [n, m, h, w]
    similarity = maps.flatten(2).amax(2)
    weight = net.params(part("last"))["last.weight"][probabilities.argmax(1)]  # [n, m]
    lift = weight * (similarity - maps.flatten(2).mean(2))
    labels = prototypes_of(net.model).labels
    loudest = lift.argmax(1)
    return _explanations(client, x, probabilities, maps, labels, similarity, weight * similarity, lift, loudest, top)


def _of_classes(
    net: Net, method: Method, at: At, client: str, x: Tensor, top: int, table: ClassTable
) -> list[Explanation]:
    if table.rows.shape[1] != net.dim:
        raise UserError(
            f"the prototypes of this run have {table.rows.shape[1]} dimensions and the model's features "
            f"{net.dim}; only prototypes of the model's features can be looked up in an image"
        )
    held = table.held.nonzero()[:, 0]
    if not len(held):
        raise UserError("this run has no class prototypes yet; choose a later round")
    rows = table.rows[held].to(x.dtype)
    with torch.no_grad(), net.eval():
        probabilities = method.predict(net, x, at)
        similarity = cosine(net.features(x), rows)
    maps = similarity_maps(net, x, rows)
    sign = torch.where(held == probabilities.argmax(1, keepdim=True), 1.0, -1.0)
    lift = sign * (maps.flatten(2).amax(2) - maps.flatten(2).mean(2))
    contribution = similarity - similarity.mean(1, keepdim=True)
    nearest = similarity.argmax(1)
    return _explanations(client, x, probabilities, maps, held, similarity, contribution, lift, nearest, top)


def similarity_maps(net: Net, x: Tensor, rows: Tensor) -> Tensor:
    """How alike every position of the last feature stage is to each row, [n, m, h, w].

    Where the features are the pooled channels of that stage, the cosine of a position's channels with the row.
    Otherwise layers lie in between, and a position's share in the cosine is taken: its channels times their gradient.
    """
    stage = _last_map(net, x)
    names = net.model.stage_names
    between = names[names.index(stage) + 1 : names.index(net.model.cut) + 1]
    with net.eval():
        maps = net.features(x, stage).detach().requires_grad_(True)
        features = maps
        for name in between:
            features = net.call(name, features)
        pooled = maps.mean((2, 3))
        if pooled.shape == features.shape and torch.allclose(pooled, features, rtol=1e-4, atol=1e-5):
            n, d, h, w = maps.shape
            alike = cosine(maps.detach().permute(0, 2, 3, 1).reshape(-1, d), rows)
            return alike.view(n, h, w, -1).permute(0, 3, 1, 2)
        # The length of the features is held still: a share in a cosine proper would always sum to zero.
        similarity = _along(features.flatten(1), rows)
        shares = [
            (maps * torch.autograd.grad(similarity[:, j].sum(), maps, retain_graph=True)[0]).sum(1)
            for j in range(len(rows))
        ]
    return torch.stack(shares, 1).detach()


def _along(features: Tensor, rows: Tensor) -> Tensor:
    """The cosine of features with rows, in which the length of the features is a constant."""
    length = features.detach().norm(dim=1, keepdim=True).clamp(min=1e-8)
    alike: Tensor = features / length @ functional.normalize(rows, dim=1, eps=1e-8).T
    return alike


def _last_map(net: Net, x: Tensor) -> str:
    """The last stage before the features that still has places."""
    names = net.model.stage_names
    until = names.index(net.model.cut) + 1
    spatial = [name for name in names[:until] if len(net.model.feature_shape(tuple(x.shape[1:]), name)) == 3]  # type: ignore[arg-type]
    if not spatial:
        raise UserError(
            "this model has no feature maps, so nothing can be localised in an image; use a convolutional model"
        )
    return spatial[-1]


def _explanations(
    client: str,
    x: Tensor,
    probabilities: Tensor,
    maps: Tensor,
    labels: Tensor,
    similarity: Tensor,
    contribution: Tensor,
    lift: Tensor,
    first: Tensor,
    top: int,
) -> list[Explanation]:
    """One for each image; the prototype `first` comes first in it, the others by their lift."""
    size = (x.shape[2], x.shape[3])
    positions = (maps.shape[2], maps.shape[3])
    result = []
    for i in range(len(x)):
        ranked = _ranked(lift[i], int(first[i]))[:top]
        large = enlarged(maps[i][ranked], size).float().cpu().numpy()
        peaks = [peak_of(values) for values in large]
        evidence = tuple(
            Evidence(
                prototype=j if len(labels) > probabilities.shape[1] else int(labels[j]),
                label=int(labels[j]),
                similarity=float(similarity[i, j]),
                contribution=float(contribution[i, j]),
                lift=float(lift[i, j]),
                map=large[rank],
                box=None if peak is None else peak.box,
                positions=positions,
                scattered=peak is not None and peak.scattered,
            )
            for rank, (j, peak) in enumerate(zip(ranked, peaks, strict=True))
        )
        result.append(Explanation(client, tuple(probabilities[i].tolist()), evidence))
    return result


def _ranked(lift: Tensor, first: int) -> list[int]:
    """By how much they speak, behind the one that is named."""
    by_lift: Sequence[int] = lift.abs().argsort(descending=True, stable=True).tolist()
    return [first, *(j for j in by_lift if j != first)]
