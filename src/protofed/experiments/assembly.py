"""Options become a federation that is ready to run; mistakes of the user show here, before anything is written."""

import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, TypeAdapter, ValidationError

from protofed.clients import Setting, Templates, rehearse
from protofed.data import Augment, Dataset, Partition, load, make_partition
from protofed.data.catalog import data_options
from protofed.engines import choose_engine
from protofed.errors import UserError, unknown_name
from protofed.experiments.options import Options
from protofed.method import At, Method
from protofed.models import (
    Split,
    WeightsReport,
    build_model,
    choose_layout,
    describe,
    load_weights,
    nothing,
    to_common_length,
)
from protofed.registry import find_method, in_words, load_plugin, make_method
from protofed.seeding import stable_seed

_DATA_SETTINGS: dict[str, Any] = {
    "augment": str,
    "normalise": str,
    "channels": int,
    "ensure_all_classes": bool,
    "holdout": float,
    "min_size": int,
    "validation": Annotated[float, Field(ge=0, lt=1)],
}


@dataclass(frozen=True)
class Assembly:
    """A federation that could start now, and what there is to say about it."""

    options: Options
    setting: Setting
    templates: Templates
    engine: str
    workers: int
    warnings: tuple[str, ...]
    weights: WeightsReport | None

    def description(self) -> dict[str, Any]:
        """Everything resolved, as run.json has it; nothing in it depends on when or where the run happens."""
        setting, options = self.setting, self.options
        dataset, partition = setting.dataset, setting.partition
        return {
            "options": options.model_dump(),
            "method": {"name": options.method, "kind": setting.method.kind, "knobs": asdict(setting.method)},
            "data": {
                "name": dataset.name,
                "source": dataset.source,
                "licence": dataset.licence,
                "classes": list(dataset.classes),
                "image_shape": list(dataset.image_shape),
                "normalise": asdict(dataset.normalise),
                "augment": str(setting.augment),
                "domains": {
                    name: {"train": len(domain.train), "test": len(domain.test)}
                    for name, domain in dataset.domains.items()
                },
            },
            "partition": {
                "protocol": partition.protocol,
                "hash": partition.hash,
                "held_out": list(partition.held_out),
                "clients": {
                    client: {
                        "domain": partition.domain[client],
                        "train": len(partition.train[client]),
                        "holdout": len(partition.holdout[client]),
                        "per_class": counts.tolist(),
                    }
                    for client, counts in zip(
                        partition.clients, partition.counts(setting.pool.y, len(dataset.classes)), strict=True
                    )
                },
            },
            "model": {
                "name": options.model,
                "options": options.settings_for("model"),
                "parameters": [sum(param.numel() for param in model.parameters()) for model in setting.models],
                "dim": setting.model.dim,
                "weights": None if self.weights is None else self.weights.summary(),
            },
            "plan": asdict(setting.plan),
            "seed": options.seed,
            "engine": {"name": self.engine, "workers": self.workers, "layout": setting.layout},
            "warnings": list(self.warnings),
            "versions": {
                "protofed": version("protofed"),
                "python": platform.python_version(),
                "torch": torch.__version__,
                "numpy": np.__version__,
            },
        }


def assemble(options: Options, clients_folder: Path, known: tuple[Dataset, Partition] | None = None) -> Assembly:
    """Load, deal out, build and rehearse; `known` takes the place of what would be loaded and dealt out."""
    for plugin in options.plugin:
        load_plugin(plugin)
    method_class = find_method(options.method)
    _refuse_unknown_prefixes(options)
    method = make_method(method_class, options.settings_for(""), options.preset)
    device = _device(options.device)
    data_settings, own_settings = _data_settings(options.settings_for("data"), options.data)
    augment = Augment.parse(data_settings.pop("augment", "none"))
    validation = data_settings.pop("validation", method.validation_share)
    dataset, partition = known or _dealt_out(options, data_settings, own_settings)
    if method.pools_data:
        partition = partition.pooled()
    bases, report = _base_models(options, dataset)
    setting = Setting(
        method=method,
        plan=method.plan(options.training_plan()),
        models=tuple(base.to(getattr(torch, options.dtype)) for base in bases),
        dataset=dataset,
        partition=partition,
        clients_folder=clients_folder,
        augment=augment,
        balanced=options.balanced,
        validation=validation,
        seed=options.seed,
        dtype=getattr(torch, options.dtype),
        device=device,
    )
    with _keyed(options.seed, "build"):
        built = tuple(_built(options, method, base, setting.at(0, None)) for base in setting.models)
        # What a method adds is made by torch in its default precision.
        setting = replace(
            setting,
            models=tuple(model.to(setting.dtype) for model in built),
            layout=choose_layout(options.layout, built, setting.dtype),
        )
    templates = rehearse(setting)
    _refuse_impossible(options, setting, templates)
    engine, workers = choose_engine(options.engine, options.workers, len(partition.clients), options.device)
    warnings = (*dataset.warnings, *partition.warnings, *_random_parts(options, setting), *_own_plan(options, setting))
    return Assembly(options, setting, templates, engine, workers, warnings, report)


