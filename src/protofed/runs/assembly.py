"""Options become a federation that is ready to run; mistakes of the user show here, before anything is written."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from protofed.clients import ClientSide, Prepared, RunContext, Templates, choose_frozen, prepare
from protofed.data import Augment, Dataset, Domain, Images, Normalise, Partition, deals_by_label, load, make_partition
from protofed.data.catalog import data_options
from protofed.data.corruption import corrupted
from protofed.engines import EngineChoice, choose_engine
from protofed.errors import UserError
from protofed.federation import RoundPolicy
from protofed.guards import UNGUARDED, Guard, parse_guard, settled
from protofed.method import At, Method
from protofed.metrics import refuse_unsuited
from protofed.models import (
    ImageShape,
    Split,
    WeightsReport,
    choose_layout,
)
from protofed.records import parse_robust
from protofed.registry import find_method, load_plugin, make_method, preset_settings
from protofed.runs.network import (
    PHOTOGRAPH,
    Network,
    build_networks,
    choose_network,
    fitted,
    freeze_untouched,
    network_of,
    restore_backbone,
)
from protofed.runs.options import Options, make_options
from protofed.runs.place import data_here
from protofed.runs.refusals import refuse_impossible
from protofed.runs.warnings import run_warnings
from protofed.seeding import keyed_torch
from protofed.settings import SettingInfo, checked

_DATA_SETTINGS = {
    name: SettingInfo.of(name, hint)
    for name, hint in {
        "augment": str,
        "normalise": str,
        "channels": int,
        "ensure_all_classes": bool,
        "holdout": float,
        "image_noise": str,
        "label_noise": str,
        "merge_test": bool,
        "min_size": int,
        "split_seed": int,
        "unreadable": Literal["refuse", "skip"],
        "validation": Annotated[float, Field(ge=0, lt=1)],
    }.items()
}

VIEWS = Augment.parse("resized_crop=0.7,flip,jitter=0.1")
"""What photographs go through in training, and what cached views show, unless data.augment says otherwise."""


@dataclass(frozen=True)
class Assembly:
    """A federation that is ready to start, with its warnings."""

    options: Options
    network: Network
    prepared: Prepared
    engine: EngineChoice
    warnings: tuple[str, ...]
    weights: WeightsReport | None
    frozen: dict[str, object]
    """What is done about frozen stages, and why."""

    @property
    def context(self) -> RunContext:
        """What is settled before the first round."""
        return self.prepared.context

    @property
    def starts_from_means(self) -> bool:
        """Whether class means are exchanged before round 1: on demand, or for a method where no guard forbids it."""
        own = self.context.method.starts_from_means and self.context.guard == UNGUARDED
        return own or self.options.head == "closed-form"

    @property
    def run_defaults(self) -> dict[str, Any]:
        """What holds of the options that the method wants, where they are not those of every run."""
        wanted = type(self.context.method).run_defaults
        return {name: value for name, value in wanted.items() if getattr(self.options, name) == value}


@dataclass(frozen=True)
class ClientSideRecipe:
    """What a process that shares nothing with this one needs to play the clients of a run."""

    options: str
    """As JSON, so that it can be hashed."""
    clients_folder: Path

    @classmethod
    def of(cls, assembly: Assembly) -> "ClientSideRecipe":
        """The recipe of a run that is assembled here."""
        return cls(assembly.options.model_dump_json(), assembly.context.clients_folder.absolute())

    def __call__(self) -> ClientSide:
        """Assemble the run once more; nothing in it depends on where that happens."""
        assembly = assemble(Options.model_validate_json(self.options), self.clients_folder)
        return ClientSide(assembly.prepared)


def assemble(options: Options, clients_folder: Path, dataset: Dataset | None = None) -> Assembly:
    """Load, partition, build and rehearse. `dataset` replaces images that are not on this machine."""
    method = method_of(options)
    device = _device(options.device)
    dealt = dealing_of_preset(type(method), options.preset, options.protocol)
    data_settings, own_settings = _data_settings({**dealt, **options.settings_for("data")}, options.data)
    merges_tests = data_settings.pop("merge_test", False)
    augment = data_settings.pop("augment", None)
    data_settings.pop("validation", None)  # see _validation
    channels, normalise = data_settings.pop("channels", None), data_settings.pop("normalise", None)
    noise = {key: data_settings.pop(key, None) for key in ("label_noise", "image_noise")}
    for key in ("split_seed", "unreadable"):  # of `Options.reading`
        data_settings.pop(key, None)
    dataset = dataset or load(
        options.data,
        data_root=options.data_root,
        domains=options.domains,
        labels=options.labels,
        image_size=options.image_size,
        channels=channels,
        normalise=normalise,
        options=own_settings,
        reading=replace(options.reading(), undecoded=not method.trains_backbone),
    )
    refuse_unsuited(options.metric, dataset.classes)
    network = choose_network(options, dataset.image_shape, type(method))
    dataset = fitted(dataset, network, keeps_normalisation=normalise is not None)
    if merges_tests and not deals_by_label(options.protocol):
        raise UserError(
            "data.merge_test needs a protocol that splits by label, in which clients have their own test sets"
        )
    if merges_tests:
        dataset = dataset.with_tests_in_training()
    partition = make_partition(
        dataset,
        options.protocol,
        clients=options.clients,
        fraction=options.fraction,
        samples_per_client=options.samples_per_client,
        seed=options.seed,
        **data_settings,
    )
    dataset = corrupted(dataset, partition, **noise, seed=options.seed)
    if method.pools_data:
        partition = partition.pooled()
    if augment is not None:
        looks = Augment.parse(augment)
    else:
        looks = default_augment(options, network, method, dataset.image_shape)
    if network.views > 1:
        looks = looks or VIEWS
    return _assembled(options, network, method, dataset, partition, clients_folder, looks, device)


def default_augment(options: Options, network: Network, method: Method, shape: ImageShape) -> Augment:
    """Photographs are augmented where a whole network is trained on them.

    A frozen backbone computes each image once, which augmentation would forbid; views are its way. Digits and icons may
    be another class when they are mirrored.
    """
    if min(shape[1:]) < PHOTOGRAPH or not method.trains_backbone or network.train != "all":
        return Augment()
    return VIEWS if any(method.plan(options.training_plan()).epochs) else Augment()


def method_of(options: Options) -> Method:
    """The method with its hyper-parameters."""
    for plugin in options.plugin:
        load_plugin(plugin)
    method_class = find_method(options.method)
    _refuse_unknown_prefixes(options)
    return make_method(method_class, options.settings_for(""), options.preset)


def resolved(options: Options, shape: ImageShape) -> Options:
    """The options with the network named that is chosen for images of this shape, for others to take the same."""
    made = method_of(options)
    method = type(made)
    network = choose_network(options, shape, method)
    chosen: dict[str, Any] = {
        "model": ",".join(network.names),
        "weights": network.weights,
        "views": network.views,
        "image_size": network.image_size,
    }
    if method.trains_backbone:
        chosen["train"] = network.train
    augment = default_augment(options, network, made, shape)
    if augment and "augment" not in options.settings_for("data"):
        chosen["set"] = {**options.set, "data.augment": str(augment)}
    return options.model_copy(update=chosen)


def dealing_of_preset(cls: type[Method], preset: str | None, protocol: str | None) -> dict[str, Any]:
    """How a preset deals out the images, which is a matter of label protocols only."""
    return preset_settings(cls, preset, "data") if deals_by_label(protocol) else {}


def reopened_options(
    config: Mapping[str, Any], data_root: str | Path | None = None, finds_data: bool = False
) -> Options:
    """The options of a run that is opened again, maybe on another machine or from another folder than it ran on."""
    network = network_of(config)
    network_options = {
        "model": ",".join(network.names),
        "weights": network.weights,
        "train": network.train,
        "views": None,
    }
    place = data_here(config, data_root) if finds_data else {}
    return make_options({**config["options"], **network_options, **place, "device": "cpu", "engine": "loop"})


def reassemble(config: Mapping[str, Any], folder: Path) -> Assembly:
    """The federation of a run folder as its run.json describes it, without its images: to use its results.

    Weights are the initial ones. Images are black, and as many of each class with each client as there were.
    """
    options = reopened_options(config)
    partition = Partition.load(folder / "partition.npz")
    dataset = _black_images(config, partition)
    method = method_of(options)
    here = torch.device("cpu")
    network = network_of(config)
    return _assembled(options, network, method, dataset, partition, folder / "clients", Augment(), here)


def _black_images(config: Mapping[str, Any], partition: Partition) -> Dataset:
    """A run's data without its pixels; a single black image in memory stands for all."""
    data = config["data"]
    sizes = [domain["train"] for domain in data["domains"].values()]
    labels = torch.zeros(sum(sizes), dtype=torch.int64)
    for client, entry in config["partition"]["clients"].items():
        counts = torch.tensor(entry["per_class"])
        labels[torch.from_numpy(partition.train[client])] = torch.arange(len(counts)).repeat_interleave(counts)
    black = torch.zeros(1, *data["image_shape"], dtype=torch.uint8)
    domains = {}
    for name, y in zip(data["domains"], torch.split(labels, sizes), strict=True):
        images = Images(black.expand(len(y), -1, -1, -1), y)
        kept = data["domains"][name].get("validation", 0)
        beside = Images(black.expand(kept, -1, -1, -1), torch.zeros(kept, dtype=torch.int64)) if kept else None
        domains[name] = Domain(name, images, images, beside)
    normalise = Normalise(tuple(data["normalise"]["mean"]), tuple(data["normalise"]["std"]))
    return Dataset(data["name"], tuple(data["classes"]), domains, normalise, data["source"], licence=data["licence"])


