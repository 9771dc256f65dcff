"""LeNet-5 with ReLU and max-pooling; 44,426 parameters on 1x28x28 images of 10 classes."""

from torch import nn

from protofed.models.catalog import register_model, require_side
from protofed.models.layers import ConvPoolReLU, dense
from protofed.models.split import ImageShape, Split


@register_model("lenet5", description="LeNet-5: two 5x5 convolutions, features of length 120; at least 16x16 pixels")
def lenet5(image_shape: ImageShape, classes: int) -> Split:
    """LeNet-5 for images of any size from 16x16."""
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
