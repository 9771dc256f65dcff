import pytest
import torch

from protofed.data import Normalise
from protofed.errors import UserError

PIXELS = torch.tensor([0, 128, 255], dtype=torch.uint8)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mnist", [-0.1307 / 0.3081, (128 / 255 - 0.1307) / 0.3081, (1 - 0.1307) / 0.3081]),
        ("half", [-1.0, 2 * 128 / 255 - 1, 1.0]),
        ("medical", [-128 / 255, 0.0, 127 / 255]),
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_values(name, expected, channels):
    x = PIXELS.view(1, 1, 1, 3).expand(2, channels, 1, 3)
    y = Normalise.named(name, channels)(x)
    assert y.dtype == torch.float32
    assert torch.allclose(y, torch.tensor(expected).expand_as(y), atol=1e-6)


def test_imagenet_per_channel():
    y = Normalise.named("imagenet", 3)(torch.full((1, 3, 1, 1), 255, dtype=torch.uint8), torch.float64)
    assert y.dtype == torch.float64
    assert y.flatten().tolist() == pytest.approx([0.515 / 0.229, 0.544 / 0.224, 0.594 / 0.225])
    grey = Normalise.named("imagenet", 1)
    assert grey.mean == pytest.approx((0.449,))
    assert grey.std == pytest.approx((0.226,))


def test_floats_after_augmentation_mean_the_same_as_pixels():
    x = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    normalise = Normalise.default(3)
    assert torch.allclose(normalise(x), normalise(x.float() / 255), atol=1e-5)


def test_defaults_and_mistakes():
    assert Normalise.default(3) == Normalise.named("imagenet", 3)
    assert Normalise.default(1) == Normalise.named("mnist", 1)
    with pytest.raises(UserError, match="did you mean imagenet"):
        Normalise.named("imagenets", 3)


def test_the_result_lies_in_memory_in_one_way():
    pixels = torch.zeros(2, 3, 4, 4, dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
    assert Normalise.default(3)(pixels).is_contiguous()
