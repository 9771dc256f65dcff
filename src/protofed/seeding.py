"""Every random number of a run comes from a generator keyed by what it is for.

Keys are hashed with blake2, never with `hash()`, which is salted per process. So a resumed run draws what an
uninterrupted one would, and every engine sees the same draws whatever the order in which it visits clients.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import torch


def stable_seed(seed: int, purpose: str, *keys: object) -> int:
    """A 63-bit number that depends on nothing but its arguments."""
    text = "\x1f".join([str(seed), purpose, *map(str, keys)])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, *keys: object) -> torch.Generator:
    """A torch generator for one purpose, for example ("order", round, client)."""
    return torch.Generator().manual_seed(stable_seed(seed, purpose, *keys))


def numpy_generator(seed: int, purpose: str, *keys: object) -> np.random.Generator:
    """The same for code that draws with numpy (partitions, generated images)."""
    return np.random.default_rng(stable_seed(seed, purpose, *keys))


@contextmanager
def keyed_torch(seed: int, purpose: str) -> Iterator[None]:
    """Inside: torch's global generator, from which layers draw their initial weights, is keyed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stable_seed(seed, purpose))
        yield
