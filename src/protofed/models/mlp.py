"""A network with one hidden layer."""

from math import prod
from typing import Annotated

from pydantic import Field
from torch import nn

from protofed.models.catalog import register_model
from protofed.models.layers import dense
from protofed.models.split import ImageShape, Split


@register_model("mlp", description="one hidden layer, whose output is the features")
def mlp(
    image_shape: ImageShape,
    classes: int,
    *,
    hidden: Annotated[int, Field(ge=1, description="units of the hidden layer, the length of the features")] = 128,
) -> Split:
    """Multi-layer perceptron on the flattened image."""
    stages: dict[str, nn.Module] = {"hidden": dense(prod(image_shape), hidden), "fc": nn.Linear(hidden, classes)}
    return Split(stages, cut="hidden", dim=hidden, classes=classes)
