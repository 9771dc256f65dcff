"""Typed messages and states, the one codec that carries them, and their exact bytes."""

from protofed.records.codec import KINDS, Bytes, Message, conform, decode, decode_file, encode
from protofed.records.quantise import Quantiser
from protofed.records.robust import Robust, parse_robust
from protofed.records.tally import Sums, Tally, adds_up, can_be_drawn_in
from protofed.records.types import (
    ClassTable,
    Each,
    Features,
    Mean,
    NoisedTable,
    Nothing,
    PrototypeSet,
    Record,
    Sum,
    Weights,
    map_tensors,
    parts_of,
)

__all__ = [
    "KINDS",
    "Bytes",
    "ClassTable",
    "Each",
    "Features",
    "Mean",
    "Message",
    "NoisedTable",
    "Nothing",
    "PrototypeSet",
    "Quantiser",
    "Record",
    "Robust",
    "Sum",
    "Sums",
    "Tally",
    "Weights",
    "adds_up",
    "can_be_drawn_in",
    "conform",
    "decode",
    "decode_file",
    "encode",
    "map_tensors",
    "parse_robust",
    "parts_of",
]
