"""Which guards go with which methods, models and data; what cannot be promised is refused, with what would be right."""

from collections.abc import Sequence

from torch.nn.modules.batchnorm import _BatchNorm

from protofed.errors import UserError
from protofed.guards.accounting import require_opacus
from protofed.guards.guard import Guard
from protofed.guards.privatise import known_before
from protofed.guards.sums import sends_sums
from protofed.method import Method
from protofed.models import Split, describe
from protofed.records import ClassTable, Each, Record, Sum, Weights, parts_of


def refuse_impossible(
    guard: Guard,
    name: str,
    method: Method,
    models: Sequence[Split],
    model_names: Sequence[str],
    down: Record,
    upload: Record,
) -> None:
    """Raise a UserError where the guard cannot do what it is asked to; `down` and `upload` are examples of messages."""
    if guard.noisy:
        if method.pools_data:
            raise UserError(f"guard: {name} sends nothing that could be noised; omit noise")
        if guard.accountant != "zcdp":
            require_opacus()
    if guard.secure:
        _refuse_single_values(guard, name, upload)
    if guard.noisy and sends_sums(upload):
        _refuse_beside_sums(name, upload)
    elif guard.noisy and guard.unit == "client":
        _refuse_unbounded(name, down, upload)
    if guard.trains_privately:
        _refuse_coupled(guard, name, method)
        for model, model_name in zip(models, model_names, strict=True):
            _refuse_batch_normalisation(method, model, model_name)


def _refuse_coupled(guard: Guard, name: str, method: Method) -> None:
    """What one sample changes is bounded only where its gradient and its rows are its own."""
    if not method.separable:
        level = f"noise={guard.noise:g}" if guard.epsilon is None else f"epsilon={guard.epsilon:g}"
        raise UserError(
            f"guard: the loss or the upload of {name} couples samples, so the effect of a single sample is not "
            f"bounded; protect the client instead: --guard unit=client,clip={guard.clip:g},{level}"
        )
    if method.proto_pass == "last_epoch":
        raise UserError(
            "guard: in the last epoch a sample may be seen more than once, so its share in a prototype is not "
            "bounded; use --set proto_pass=extra_eval"
        )


def _refuse_batch_normalisation(method: Method, model: Split, model_name: str) -> None:
    trained = {tensor for step in method.steps for tensor in step.trains.names(model)}
    for path, module in model.named_modules():
        own = {f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)}
        if isinstance(module, _BatchNorm) and own & trained:
            other = "--set model.norm=group" if "norm" in describe(model_name).options else "a model without it"
            raise UserError(
                f"guard: batch normalisation in {model_name} ({path}) mixes the samples of a batch, so there are "
                f"no per-sample gradients; use {other}, or --guard unit=client,..."
            )


def _refuse_beside_sums(name: str, upload: Record) -> None:
    for part, item in parts_of(upload).items():
        if not isinstance(item, Sum):
            raise UserError(f"guard: {name} sends {part} besides its sums, for which no bound is known; omit noise")


def _refuse_unbounded(name: str, down: Record, upload: Record) -> None:
    for part, item in parts_of(upload).items():
        if not isinstance(item.value, Weights | ClassTable):
            raise UserError(
                f"guard: {name} also sends {part} ({type(item.value).__name__}), for which no bound is known: "
                "noise can hide weights and class prototypes; use a method that sends nothing else, such as "
                "i2pfl or fedavg"
            )
        if isinstance(item.value, Weights):
            known = known_before(upload, down, part)
            values = item.value.stats if part in upload.changes else item.value.tensors()
            if new := sorted(values.keys() - known.tensors().keys()):
                raise UserError(
                    f"guard: {name} sends {new[0]}, which is not in the broadcast, so there is no change to "
                    "bound; use a method that sends only what it receives, such as i2pfl or fedavg"
                )


def _refuse_single_values(guard: Guard, name: str, upload: Record) -> None:
    if guard.quantise:
        raise UserError("guard: secure aggregation already quantises; omit quantise")
    for part, item in parts_of(upload).items():
        if isinstance(item, Each):
            raise UserError(
                f"guard: {name} needs {part} of every client separately, but secure aggregation shows the server "
                "only sums; use a method whose uploads are averaged, such as fedavg or fedproto"
            )
