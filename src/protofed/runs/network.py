"""The network of a run: which one, from which weights, at which image size, and what of it is trained."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from protofed.data import Dataset, Normalise
from protofed.errors import UserError
from protofed.method import Method
from protofed.models import (
    ImageShape,
    Split,
    WeightsReport,
    build_model,
    describe,
    load_weights,
    load_weights_into,
    tensors,
    to_common_length,
)
from protofed.models.freezing import freeze, freeze_normalisation, frozen_tensors, untrained_stages
from protofed.models.pretrained import PRETRAINED, load_pretrained, pretrained_hash
from protofed.runs.options import Options
from protofed.seeding import keyed_torch
from protofed.system import write_atomically

SMALL_NETWORK, PRETRAINED_NETWORK = "cnn", "efficientnet_lite0"
"""What is taken where the user names none: for digits and icons, and for photographs."""

BACKBONE_FILE = "backbone.safetensors"
"""Frozen weights of a run that come from no package."""

NAMED_STARTS = ("imagenet", "none")
"""Weights to start from that are no file, so that everybody has them."""

PHOTOGRAPH = 48
"""Images of this side and more are taken for photographs."""
_FULL_SIDE, _REDUCED_SIDE, _LARGE = 224, 128, 96
_STRIDE = 32
_DEFAULT_VIEWS = 2


@dataclass(frozen=True)
class Network:
    """The network of a run, as the user or the defaults chose it."""

    names: tuple[str, ...]
    weights: str
    """imagenet | none | FILE"""
    train: str
    views: int
    image_size: int | None
    """None: as the images are."""
    reason: str = ""
    """Why, where the user did not say."""

    @property
    def pretrained(self) -> bool:
        """Whether weights come from a package that every site has."""
        return self.weights == "imagenet"

    def summary(self) -> dict[str, object]:
        """For run.json."""
        hashes = {name: pretrained_hash(name) for name in self.names if self.pretrained and name in PRETRAINED}
        return {"from": self.weights, "train": self.train, "views": self.views, "sha256": hashes or None}


def network_of(config: Mapping[str, Any]) -> Network:
    """The network of a finished run."""
    model = config["model"]
    start = model.get("start") or {"from": "none", "train": "all"}
    weights = start["from"] if start["from"] == "imagenet" else "none"
    return Network(tuple(model["name"].split(",")), weights, start["train"], 1, None)


def choose_network(options: Options, shape: ImageShape, method: type[Method]) -> Network:
    """The user's choice, completed by defaults that fit the images."""
    side = min(shape[1:])
    names = (options.model or (PRETRAINED_NETWORK if side >= PHOTOGRAPH else SMALL_NETWORK)).split(",")
    weights = _choose_weights(options, names)
    pretrained = weights == "imagenet"
    train = options.train or (method.trained_stages if pretrained and method.trains_backbone else "all")
    size = options.image_size
    if size is None and pretrained:
        size = _side_for(side)
    views = _choose_views(options, pretrained, train if method.trains_backbone else "all")
    network = Network(tuple(names), weights, train, views, size)
    return replace(network, reason=_reason(options, network, side, method.trains_backbone))


def _choose_weights(options: Options, names: Sequence[str]) -> str:
    lacking = [name for name in names if name not in PRETRAINED]
    weights = options.weights or ("none" if lacking else "imagenet")
    if weights == "imagenet" and lacking:
        raise UserError(f"--weights imagenet: {lacking[0]} has none; use {', '.join(PRETRAINED)}, or give a file")
    if weights not in NAMED_STARTS and len(names) > 1:
        raise UserError("--weights fits only one architecture; omit it, or give one --model")
    return weights


def _choose_views(options: Options, pretrained: bool, train: str) -> int:
    frozen = train != "all"
    augmented = "augment" in options.settings_for("data")
    # A head alone was measured to gain nothing from them.
    views = options.views or (_DEFAULT_VIEWS if pretrained and frozen and train != "head" and not augmented else 1)
    if views > 1 and not frozen:
        raise UserError("--views needs a frozen part, whose output is cached for each view; use --train head or last")
    return views


