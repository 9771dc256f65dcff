"""A plain three-convolution network; 163,690 parameters on 3x32x32 images of 10 classes."""

from torch import nn

from protofed.models.catalog import register_model, require_side
from protofed.models.layers import ConvPoolReLU, dense
from protofed.models.split import ImageShape, Split


@register_model("cnn", description="three 3x3 convolutions, features of length 128; at least 8x8 pixels")
def cnn(image_shape: ImageShape, classes: int) -> Split:
    """Convolutions of 16, 32 and 64 channels for images of any size from 8x8."""
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
