"""What the server knows of the sites' images: how many of each class there are. No pixels reach it.

The federation counts, weights and rehearses with data sets. Where the images are elsewhere, blank ones stand in for
them, as many of each class as their site says it holds; they share one zero, so they cost no memory. A site puts its
own images in their place, and so both sides prepare the same run.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError

from protofed.data import Dataset, Domain, Images, Normalise
from protofed.data.labels import alike_classes
from protofed.errors import BadMessage, UserError

T = TypeVar("T")
log = logging.getLogger("protofed")


@dataclass(frozen=True)
class Hello:
    """What a site says of itself before anything begins."""

    protofed: str
    classes: tuple[str, ...]
    image_shape: tuple[int, int, int]
    train: tuple[int, ...]
    """Images of each class."""
    test: tuple[int, ...]

    @classmethod
    def of(cls, dataset: Dataset) -> "Hello":
        """Of a site's own data."""
        (domain,) = dataset.domains.values()
        train, test = (
            tuple(part.y.bincount(minlength=len(dataset.classes)).tolist()) for part in (domain.train, domain.test)
        )
        return cls(version("protofed"), dataset.classes, dataset.image_shape, train, test)

    @classmethod
    def read(cls, content: Any, sender: str) -> "Hello":
        """From what was sent."""
        hello = _validated(cls, content, sender, "hello")
        if {len(hello.train), len(hello.test)} != {len(hello.classes)} or min(*hello.train, *hello.test) < 0:
            raise BadMessage(f"{sender}: its counts do not fit its classes")
        if not sum(hello.train):
            raise BadMessage(f"{sender}: it holds no training images")
        return hello


@dataclass(frozen=True)
class Census:
    """Classes, shape, and who holds how much, in canonical order."""

    classes: tuple[str, ...]
    image_shape: tuple[int, int, int]
    sites: Mapping[str, Hello]

    @classmethod
    def of(cls, hellos: Mapping[str, Hello], shape: tuple[int, int, int] | None = None) -> "Census":
        """What the sites have together: classes are joined by name, images brought to one shape."""
        for name, hello in hellos.items():
            cls._compare(name, hello)
        alike = alike_classes({name: set(hello.classes) for name, hello in hellos.items()})
        if alike:
            raise UserError(f"{alike[0].text}; give --labels at the sites, or rename the classes there")
        cls._refuse_strangers(hellos)
        classes = tuple(dict.fromkeys(label for hello in hellos.values() for label in hello.classes))
        for name, hello in hellos.items():
            lacking = [label for label in classes if label not in hello.classes]
            if lacking:
                log.warning("%s has no class %s", name, ", ".join(lacking))
        shapes = [hello.image_shape for hello in hellos.values()]
        channels, height, width = (max(sides) for sides in zip(*shapes, strict=True))
        return cls(classes, shape or (channels, height, width), dict(hellos))

    def with_site(self, name: str, hello: Hello) -> "Census":
        """With one more, which has no class that the others lack."""
        self._compare(name, hello)
        strange = [label for label in hello.classes if label not in self.classes]
        if strange:
            raise UserError(
                f"{name} has the class {strange[0]}, the run has {', '.join(self.classes)}; "
                "--labels at the site regroups them"
            )
        return replace(self, sites=dict(sorted({**self.sites, name: hello}.items())))

    @staticmethod
    def _refuse_strangers(hellos: Mapping[str, Hello]) -> None:
        for name, hello in hellos.items() if len(hellos) > 1 else ():
            others = {label for other, each in hellos.items() if other != name for label in each.classes}
            if not others & set(hello.classes):
                raise UserError(
                    f"{name} has the classes {', '.join(hello.classes)}, and no other site has any of them "
                    f"({', '.join(sorted(others))}); --labels at the site regroups them"
                )

    @staticmethod
    def _compare(name: str, hello: Hello) -> None:
        if hello.protofed != version("protofed"):
            raise UserError(
                f"{name} runs protofed {hello.protofed}, the server {version('protofed')}; install the same"
            )

    def dataset(self, normalise: str | None, own: Domain | None = None) -> Dataset:
        """Blank images that stand for those at the sites."""
        channels = self.image_shape[0]
        normalisation = Normalise.named(normalise, channels) if normalise else Normalise.default(channels)
        domains = {
            name: Domain(name, self._blank(hello, hello.train), self._blank(hello, hello.test))
            for name, hello in self.sites.items()
        }
        if own is not None:
            places = self._places(self.sites[own.name])
            domains[own.name] = own.mapped(lambda images, _: Images(images.x, places[images.y]))
        return Dataset("sites", self.classes, domains, normalisation, source="held by the sites")

    def as_dict(self) -> dict[str, Any]:
        """For the wire and for the run folder."""
        return asdict(self)

    @classmethod
    def read(cls, content: Any, sender: str) -> "Census":
        """From what was sent or stored."""
        return _validated(cls, content, sender, "census")

    def _places(self, hello: Hello) -> torch.Tensor:
        """The number that each class of a site has in the run."""
        return torch.tensor([self.classes.index(label) for label in hello.classes])

    def _blank(self, hello: Hello, counts: tuple[int, ...]) -> Images:
        labels = torch.repeat_interleave(self._places(hello), torch.tensor(counts))
        pixel = torch.zeros(1, 1, 1, 1, dtype=torch.uint8)
        return Images(pixel.expand(len(labels), *self.image_shape), labels)


def _validated(kind: type[T], content: Any, sender: str, what: str) -> T:
    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        raise BadMessage(f"{sender}: {error.errors()[0]['msg']} in its {what}") from None
