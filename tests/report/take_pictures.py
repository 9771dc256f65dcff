"""Pictures of a report page for the documentation: `python tests/report/take_pictures.py REPORT.html docs/pictures`."""

import io
import sys
from pathlib import Path

from browser import Tab, started
from PIL import Image

LOOKS = {
    # name: width, height, dark, the section at the top
    "report-light": (1100, 1120, False, ""),
    "report-dark": (1100, 1120, True, "#course"),
    "report-phone": (375, 812, False, ""),
}


def take(page: Path, folder: Path) -> None:
    """Light, dark and on a telephone."""
    with started() as browser:
        for name, (width, height, dark, section) in LOOKS.items():
            tab = Tab(browser, width, height, dark)
            tab.open(page.resolve().as_uri())
            if section:
                tab.run("document.documentElement.style.scrollBehavior = 'auto'")
                tab.run(f"document.querySelector('{section}').scrollIntoView()")
            path = folder / f"{name}.png"
            tab.picture(path)
            Image.open(io.BytesIO(path.read_bytes())).convert("RGB").save(path, optimize=True)


if __name__ == "__main__":
    take(Path(sys.argv[1]), Path(sys.argv[2]))