def _assembled(
    options: Options,
    network: Network,
    method: Method,
    dataset: Dataset,
    partition: Partition,
    clients_folder: Path,
    augment: Augment,
    device: torch.device,
) -> Assembly:
    """Build and rehearse on partitioned data."""
    bases, report = build_networks(network, options, dataset.image_shape, len(dataset.classes), type(method))
    context = RunContext(
        method=method,
        plan=method.plan(options.training_plan()),
        models=tuple(base.to(getattr(torch, options.dtype)) for base in bases),
        dataset=dataset,
        partition=partition,
        clients_folder=clients_folder,
        augment=augment,
        balanced=options.balanced,
        validation=_validation(options, method),
        seed=options.seed,
        dtype=getattr(torch, options.dtype),
        device=device,
        autocast=options.autocast,
        guard=parse_guard(options.guard),
        views=network.views,
        robust=None if options.robust is None else parse_robust(options.robust),
        max_share=options.max_share,
    )
    # What a method builds may depend on the noise, which is known before where nothing is trained.
    context = replace(context, guard=_settled(options, context))
    with keyed_torch(options.seed, "build"):
        built = tuple(_built(options, method, base, context.at(0, None)) for base in context.models)
        if network.pretrained:
            built = tuple(freeze_untouched(model, method) for model in built)
        restore_backbone(network, built, clients_folder.parent)
        # What a method adds is made by torch in its default precision.
        context = replace(
            context,
            models=tuple(model.to(context.dtype) for model in built),
            layout=choose_layout(options.layout, built, context.dtype, device, options.autocast),
        )
    frozen = choose_frozen(options.frozen, context)
    prepared = prepare(context).with_context(frozen=frozen.parts)
    refuse_impossible(options, network, prepared, _participants(options, partition))
    prepared = prepared.with_context(guard=_settled(options, prepared.context, prepared.templates))
    engine = choose_engine(options.engine, options.workers, _participants(options, partition), prepared)
    return Assembly(
        options, network, prepared, engine, run_warnings(options, network, prepared), report, frozen.summary()
    )


