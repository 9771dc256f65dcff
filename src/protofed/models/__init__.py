"""Models as chains of named stages: building them by name, choosing their tensors, loading their weights."""

from protofed.models import cnn, efficientnet, lenet, mlp, resnet  # reading them registers their models
from protofed.models.catalog import (
    ModelInfo,
    OptionInfo,
    build_model,
    describe,
    model_names,
    register_model,
    require_side,
)
from protofed.models.groups import (
    Group,
    everything,
    features,
    head,
    normalisation,
    nothing,
    of_type,
    part,
    running_statistics,
    tensors,
)
from protofed.models.layout import LAYOUTS, choose_layout, laid_out, torchs_own_kernels
from protofed.models.projection import to_common_length, with_projection
from protofed.models.split import ImageShape, Split
from protofed.models.weights import Mismatch, WeightsReport, load_weights, read_weights

__all__ = [
    "LAYOUTS",
    "Group",
    "ImageShape",
    "Mismatch",
    "ModelInfo",
    "OptionInfo",
    "Split",
    "WeightsReport",
    "build_model",
    "choose_layout",
    "cnn",
    "describe",
    "efficientnet",
    "everything",
    "features",
    "head",
    "laid_out",
    "lenet",
    "load_weights",
    "mlp",
    "model_names",
    "normalisation",
    "nothing",
    "of_type",
    "part",
    "read_weights",
    "register_model",
    "require_side",
    "resnet",
    "running_statistics",
    "tensors",
    "to_common_length",
    "torchs_own_kernels",
    "with_projection",
]
