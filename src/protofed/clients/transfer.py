"""From the memory messages and images rest in to the device clients compute on."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor there; a graphics card reads it from pinned memory while the processor goes on."""
    pinned = tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor
    return pinned.to(device, non_blocking=pinned is not tensor)
