"""All explanations of a folder, as Python shows them."""

from html import escape
from pathlib import Path
from typing import Any

from protofed.errors import UserError
from protofed.pages.drawing import ShownPicture
from protofed.pages.elements import picture, png_source
from protofed.pages.markup import tag
from protofed.pages.notebook import frame
from protofed.text import counted


class Explanations(dict[str, Any]):
    """The content of explanations.json, whose pictures and page are in the folder `path`."""

    def __init__(self, content: dict[str, Any], path: Path) -> None:
        super().__init__(content)
        self.path = path

    def table(self) -> Any:
        """What each model says about each image, a row for each; a DataFrame where pandas is installed."""
        return frame(
            [
                {
                    "image": image["name"],
                    "label": image["label"],
                    "client": view["client"],
                    "predicted": view["predicted"],
                    "probability": view["probability"],
                    "agrees": view["agrees"],
                }
                for image in self["images"]
                for view in image["clients"]
            ]
        )

    def plot(self, image: str | int = 0, rank: int = 1) -> ShownPicture:
        """The picture of an image, by its number or name; `rank` 2 shows the second strongest prototype, and so on."""
        names = [each["name"] for each in self["images"]]
        if image not in names and image not in range(len(names)):
            raise UserError(f"there is no image {image!r}; the images are {', '.join(names)}")
        chosen = self["images"][image if isinstance(image, int) else names.index(image)]
        if not 1 <= rank <= len(chosen["pictures"]):
            raise UserError(f"{chosen['name']} has pictures of rank 1 to {len(chosen['pictures'])}, not {rank}")
        png = (self.path / chosen["pictures"][rank - 1]).read_bytes()
        return ShownPicture(png, f"what the models see in {chosen['name']}")

    def __repr__(self) -> str:
        images = counted(len(self["images"]), "image")
        return f"<Explanations of {images} by {', '.join(self['clients'])} in {str(self.path)!r}>"

    def _repr_html_(self) -> str:
        shown = [
            picture(png_source((self.path / image["pictures"][0]).read_bytes()), image["name"])
            for image in self["images"]
            if image["pictures"]
        ]
        findings = tag("ul", *(tag("li", text) for text in self["findings"]))
        return f"<strong>{escape(self['title'])}</strong>{findings}{''.join(shown)}"
