"""What documents and examples are followed in: an empty folder with a user's images, in which everything is small."""

import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from protofed import registry
from protofed.data import Domain, Images, RawData, catalog, digits

EXCERPT = {"train": 120, "test": 20}
AT_MOST = {"rounds": 1, "epochs": 1, "samples_per_client": 40}


def small(text: str) -> str:
    """The same with numbers that are no larger than in `AT_MOST`, and no more than two seeds."""
    for option, most in AT_MOST.items():
        name = option.replace("_", "[-_]")
        wanted = re.compile(rf"""\b({name}["]?[ =:]+)(\d+)\b""")  # --rounds 9, rounds=9, "rounds": 9
        text = wanted.sub(lambda found, most=most: f"{found[1]}{min(int(found[2]), most)}", text)
    return text.replace("--seeds 0,1,2", "--seeds 0,1")


@cache
def few_digits() -> RawData:
    """A few images of every part of every domain."""
    whole = digits.load_digits()
    domains = {
        name: Domain(name, every_nth(domain.train, EXCERPT["train"]), every_nth(domain.test, EXCERPT["test"]))
        for name, domain in whole.domains.items()
    }
    return replace(whole, domains=domains)


def every_nth(images: Images, count: int) -> Images:
    """So many of the images, evenly spaced, because some domains are sorted by label."""
    return images.take(torch.arange(count) * len(images) // count)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder with a user's images, in which `digits` is small; what is registered is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_methods", dict(registry._methods))
    monkeypatch.setattr(catalog, "_REGISTRY", dict(catalog._REGISTRY))
    catalog.register_data("digits", few_digits, digits.DESCRIPTION, domains=digits.DOMAINS)
    write_images(tmp_path)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def write_images(folder: Path) -> None:
    """my-data/SITE/PART/CLASS/*.png, and a manifest of the same files."""
    rng = np.random.default_rng(0)
    rows = ["file,label,domain,split"]
    for site in ("north", "south"):
        for part, count in (("train", 12), ("test", 4)):
            for label, brightness in (("healthy", 60), ("diseased", 160)):
                (folder / "my-data" / site / part / label).mkdir(parents=True)
                for number in range(count):
                    name = f"my-data/{site}/{part}/{label}/{number}.png"
                    pixels = rng.integers(0, 60, (60, 60, 3)) + brightness
                    Image.fromarray(pixels.astype(np.uint8)).save(folder / name)
                    rows.append(f"{name},{label},{site},{part}")
    (folder / "my-manifest.csv").write_text("\n".join(rows) + "\n")
