"""What an attacker could rebuild from what a run sends, in figures, pictures and words."""

from protofed.audit.decoder import Effort
from protofed.audit.metrics import (
    frechet_distance,
    frechet_distance_of_moments,
    psnr,
    rms_distance,
    ssim,
    ssim_of_whole,
)

__all__ = [
    "Effort",
    "frechet_distance",
    "frechet_distance_of_moments",
    "psnr",
    "rms_distance",
    "ssim",
    "ssim_of_whole",
]