def _side_for(side: int) -> int:
    """The side at which a pretrained network sees images: its own, or less where images are small."""
    if side >= _FULL_SIDE - _STRIDE:
        return _FULL_SIDE
    return max(_STRIDE, side // _STRIDE * _STRIDE) if side >= _LARGE else _REDUCED_SIDE


def _reason(options: Options, network: Network, side: int, trains_backbone: bool) -> str:
    """Empty where the user named the network, or where images are small by themselves."""
    (name, *_) = network.names
    if options.model is not None or (name == SMALL_NETWORK and options.image_size is None):
        return ""
    if name == SMALL_NETWORK:
        return (
            f"images of {side} pixels (--image-size): {name}, as for all images below {PHOTOGRAPH} pixels; larger "
            f"images, or --model {PRETRAINED_NETWORK}, get a network with ImageNet weights"
        )
    start = {"imagenet": "with ImageNet weights", "none": "from scratch"}.get(network.weights, "with the weights given")
    size = "" if network.image_size is None else f" at {network.image_size} pixels"
    chosen = f"images of {side} pixels: {name} {start}{size}"
    if not trains_backbone:
        return f"{chosen}, frozen except for what {options.method} adds to it; --model selects another network"
    other = "" if network.train == "all" else ", --train all trains all of it"
    return f"{chosen}, with --train {network.train}; --model selects another network{other}"


def fitted(dataset: Dataset, network: Network, keeps_normalisation: bool) -> Dataset:
    """The images as the network wants them."""
    if network.image_size is not None:
        dataset = dataset.resized(network.image_size)
    if network.pretrained and not keeps_normalisation:
        dataset = dataset.normalised(Normalise.named("imagenet", dataset.channels))
    return dataset


def build_networks(
    network: Network, options: Options, shape: ImageShape, classes: int, method: type[Method]
) -> tuple[list[Split], WeightsReport | None]:
    """At their initial weights, which depend on the seed only, so that every method starts from the same."""
    with keyed_torch(options.seed, "init"):
        settings = _settings(network.names, options)
        models = [build_model(name, shape, classes, settings[name]) for name in network.names]
        models = to_common_length(models)
    report = None
    if network.pretrained:
        for name, model in zip(network.names, models, strict=True):
            load_pretrained(model, name)
    elif network.weights != "none":
        report = load_weights(models[0], network.weights)
    if method.trains_backbone:
        models = [freeze(model, untrained_stages(model, network.train)) for model in models]
        if network.pretrained and network.train != "all":
            models = [freeze_normalisation(model) for model in models]
    return models, report


def freeze_untouched(model: Split, method: Method) -> Split:
    """Stages of a pretrained network that a method neither trains nor sends are the same for all clients."""
    if not method.freezes_statistics:
        return model
    touched = method.shares.names(model).union(*(step.trains.names(model) for step in method.steps))
    untouched = tuple(
        name for name, stage in model.stages().items() if not any(f"{name}.{key}" in touched for key in tensors(stage))
    )
    return freeze(model, untouched)


def keep_backbone(network: Network, models: Sequence[Split], folder: Path) -> None:
    """Write the frozen weights that come from no package into a run folder, once for everybody."""
    if own := _own_backbone(network, models):
        content = {name: tensor.detach().cpu().contiguous() for name, tensor in own.items()}
        write_atomically(folder / BACKBONE_FILE, save(content))


def restore_backbone(network: Network, models: Sequence[Split], folder: Path) -> None:
    """Put back the frozen weights that a run folder keeps; that of a run which has not begun keeps none yet."""
    own, path = _own_backbone(network, models), folder / BACKBONE_FILE
    if not own or not (path.exists() or (folder / "run.json").exists()):
        return
    if not path.exists():
        raise UserError(f"{folder} is damaged: {BACKBONE_FILE}, its frozen weights, is missing")
    report = load_weights_into(own, path)
    if lacking := (*report.missing, *(each.name for each in report.mismatched)):
        raise UserError(f"{path} is damaged: it lacks {lacking[0]}")


def _own_backbone(network: Network, models: Sequence[Split]) -> dict[str, Tensor]:
    """Frozen weights that come from no package."""
    return {} if network.pretrained else frozen_tensors(models[0])


def _settings(names: Sequence[str], options: Options) -> dict[str, dict[str, str]]:
    """The settings of each network; one that none of several takes is a mistake."""
    given = options.settings_for("model")
    if len(names) == 1:
        return {names[0]: given}
    taken = {name: {key: given[key] for key in given if key in describe(name).options} for name in names}
    for key in given:
        if not any(key in each for each in taken.values()):
            raise UserError(f"--set model.{key}: none of the models {', '.join(names)} has such an option")
    return taken