def _dealt_out(options: Options, settings: dict[str, Any], own: Mapping[str, str]) -> tuple[Dataset, Partition]:
    """The data set, and who holds what of it."""
    dataset = load(
        options.data,
        data_root=options.data_root,
        domains=options.domains,
        labels=options.labels,
        image_size=options.image_size,
        channels=settings.pop("channels", None),
        normalise=settings.pop("normalise", None),
        options=own,
    )
    partition = make_partition(
        dataset,
        options.protocol,
        clients=options.clients,
        fraction=options.fraction,
        samples_per_client=options.samples_per_client,
        seed=options.seed,
        **settings,
    )
    return dataset, partition


def _base_models(options: Options, dataset: Dataset) -> tuple[list[Split], WeightsReport | None]:
    """The models the user chose; initial weights depend on the seed only, so every method starts from the same."""
    names = options.model.split(",")
    settings = options.settings_for("model")
    if len(names) == 1:
        taken = {names[0]: settings}
    else:
        taken = {name: {key: settings[key] for key in settings if key in describe(name).options} for name in names}
        for key in settings:
            if not any(key in each for each in taken.values()):
                raise UserError(f"--set model.{key}: none of the models {', '.join(names)} has such an option")
    with _keyed(options.seed, "init"):
        models = [build_model(name, dataset.image_shape, len(dataset.classes), taken[name]) for name in names]
        models = to_common_length(models)
    if options.weights is None:
        return models, None
    if len(models) > 1:
        raise UserError("--weights fits one architecture; leave it out, or give one --model")
    return models, load_weights(models[0], options.weights)


def _built(options: Options, method: Method, base: Split, at: At) -> Split:
    """The method's own model; a model it cannot use is refused in its name."""
    try:
        return method.build(base, at)
    except UserError as error:
        raise UserError(f"{options.method}: {error}") from None


def _own_plan(options: Options, setting: Setting) -> list[str]:
    """A warning where the method trains by a plan of its own."""
    if setting.plan.epochs == options.training_plan().epochs:
        return []
    epochs = ",".join(map(str, setting.plan.epochs))
    return [f"{options.method} follows a plan of its own: {setting.plan.rounds} rounds of {epochs} local epochs"]


def _random_parts(options: Options, setting: Setting) -> list[str]:
    """A warning where something is neither trained nor loaded from a file."""
    trained = {name for step in setting.method.steps for name in step.trains.names(setting.model)}
    frozen = {name for name, _ in setting.model.named_parameters()} - trained
    if options.weights is not None or not frozen:
        return []
    return [f"{options.method} trains only a part of the model and the rest is random; give --weights for a backbone"]


def _refuse_impossible(options: Options, setting: Setting, templates: Templates) -> None:
    """Combinations that cannot work, refused with the reason."""
    method = setting.method
    if len(setting.models) > 1 and method.shares != nothing:
        raise UserError(
            f"{options.method} exchanges weights, so all clients need one architecture; give one --model, or a method "
            "that exchanges prototypes only, such as fedproto or conffedproto"
        )
    if options.project and "prototypes" not in setting.model.stage_names:
        raise UserError(f"--project moves part prototypes, and {options.method} has none; leave it out")
    if too_late := [number for number in options.snapshots() if number > setting.plan.rounds]:
        raise UserError(f"snapshot_rounds names round {max(too_late)}, but there are {setting.plan.rounds}")
    if options.ensemble and templates.global_model is None:
        raise UserError(f"--ensemble needs a method with a complete global model; {options.method} has none")


@contextmanager
def _keyed(seed: int, purpose: str) -> Iterator[None]:
    """Inside: torch's global generator, from which layers draw their initial weights, is keyed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stable_seed(seed, purpose))
        yield


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device={name} is not valid; it is cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: no such device here; use --device cpu")
    return device


def _refuse_unknown_prefixes(options: Options) -> None:
    for key in options.set:
        prefix, dot, _ = key.partition(".")
        if dot and prefix not in ("model", "data"):
            raise UserError(f"--set {key}: settings are a method's KEY, model.KEY or data.KEY")


def _data_settings(given: Mapping[str, str], data: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings every data set takes, checked, and those of this one, which its loader checks."""
    known = {**data_options(data), **_DATA_SETTINGS}
    settings: dict[str, Any] = {}
    own: dict[str, str] = {}
    for key, value in given.items():
        if key not in known:
            raise unknown_name("setting of the data", key, known)
        if key not in _DATA_SETTINGS:
            own[key] = value
            continue
        try:
            settings[key] = TypeAdapter(_DATA_SETTINGS[key]).validate_python(value)
        except ValidationError:
            raise UserError(f"data.{key}={value} is not valid; it takes {in_words(_DATA_SETTINGS[key])}") from None
    return settings, own
