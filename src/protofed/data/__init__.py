"""Images and who holds them: reading, the embedded default, partitions, augmentation, normalisation."""

from protofed.data.augment import AUGMENTATIONS, Augment
from protofed.data.catalog import DataInfo, DataSummary, DomainSummary, available, describe, load, register_data
from protofed.data.images import DataPlace, Dataset, Domain, Images, RawData
from protofed.data.listing import ReadOptions
from protofed.data.normalise import NORMALISATIONS, Normalise
from protofed.data.partition import Partition, deals_by_label, make_partition

__all__ = [
    "AUGMENTATIONS",
    "NORMALISATIONS",
    "Augment",
    "DataInfo",
    "DataPlace",
    "DataSummary",
    "Dataset",
    "Domain",
    "DomainSummary",
    "Images",
    "Normalise",
    "Partition",
    "RawData",
    "ReadOptions",
    "available",
    "deals_by_label",
    "describe",
    "load",
    "make_partition",
    "register_data",
]
