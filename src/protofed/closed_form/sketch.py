"""Second moments of a site by their leading directions in eight bits: a hundredth of the bytes, but no sum."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from protofed.closed_form.moments import Moments
from protofed.closed_form.sums import ClassSums, subtracted
from protofed.records import ClassTable, Each, Record, map_tensors
from protofed.verbs import pack_symmetric

_TOGETHER = 128
"""Sites whose sketches are added up at once."""


class Sketch(Record):
    """The class-centred features of a site by their leading directions, in eight bits, and the variance lost."""

    free_rows = frozenset({"rows", "scale"})

    rows: Tensor  # [r, D], 128 is zero
    scale: Tensor  # [r]
    lost: Tensor  # []


class SketchedSums(ClassSums):
    """Class means, and a sketch of what is around them."""

    sketch: Sketch


class SketchUpload(Record):
    """Class means and sketch, which do not add up."""

    sums: Each[ClassTable]
    sketch: Each[Sketch]


def sketched(within: Tensor, rank: int) -> Sketch:
    """Rows [n, D] by the `rank` leading directions of their mean square, each in eight bits."""
    rows = within.double() / max(len(within), 1) ** 0.5
    kept = _leading(rows, rank)
    scale = (kept.abs().amax(1) / 127).clamp(min=1e-30).to(within.dtype)
    whole = (kept / scale.double()[:, None]).round() + 128
    sketch = Sketch(whole.clamp(1, 255).to(torch.uint8), scale, within.new_zeros(()))
    lost = rows.pow(2).sum() - _directions(sketch).pow(2).sum()
    return replace(sketch, lost=lost.clamp(min=0).to(within.dtype))


def _leading(rows: Tensor, rank: int) -> Tensor:
    """The leading right singular vectors of rows [n, D], each as long as its singular value."""
    if len(rows) > rows.shape[1]:
        _, s, V = torch.linalg.svd(rows, full_matrices=False)
        scaled: Tensor = s[:rank, None] * V[:rank]
        return scaled
    # With rows = U s V', U' rows is s V', and U is known from the small matrix of their products.
    U: Tensor = torch.linalg.eigh(rows @ rows.T).eigenvectors
    return U.flip(1)[:, :rank].T @ rows


def expanded(sketch: Sketch, dim: int) -> Tensor:
    """The mean square that a sketch stands for; what was lost is spread evenly."""
    B = _directions(sketch)
    return B.T @ B + _spread(sketch, dim)


def moments_of(sent: SketchedSums, classes: int) -> Moments:
    """What one site's sketch stands for, as means and counts in float64; one row for every group of classes."""
    n = sent.sums.count.double().view(-1, classes).sum(1)
    G = _square([_factor(sent)]) + pack_symmetric(_spread(sent.sketch, sent.sums.rows.shape[1]))
    return Moments(sent.sums, ClassTable(torch.where(n[:, None] > 0, G, 0.0), n))


def sum_of_sketches(
    tables: Mapping[str, ClassTable], sketches: Mapping[str, Sketch], like: Moments, classes: int
) -> Moments:
    """The sums over sites, each in the row of its group."""
    none = map_tensors(like, torch.zeros_like)
    sums, gram = ClassSums(none.sums), none.gram
    waiting: dict[int, list[Tensor]] = {}
    lost = torch.zeros_like(gram.count)
    for client, table in tables.items():
        sums = subtracted(sums, ClassSums(table), sign=-1)
        n = table.count.double().view(-1, classes).sum(1)
        group = int(n.argmax())
        gram.count[group] += n[group]
        rows = waiting.setdefault(group, [])
        rows.append(_factor(SketchedSums(table, sketches[client])) * n[group].sqrt())
        lost[group] += sketches[client].lost.double() * n[group]
        if len(rows) == _TOGETHER:
            gram.rows[group] += _square(waiting.pop(group))
    for group, rows in waiting.items():
        gram.rows[group] += _square(rows)
    dim = like.sums.rows.shape[1]
    evenly = pack_symmetric(torch.eye(dim, dtype=torch.float64)) / dim
    return Moments(sums.sums, ClassTable(gram.rows + lost[:, None] * evenly, gram.count))


def _directions(sketch: Sketch) -> Tensor:
    return (sketch.rows.double() - 128) * sketch.scale.double()[:, None]


def _spread(sketch: Sketch, dim: int) -> Tensor:
    return sketch.lost.double() / dim * torch.eye(dim, dtype=torch.float64, device=sketch.lost.device)


def _factor(sent: SketchedSums) -> Tensor:
    """Rows whose square is the mean of h h' at a site, but for what its sketch has lost."""
    held, count = sent.sums.held, sent.sums.count.double()
    share = count / count.sum().clamp(min=1e-300)
    return torch.cat([_directions(sent.sketch), (sent.sums.rows.double() * share.sqrt()[:, None])[held]])


def _square(factors: list[Tensor]) -> Tensor:
    rows = torch.cat(factors)
    return pack_symmetric(rows.T @ rows)
