"""Images of noise in any number: the work of a step does not depend on what they show.

Importing this, or `--plugin benchmarks/generated.py`, makes them known as the data set `generated`.
"""

from typing import Annotated

import numpy as np
import torch

from protofed.data import Domain, Images, RawData, register_data

NAME = "generated"
CLASSES = 10


def generated(
    *,
    images: Annotated[int, "training images"] = 1000,
    tests: Annotated[int, "test images"] = CLASSES,
    channels_made: Annotated[int, "1 or 3"] = 1,
    side: Annotated[int, "pixels on each side"] = 28,
) -> RawData:
    """One domain, every class equally often."""
    rng = np.random.default_rng(0)

    def noise(count: int) -> Images:
        x = rng.integers(0, 256, size=(count, channels_made, side, side), dtype=np.uint8)
        return Images(torch.from_numpy(x), torch.arange(count) % CLASSES)

    return RawData(tuple(f"class{k}" for k in range(CLASSES)), {"noise": Domain("noise", noise(images), noise(tests))})


def register() -> None:
    """Make them known, also where what was registered has been forgotten."""
    register_data(NAME, generated, "images of noise")


register()