def _settled(options: Options, context: RunContext, templates: Templates | None = None) -> Guard:
    """The guard with the noise that follows from its epsilon, as far as that is known."""
    upload = None if templates is None else templates.upload
    together = _participants(options, context.partition)
    return settled(context.guard, context.method, context.plan, context.sizes, together, upload)


def _validation(options: Options, method: Method) -> float:
    """Part of every client's training images that is kept from training, as the user says, else the method."""
    setting = options.settings_for("data").get("validation")
    if setting is not None and options.validation is not None:
        raise UserError("--validation and --set data.validation mean the same; give only one of them")
    if setting is not None:
        return float(setting)
    return method.validation_share if options.validation is None else options.validation


def _built(options: Options, method: Method, base: Split, at: At) -> Split:
    """The method's own model; a model it cannot use is refused in its name."""
    try:
        return method.build(base, at)
    except UserError as error:
        raise UserError(f"{options.method}: {error}") from None


def _participants(options: Options, partition: Partition) -> int:
    """How many clients train in a round."""
    return RoundPolicy(options.participation).participants_of(len(partition.clients))


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f"device={name} is not valid; use cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: not available on this machine; use --device cpu")
    return device


def _refuse_unknown_prefixes(options: Options) -> None:
    for key in options.set:
        prefix, dot, _ = key.partition(".")
        if dot and prefix not in ("model", "data"):
            raise UserError(f"--set {key}: settings are a method's KEY, model.KEY or data.KEY")


def _data_settings(given: Mapping[str, str], data: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings every data set takes, and those of this one."""
    values = checked({**data_options(data), **_DATA_SETTINGS}, given, "the data", "data.")
    own = {key: value for key, value in values.items() if key not in _DATA_SETTINGS}
    return {key: value for key, value in values.items() if key in _DATA_SETTINGS}, own
