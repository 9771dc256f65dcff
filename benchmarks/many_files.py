"""How long `protofed data` takes to look at many small files, twice: `python -m benchmarks.many_files`.

Writes so many PNG files of 28x28 noise to a temporary folder, looks at them twice, and prints both times.
"""

import argparse
import io
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from protofed.data.survey import survey
from protofed.system import cores


def write_files(folder: Path, count: int) -> None:
    """Two sites of two classes, 500 files in a folder."""
    rng = np.random.default_rng(0)
    for number in range(count):
        place = folder / ("north", "south")[number % 2] / ("a", "b")[number // 2 % 2] / f"p{number // 500:04d}"
        if number % 500 < 4:
            place.mkdir(parents=True, exist_ok=True)
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (28, 28), dtype=np.uint8)).save(file, "PNG", compress_level=1)
        (place / f"{number}.png").write_bytes(file.getvalue())


def main() -> None:
    """Write, look, look again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=100_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), arguments.files)
        for look in ("first", "second"):
            start, cpu = time.perf_counter(), time.process_time()
            report = survey(folder, pictures=False)
            images = sum(domain.train + domain.test for domain in report.summary.domains)
            print(
                f"{look} look at {images} files on {cores()} cores: {time.perf_counter() - start:.1f} s "
                f"({time.process_time() - cpu:.1f} s of this process)"
            )


if __name__ == "__main__":
    main()
