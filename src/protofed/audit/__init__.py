"""What an attacker could rebuild from what a run sends, in figures."""

from protofed.audit.metrics import (
    frechet_distance,
    frechet_distance_of_moments,
    psnr,
    rms_distance,
    ssim,
    ssim_of_whole,
)

__all__ = [
    "frechet_distance",
    "frechet_distance_of_moments",
    "psnr",
    "rms_distance",
    "ssim",
    "ssim_of_whole",
]
