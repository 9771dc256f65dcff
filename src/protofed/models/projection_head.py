"""A projection head between the features and the classifier, as contrastive methods have it."""

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from protofed.models.split import Split


def with_projection(base: Split, width: int, *after: nn.Module) -> Split:
    """The model with a two-layer projection of its features, `after` it what is given, and a linear classifier on top.

    The features of the new model are what comes out of the projection; the old classifier is gone.
    """
    layers = nn.Sequential(nn.Linear(base.dim, base.dim), nn.ReLU(), nn.Linear(base.dim, width), *after)
    return _projected(base, width, layers)


def to_common_length(models: Sequence[Split]) -> list[Split]:
    """Different architectures with features of one length, the shortest among them, so that prototypes compare.

    A model with longer features gets a linear layer with ReLU that shortens them, and a linear classifier on top.
    """
    width = min(model.dim for model in models)
    return [
        model if model.dim == width else _projected(model, width, nn.Sequential(nn.Linear(model.dim, width), nn.ReLU()))
        for model in models
    ]


def _projected(base: Split, width: int, projection: nn.Module) -> Split:
    names = base.stage_names[: base.stage_names.index(base.cut) + 1]
    kept = {name: base.get_submodule(name) for name in names}
    stages = OrderedDict(kept, projection=projection, fc=nn.Linear(width, base.classes))
    return Split(stages, cut="projection", dim=width, classes=base.classes)
