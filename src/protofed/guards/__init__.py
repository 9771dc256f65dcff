"""What happens to an upload before it leaves: clipping, noise, sub-sampling, quantisation, and what that promises."""

from protofed.guards.accounting import PrivacyLedger, SampledGaussianMechanism
from protofed.guards.gradients import PrivateGradients
from protofed.guards.guard import UNGUARDED, Guard, parse_guard
from protofed.guards.privatise import guard_rows, privatise
from protofed.guards.rules import refuse_impossible
from protofed.guards.secure import SecureTally, UploadWords

__all__ = [
    "UNGUARDED",
    "Guard",
    "PrivacyLedger",
    "PrivateGradients",
    "SampledGaussianMechanism",
    "SecureTally",
    "UploadWords",
    "guard_rows",
    "parse_guard",
    "privatise",
    "refuse_impossible",
]
