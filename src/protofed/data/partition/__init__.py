"""How the training images are divided among clients: protocols, and the partition they make."""

from protofed.data.partition.partition import Partition
from protofed.data.partition.protocols import deals_by_label, make_partition
from protofed.data.partition.stratified import stratified_split

__all__ = ["Partition", "deals_by_label", "make_partition", "stratified_split"]
