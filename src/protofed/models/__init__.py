"""Models as chains of named stages: building them by name, choosing their tensors, loading their weights."""

from protofed.models import efficientnet, resnet, small  # reading them registers their models
from protofed.models.catalog import (
    ModelInfo,
    build_model,
    describe,
    model_names,
    register_model,
    require_side,
)
from protofed.models.fast.layout import LAYOUTS, choose_layout, laid_out, torchs_own_kernels
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
from protofed.models.layers import in_full_precision
from protofed.models.projection_head import to_common_length, with_projection
from protofed.models.split import ImageShape, Split
from protofed.models.weights import Mismatch, WeightsReport, load_weights, load_weights_into, read_weights

__all__ = [
    "LAYOUTS",
    "Group",
    "ImageShape",
    "Mismatch",
    "ModelInfo",
    "Split",
    "WeightsReport",
    "build_model",
    "choose_layout",
    "describe",
    "efficientnet",
    "everything",
    "features",
    "head",
    "in_full_precision",
    "laid_out",
    "load_weights",
    "load_weights_into",
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
    "small",
    "tensors",
    "to_common_length",
    "torchs_own_kernels",
    "with_projection",
]
