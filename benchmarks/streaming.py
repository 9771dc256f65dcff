"""The memory of a run on more images than should be held in it: 10,000 of 224 pixels, 1.5 GB once decoded."""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from benchmarks.memory import watched

_RESULT = Path(__file__).parent / "results" / "streaming.md"
_SIDE = 224
_CLASSES = ("disc", "box", "bar", "ring")
_DOMAINS = ("north", "south")
_TESTED = 5
"""Every so many images one is tested on."""
_GOAL = 1.5e9
_METHOD = ("fedavg", "--train", "head", "--rounds", "2", "--views", "1", "--clients", "north=2,south=2")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the images and run on them in a new process; the bytes that this process and its children take."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--side", type=int, default=_SIDE)
    parser.add_argument("--write", action="store_true", help=f"write {_RESULT.name}")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_images(folder / "images", arguments.images, arguments.side)
        start = time.perf_counter()
        above = run_bytes(folder) - interpreter_bytes()
        seconds = time.perf_counter() - start
    decoded = arguments.images * 3 * arguments.side**2
    lines = [
        "# Memory of a run on many images",
        "",
        f"`protofed run {' '.join(_METHOD)}` on {arguments.images:,} JPEGs of {arguments.side} pixels, "
        f"{decoded / 1e9:.2f} GB once decoded; the features of the backbone are computed. The highest sum over the "
        "process and its children, in which shared pages count once, less that of one that has imported protofed.",
        "",
        "| above the interpreter, GB | goal | seconds |",
        "| --- | --- | --- |",
        f"| {above / 1e9:.2f} | < {_GOAL / 1e9:.1f} | {seconds:.0f} |",
        "",
    ]
    print("\n".join(lines))
    if arguments.write:
        _RESULT.write_text("\n".join(lines))
    return above


def write_images(folder: Path, count: int, side: int) -> None:
    """Shapes on noise, as JPEG files in folders of domain, part and class."""
    for domain in _DOMAINS:
        for part in ("train", "test"):
            for label in _CLASSES:
                (folder / domain / part / label).mkdir(parents=True)

    def write(number: int) -> None:
        label, domain = _CLASSES[number % len(_CLASSES)], _DOMAINS[number // len(_CLASSES) % len(_DOMAINS)]
        part = "test" if number // (len(_CLASSES) * len(_DOMAINS)) % _TESTED == 0 else "train"
        picture(number, label, side).save(folder / domain / part / label / f"{number:06}.jpg", quality=80)

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, range(count)))


def picture(number: int, label: str, side: int) -> Image.Image:
    """One shape of a random colour at a random place."""
    rng = np.random.default_rng(number)
    coarse = rng.integers(256, size=(side // 4, side // 4, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((side, side), Image.Resampling.BILINEAR)
    left, top = rng.integers(side // 2, size=2).tolist()
    size = side // 3
    box = (left, top, left + size, top + (size // 4 if label == "bar" else size))
    colour = tuple(rng.integers(256, size=3).tolist())
    draw = ImageDraw.Draw(image)
    if label in ("disc", "ring"):
        draw.ellipse(box, fill=colour if label == "disc" else None, outline=colour, width=side // 20)
    else:
        draw.rectangle(box, fill=colour)
    return image


def run_bytes(folder: Path) -> int:
    """The highest memory of a run, its children included, with an empty cache."""
    command = ["-m", "protofed", "run", *_METHOD, "--data", str(folder / "images"), "--out", str(folder / "run")]
    return _peak_bytes(command, {**os.environ, "PROTOFED_CACHE": str(folder / "cache")})


def interpreter_bytes() -> int:
    """That of a process that has imported protofed and does nothing."""
    return _peak_bytes(["-c", "import protofed, time; time.sleep(2)"], dict(os.environ))


def _peak_bytes(command: list[str], environment: dict[str, str]) -> int:
    with (
        subprocess.Popen([sys.executable, *command], env=environment, stdout=subprocess.DEVNULL) as process,
        watched(process.pid) as peak,
    ):
        code = process.wait()
    if code:
        raise SystemExit(f"{' '.join(command)} ended with {code}")
    return peak.bytes


if __name__ == "__main__":
    sys.exit(main() >= _GOAL)
