"""What happens to an upload before it leaves: clipping, noise, sub-sampling, quantisation, and what that promises."""

from protofed.guards.accounting import PrivacyLedger, SampledGaussianMechanism, promise_in_words
from protofed.guards.budget import rho_of, settled
from protofed.guards.gradients import PrivateGradients
from protofed.guards.guard import UNGUARDED, Guard, parse_guard
from protofed.guards.privatise import guard_rows, privatise
from protofed.guards.rules import refuse_impossible
from protofed.guards.secure import SecureTally, UploadWords
from protofed.guards.sums import noise_on_sum, noised_form, possible_total, sensitivity_of

__all__ = [
    "UNGUARDED",
    "Guard",
    "PrivacyLedger",
    "PrivateGradients",
    "SampledGaussianMechanism",
    "SecureTally",
    "UploadWords",
    "guard_rows",
    "noise_on_sum",
    "noised_form",
    "parse_guard",
    "possible_total",
    "privatise",
    "promise_in_words",
    "refuse_impossible",
    "rho_of",
    "sensitivity_of",
    "settled",
]
