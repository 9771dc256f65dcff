"""Combinations of options that cannot work, refused with the reason before anything is written."""

import torch

from protofed.clients import Prepared, RunContext
from protofed.clients.class_means import linear_head
from protofed.errors import UserError
from protofed.guards import UNGUARDED
from protofed.guards import refuse_impossible as refuse_guard
from protofed.models import nothing
from protofed.runs.network import Network
from protofed.runs.options import Options

_FEWEST_TOGETHER = 3


def refuse_impossible(options: Options, network: Network, prepared: Prepared, together: int) -> None:
    """Raise where a run cannot work; `together` clients train in a round."""
    context, templates = prepared.context, prepared.templates
    method = context.method
    if options.autocast and context.dtype == torch.float64:
        raise UserError("--autocast computes in bfloat16, which --dtype float64 rules out; omit one of them")
    if len(context.models) > 1 and method.shares != nothing:
        raise UserError(
            f"{options.method} exchanges weights, so all clients need the same architecture; give one --model, or "
            "use a method that exchanges only prototypes, such as fedproto or conffedproto"
        )
    if options.head == "closed-form":
        _refuse_head(options, prepared)
    if options.project and "prototypes" not in context.model.stage_names:
        raise UserError(f"--project moves part prototypes, and {options.method} has none; omit it")
    if too_late := [number for number in options.snapshots() if number > context.plan.rounds]:
        raise UserError(f"snapshot_rounds names round {max(too_late)}, but there are only {context.plan.rounds}")
    if options.ensemble and templates.global_model is None:
        raise UserError(f"--ensemble needs a method with a complete global model; {options.method} has none")
    refuse_guard(
        context.guard,
        options.method,
        method,
        context.models,
        list(network.names),
        templates.down,
        templates.upload,
    )
    if options.balanced and context.guard.trains_privately:
        raise UserError("guard: sampling classes equally often reveals how many samples each has; omit --balanced")
    _refuse_aggregation(options, context, together)


def _refuse_aggregation(options: Options, context: RunContext, together: int) -> None:
    """Secure and robust aggregation need enough clients, and rule each other and a cap on shares out."""
    other = "secure aggregation" if context.guard.secure else f"robust={options.robust}" if context.robust else None
    if context.max_share is not None and other is not None:
        why = "hides them" if context.guard.secure else "ignores them"
        raise UserError(f"max_share={options.max_share:g} caps weights, and {other} {why}; use only one of them")
    for rule, wanted in (("secure aggregation", context.guard.secure), (f"robust={options.robust}", context.robust)):
        if wanted and together < _FEWEST_TOGETHER:
            raise UserError(
                f"{rule} needs at least {_FEWEST_TOGETHER} clients in a round, not {together}: with fewer, the "
                "sum reveals one client to the others, and none can be outvoted"
            )
    if context.robust is not None and context.guard.secure:
        raise UserError(
            f"robust={options.robust} compares the clients' values, which secure aggregation hides; use only one "
            "of them"
        )


def _refuse_head(options: Options, prepared: Prepared) -> None:
    """A head that starts from class means needs a server whose head everybody takes over, and nothing to hide."""
    context = prepared.context
    if context.method.kind != "global" or context.method.pools_data:
        raise UserError(f"--head closed-form initialises the server's head, and {options.method} has none; omit it")
    if context.guard != UNGUARDED:
        raise UserError(
            "--head closed-form sends class means unprotected, which no guard covers yet; use only one of them"
        )
    linear_head(context.model)
