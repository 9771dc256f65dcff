"""Weight files into models, with an exact account of what fitted."""

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from protofed.errors import UserError
from protofed.models.groups import tensors
from protofed.models.split import Split
from protofed.system import check_array_size

_KEYS_SHOWN = 5


class Mismatch(NamedTuple):
    """A tensor that has another shape in the file than in the model, for example a head for other classes."""

    name: str
    in_file: tuple[int, ...]
    in_model: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} ({_shape_text(self.in_file)} in the file, {_shape_text(self.in_model)} in the model)"


@dataclass(frozen=True)
class WeightsReport:
    """What a weight file contributed to a model; integer buffers count on neither side."""

    path: Path
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[Mismatch, ...]

    def summary(self) -> str:
        """The report in words, one line for each kind of key that did not fit."""
        total = len(self.loaded) + len(self.missing) + len(self.mismatched)
        lines = [f"{self.path.name}: {len(self.loaded)} of {total} tensors loaded"]
        for title, keys in (
            ("with another shape, left unchanged", self.mismatched),
            ("in the model but not in the file, left unchanged", self.missing),
            ("in the file but not in the model, ignored", self.unexpected),
        ):
            if keys:
                lines.append(f"  {title}: {', '.join(map(str, keys))}")
        return "\n".join(lines)


def load_weights(model: Split, path: str | Path) -> WeightsReport:
    """Copy every tensor whose name and shape fit from a .safetensors, .pth or .pt file, all or nothing.

    Names may be ours or torchvision's, with or without a leading `module.`; a PyTorch file may hold them under
    `state_dict`. Code inside a file is never run.
    """
    return load_weights_into(tensors(model), path)


def load_weights_into(own: Mapping[str, Tensor], path: str | Path) -> WeightsReport:
    """The same for tensors by name."""
    path = Path(path)
    stored = _own_names(read_weights(path), own, path)
    fitting = {name: value for name, value in stored.items() if name in own and value.shape == own[name].shape}
    if not fitting:
        raise UserError(
            f"no tensor of {path} fits the model: the file has {_some(stored)}, the model has {_some(own)}; "
            "give weights of the same architecture"
        )
    _copy_finite(fitting, own, path)
    return _report(path, stored, fitting, own)


def _copy_finite(fitting: Mapping[str, Tensor], own: Mapping[str, Tensor], path: Path) -> None:
    """Copy all of them, or none where one is not finite."""
    converted = {name: value.to(own[name].dtype) for name, value in fitting.items()}
    for name, value in converted.items():
        if not value.isfinite().all():
            raise UserError(f"tensor {name!r} of {path} contains non-finite values; give undamaged weights")
    with torch.no_grad():
        for name, value in converted.items():
            own[name].copy_(value)


def _report(
    path: Path, stored: Mapping[str, Tensor], fitting: Mapping[str, Tensor], own: Mapping[str, Tensor]
) -> WeightsReport:
    return WeightsReport(
        path=path,
        loaded=tuple(name for name in own if name in fitting),
        missing=tuple(name for name in own if name not in stored),
        unexpected=tuple(name for name in stored if name not in own),
        mismatched=tuple(
            Mismatch(name, tuple(stored[name].shape), tuple(own[name].shape))
            for name in own
            if name in stored and name not in fitting
        ),
    )


def read_weights(path: Path) -> dict[str, Tensor]:
    """The floating-point tensors of a .safetensors, .pth or .pt file, under the names they have there."""
    if path.suffix not in (".safetensors", ".pth", ".pt"):
        raise UserError(f"weights {path} are of an unknown kind; give a .safetensors, .pth or .pt file")
    if not path.is_file():
        raise UserError(f"there is no weights file {path}; give the path of a .safetensors, .pth or .pt file")
    try:
        if path.suffix == ".safetensors":
            content: object = load_file(path)
        else:
            _refuse_oversized(path)
            content = torch.load(path, map_location="cpu", weights_only=True)
    except UserError:
        raise
    except Exception as error:  # a damaged file makes the readers fail in many ways, none of them ours to tell apart
        raise UserError(
            f"cannot read weights {path}: it is damaged or holds more than tensors (code is never executed); give "
            "a complete .safetensors file or one written by torch.save(model.state_dict(), ...)"
        ) from error
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    entries = content.items() if isinstance(content, Mapping) else ()
    stored = {str(name): value for name, value in entries if _is_plain(value)}
    if not stored:
        raise UserError(f"weights {path} hold no named tensors; give a file of a model's state_dict")
    return stored


def _refuse_oversized(path: Path) -> None:
    """Refuse an archive that would unpack to more than memory holds."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            check_array_size(path, (sum(entry.file_size for entry in archive.infolist()),), what="tensors")


def _is_plain(value: object) -> bool:
    """Whether this is a floating-point tensor that holds its values: neither sparse nor without storage."""
    return (
        isinstance(value, Tensor) and value.is_floating_point() and value.layout is torch.strided and not value.is_meta
    )


def _own_names(stored: Mapping[str, Tensor], own: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The tensors of a file under the model's names where there is one; torchvision has the stem at top level."""
    renamed: dict[str, Tensor] = {}
    for name, value in stored.items():
        bare = name.removeprefix("module.")
        target = next((candidate for candidate in (name, bare, f"stem.{bare}") if candidate in own), name)
        if target in renamed:
            raise UserError(f"weights {path} hold {target!r} under two names; give a file with each tensor once")
        renamed[target] = value
    return renamed


def _some(names: Mapping[str, Tensor]) -> str:
    shown = ", ".join(f"{name} ({_shape_text(names[name].shape)})" for name in list(names)[:_KEYS_SHOWN])
    return f"{shown}, ..." if len(names) > _KEYS_SHOWN else shown


def _shape_text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "one number"
