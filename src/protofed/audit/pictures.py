"""Originals above what was rebuilt of them, as one picture."""

import io

import numpy as np
import torch
from PIL import Image
from torch import Tensor

_SHOWN = 8
_GAP = 2
_SIDE = 56


def side_by_side(originals: Tensor, images: Tensor, shown: int = _SHOWN) -> bytes:
    """A PNG: some originals in the upper row, below each what an attacker rebuilt; spread over the whole set."""
    pick = torch.arange(min(shown, len(originals))) * len(originals) // max(1, min(shown, len(originals)))
    zoom = max(1, _SIDE // max(originals.shape[2:]))
    rows = [torch.cat([_framed(image, zoom) for image in part[pick]], 2) for part in (originals, images)]
    grid = (torch.cat(rows, 1).clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(grid)).save(file, "PNG")
    return file.getvalue()


def _framed(image: Tensor, zoom: int) -> Tensor:
    """Three channels, enlarged without smoothing, with a white edge."""
    colour = image if image.shape[0] == 3 else image[:1].repeat(3, 1, 1)
    large = colour.repeat_interleave(zoom, 1).repeat_interleave(zoom, 2)
    return torch.nn.functional.pad(large, [_GAP] * 4, value=1.0)
