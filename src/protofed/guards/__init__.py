"""What happens to an upload before it leaves: clipping, noise, sub-sampling, quantisation, and what that promises."""

from protofed.guards.accounting import Ledger, Mechanism
from protofed.guards.gradients import PrivateGradients
from protofed.guards.guard import UNGUARDED, Guard, parse_guard
from protofed.guards.rules import refuse_impossible
from protofed.guards.sealing import guard_rows, seal
from protofed.guards.secure import SecureTally

__all__ = [
    "UNGUARDED",
    "Guard",
    "Ledger",
    "Mechanism",
    "PrivateGradients",
    "SecureTally",
    "guard_rows",
    "parse_guard",
    "refuse_impossible",
    "seal",
]
