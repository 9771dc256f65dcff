"""What the server knows of the sites' images: how many of each class there are. No pixels reach it.

The federation counts, weights and rehearses with data sets. Where the images are elsewhere, blank ones stand in for
them, as many of each class as their site says it holds; they share one zero, so they cost no memory. A site puts its
own images in their place, and so both sides prepare the same run.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Annotated, Any

import torch
from pydantic import Field

from protofed.clients.wire import Name, checked
from protofed.data import Dataset, Domain, Images, Normalise
from protofed.errors import BadMessage, UserError
from protofed.text import printable

_MOST_CLASSES = 10_000
_MOST_IMAGES = 10_000_000
"""Of one site, to train and to test: the server counts with a label for each of them."""
_LONGEST_SIDE = 16_384

_Side = Annotated[int, Field(strict=True, ge=1, le=_LONGEST_SIDE)]
_Images = Annotated[int, Field(strict=True, ge=0, le=_MOST_IMAGES)]
_Counts = Annotated[tuple[_Images, ...], Field(min_length=1, max_length=_MOST_CLASSES)]


@dataclass(frozen=True)
class Hello:
    """What a site says of itself before anything begins."""

    protofed: Name
    classes: Annotated[tuple[Name, ...], Field(min_length=1, max_length=_MOST_CLASSES)]
    image_shape: tuple[_Side, _Side, _Side]
    train: _Counts
    """Images of each class."""
    test: _Counts

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
        hello: Hello = checked(cls, content, sender, "hello")
        if {len(hello.train), len(hello.test)} != {len(hello.classes)}:
            raise BadMessage(f"{sender}: its counts do not fit its classes")
        if not sum(hello.train):
            raise BadMessage(f"{sender}: it holds no training images")
        if sum(hello.train) > _MOST_IMAGES or sum(hello.test) > _MOST_IMAGES:
            raise BadMessage(f"{sender}: it claims more than {_MOST_IMAGES} images")
        if not all(name.isprintable() for name in (hello.protofed, *hello.classes)):
            raise BadMessage(f"{sender}: a name in its hello cannot be printed")
        if len(set(hello.classes)) < len(hello.classes):
            raise BadMessage(f"{sender}: two of its classes have the same name")
        return hello


@dataclass(frozen=True)
class Census:
    """Classes, shape, and who holds how much, in canonical order."""

    classes: tuple[str, ...]
    image_shape: tuple[int, int, int]
    sites: Mapping[str, Hello]

    @classmethod
    def of(cls, hellos: Mapping[str, Hello], shape: tuple[int, int, int] | None = None) -> "Census":
        """What the sites agree on; one that differs is named. Shapes may differ where the run fixes one."""
        first, model = _like_most(hellos, shape is None)
        for name, hello in hellos.items():
            cls._compare(name, hello, first, model, shape is None)
        return cls(model.classes, shape or model.image_shape, dict(hellos))

    @classmethod
    def differing(cls, hellos: Mapping[str, Hello], shape: tuple[int, int, int] | None = None) -> dict[str, str]:
        """The sites that are not like most of the others, and in what."""
        first, model = _like_most(hellos, shape is None)
        different = {}
        for name, hello in hellos.items():
            try:
                cls._compare(name, hello, first, model, shape is None)
            except UserError as problem:
                different[name] = printable(str(problem))
        return different

    def with_site(self, name: str, hello: Hello, fixed: bool) -> "Census":
        """With one more, which must be like the others."""
        first, model = next(iter(self.sites.items()))
        self._compare(name, hello, first, model, not fixed)
        return replace(self, sites=dict(sorted({**self.sites, name: hello}.items())))

    @staticmethod
    def _compare(name: str, hello: Hello, first: str, model: Hello, shapes_too: bool) -> None:
        if hello.protofed != version("protofed"):
            raise UserError(
                f"{name} runs protofed {hello.protofed}, the server {version('protofed')}; install the same"
            )
        if hello.classes != model.classes:
            raise UserError(
                f"{name} has the classes {_named(hello)}, {first} has {_named(model)}; "
                "sites need the same classes (--labels at the site regroups them, --classes names those it lacks)"
            )
        if shapes_too and hello.image_shape != model.image_shape:
            raise UserError(
                f"the images of {name} are {_shape(hello)}, those of {first} {_shape(model)}; give --image-size and "
                "--set data.channels=1 or 3 to bring them to one shape"
            )

    def dataset(self, normalise: str | None, own: Domain | None = None) -> Dataset:
        """Blank images that stand for those at the sites."""
        channels = self.image_shape[0]
        normalisation = Normalise.named(normalise, channels) if normalise else Normalise.default(channels)
        domains = {
            name: Domain(name, self._blank(hello.train), self._blank(hello.test)) for name, hello in self.sites.items()
        }
        if own is not None:
            domains[own.name] = own
        return Dataset("sites", self.classes, domains, normalisation, source="held by the sites")

    def as_dict(self) -> dict[str, Any]:
        """For the wire and for the run folder."""
        return asdict(self)

    @classmethod
    def read(cls, content: Any, sender: str) -> "Census":
        """From what was sent or stored."""
        census: Census = checked(cls, content, sender, "census")
        return census

    def _blank(self, counts: tuple[int, ...]) -> Images:
        labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        pixel = torch.zeros(1, 1, 1, 1, dtype=torch.uint8)
        return Images(pixel.expand(len(labels), *self.image_shape), labels)


def _like_most(hellos: Mapping[str, Hello], shapes_too: bool) -> tuple[str, Hello]:
    """The first of those whose images can be used together with most others', and its name."""

    def kind(hello: Hello) -> tuple[object, ...]:
        return hello.protofed == version("protofed"), hello.classes, hello.image_shape if shapes_too else None

    ((most, _),) = Counter(kind(hello) for hello in hellos.values()).most_common(1)
    return next((name, hello) for name, hello in hellos.items() if kind(hello) == most)


def _shape(hello: Hello) -> str:
    return "x".join(str(side) for side in hello.image_shape)


def _named(hello: Hello) -> str:
    return printable(", ".join(hello.classes))
