"""Small networks: a multi-layer perceptron, LeNet-5 and a plain CNN."""

from math import prod
from typing import Annotated

from pydantic import Field
from torch import nn

from protofed.models.catalog import register_model, require_side
from protofed.models.layers import ConvPoolReLU, dense
from protofed.models.split import ImageShape, Split


@register_model("mlp", description="one hidden layer, whose output is the feature vector")
def mlp(
    image_shape: ImageShape,
    classes: int,
    *,
    hidden: Annotated[int, Field(ge=1, description="units of the hidden layer, which is the feature dimension")] = 128,
) -> Split:
    """Multi-layer perceptron on the flattened image."""
    stages: dict[str, nn.Module] = {"hidden": dense(prod(image_shape), hidden), "fc": nn.Linear(hidden, classes)}
    return Split(stages, cut="hidden", dim=hidden, classes=classes)


@register_model("lenet5", description="LeNet-5: two 5x5 convolutions, features of length 120; at least 16x16 pixels")
def lenet5(image_shape: ImageShape, classes: int) -> Split:
    """LeNet-5 with ReLU and max-pooling; 44,426 parameters on 1x28x28 images of 10 classes."""
    require_side("lenet5", image_shape, 16)
    channels, height, width = image_shape
    height, width = (((side - 4) // 2 - 4) // 2 for side in (height, width))
    stages: dict[str, nn.Module] = {
        "conv1": ConvPoolReLU(channels, 6, kernel=5),
        "conv2": ConvPoolReLU(6, 16, kernel=5),
        "fc1": dense(16 * height * width, 120),
        "fc2": dense(120, 84),
        "fc": nn.Linear(84, classes),
    }
    return Split(stages, cut="fc1", dim=120, classes=classes)


@register_model("cnn", description="three 3x3 convolutions, features of length 128; at least 8x8 pixels")
def cnn(image_shape: ImageShape, classes: int) -> Split:
    """Convolutions of 16, 32 and 64 channels; 163,690 parameters on 3x32x32 images of 10 classes."""
    require_side("cnn", image_shape, 8)
    channels, height, width = image_shape
    stages: dict[str, nn.Module] = {
        "conv1": ConvPoolReLU(channels, 16, kernel=3, padding=1),
        "conv2": ConvPoolReLU(16, 32, kernel=3, padding=1),
        "conv3": ConvPoolReLU(32, 64, kernel=3, padding=1),
        "fc1": dense(64 * (height // 8) * (width // 8), 128),
        "fc2": dense(128, 64),
        "fc": nn.Linear(64, classes),
    }
    return Split(stages, cut="fc1", dim=128, classes=classes)
