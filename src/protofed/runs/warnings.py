"""What a user should know before the first round: one line each, none of which keeps the run from starting."""

from dataclasses import replace

from protofed.clients import Prepared, RunContext, Templates
from protofed.guards import UNGUARDED
from protofed.method import Method
from protofed.models.freezing import frozen_tensors
from protofed.records import Each, can_be_drawn_in, parts_of
from protofed.runs.network import Network
from protofed.runs.options import Options


def run_warnings(options: Options, network: Network, prepared: Prepared) -> tuple[str, ...]:
    """What the user should know before the first round."""
    context = prepared.context
    return (
        *context.dataset.warnings,
        *context.partition.warnings,
        *_random_parts(options, network, context),
        *_own_rule(options, context.method),
        *_unused_validation(options, context),
        *_own_plan(options, context),
        *_unguarded_start(options, context),
        *_cautions(options, context),
        *_shared_noise(prepared),
        *_beyond_robust(options, prepared.templates),
        *_beyond_guard(context),
    )


def _shared_noise(prepared: Prepared) -> list[str]:
    """What holds where each client adds a part of the noise only."""
    guard = prepared.context.guard
    if guard.among == 1:
        return []
    ledger = prepared.privacy_ledger()
    fewer = replace(ledger, arrived={0: guard.among - 1}).after([(0, ledger.sizes)])
    return [
        f"each of {guard.among} clients adds 1/{guard.among} of the noise's variance, so epsilon "
        f"{guard.epsilon:g} holds for their sum only: if one drops out it is {fewer['epsilon']:.3g}, and clients "
        "that collude know their own noise"
    ]


def _own_plan(options: Options, context: RunContext) -> list[str]:
    """A warning where the method trains by its own plan, and one exchange is news to who asked for more."""
    if context.plan.epochs == options.training_plan().epochs:
        return []
    if context.plan.epochs == (0,):
        asked = any(
            getattr(options, name) != Options.model_fields[name].default for name in ("rounds", "epochs", "plan")
        )
        return [f"{options.method} ends after one exchange, without training"] if asked else []
    epochs = ",".join(map(str, context.plan.epochs))
    return [f"{options.method} follows its own plan: {context.plan.rounds} rounds of {epochs} local epochs"]


def _unguarded_start(options: Options, context: RunContext) -> list[str]:
    """A warning where a guard keeps a method from the start it would take."""
    if not context.method.starts_from_means or context.guard == UNGUARDED:
        return []
    return [f"{options.method} would start from class means, which no guard covers yet; it starts at random"]


def _cautions(options: Options, context: RunContext) -> list[str]:
    """What the method itself warns of."""
    each = [context.at(0, client) for client in context.partition.clients]
    return [f"{options.method}: {text}" for text in context.method.cautions(each, context.dataset.classes)]


def _random_parts(options: Options, network: Network, context: RunContext) -> list[str]:
    """A warning where something is neither trained nor loaded from a file."""
    trained = {name for step in context.method.steps for name in step.trains.names(context.model)}
    frozen = {name for name, _ in context.model.named_parameters()} - trained | frozen_tensors(context.model).keys()
    if network.weights != "none" or not frozen:
        return []
    return [f"{options.method} trains only part of the model, and the rest is random; use --weights for a backbone"]


def _own_rule(options: Options, method: Method) -> list[str]:
    """A warning where the method does not follow --train."""
    if options.train is None or method.trains_backbone:
        return []
    return [f"{options.method} trains what its paper prescribes, regardless of --train"]


def _unused_validation(options: Options, context: RunContext) -> list[str]:
    """A warning where sites have set images aside that nobody validates on."""
    kept = sum(map(len, context.dataset.validation_offsets.values()))
    if context.validation or not kept:
        return []
    return [
        f"{kept} validation images of the sites are not used: {options.method} needs none; --set "
        "data.validation=0.1 uses them"
    ]


def _beyond_robust(options: Options, templates: Templates) -> list[str]:
    """A warning where a robust rule does not reach all that is uploaded."""
    single = [
        name
        for name, item in parts_of(templates.upload).items()
        if isinstance(item, Each) and not can_be_drawn_in(item.value)
    ]
    if options.robust is None or not single:
        return []
    return [
        f"robust={options.robust} replaces means; {', '.join(single)} of {options.method} is used client by "
        "client, so that of a hostile client is used unchanged"
    ]


def _beyond_guard(context: RunContext) -> list[str]:
    """A warning where figures of validation images leave a client that promises something for its training images."""
    if not (context.validation and context.guard.promises):
        return []
    return ["validation scores carry no noise: the guarantee of --guard does not cover validation images"]
