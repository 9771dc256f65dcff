"""What the server knows of the sites' images: how many of each class there are. No pixels reach it.

The federation counts, weights and rehearses with data sets. Where the images are elsewhere, blank ones stand in for
them, as many of each class as their site says it holds; they share one zero, so they cost no memory. A site puts its
own images in their place, and so both sides prepare the same run.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Annotated, Any

import torch
from pydantic import Field

from protofed.clients.wire import Name, checked
from protofed.data import Dataset, Domain, Images, Normalise
from protofed.data.labels import alike_classes
from protofed.data.names import loose_form
from protofed.errors import BadMessage, UserError
from protofed.text import printable

log = logging.getLogger("protofed")

_MOST_CLASSES = 10_000
"""Of one site, and of a run."""
_MOST_OWN_CLASSES = 100
"""Classes that one site alone brings into a run, where it does not share as many with the others."""
_FEW = 10
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
            raise BadMessage(f"{sender}: its counts do not match its classes")
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
        """What the sites have together: classes are joined by name, images brought to one shape."""
        if different := cls.differing(hellos):
            raise UserError(next(iter(different.values())))
        alike = alike_classes({name: set(hello.classes) for name, hello in hellos.items()})
        if alike:
            raise UserError(f"{alike[0].text}; use --labels at the sites, or rename the classes there")
        classes = tuple(dict.fromkeys(label for hello in hellos.values() for label in hello.classes))
        if len(classes) > _MOST_CLASSES:
            raise UserError(f"the sites have {len(classes)} classes together; a run can have at most {_MOST_CLASSES}")
        for name, hello in hellos.items():
            lacking = [label for label in classes if label not in hello.classes]
            if lacking:
                log.warning("%s has no class %s", name, _listed(lacking))
        shapes = [hello.image_shape for hello in hellos.values()]
        channels, height, width = (max(sides) for sides in zip(*shapes, strict=True))
        return cls(classes, shape or (channels, height, width), dict(hellos))

    @classmethod
    def differing(cls, hellos: Mapping[str, Hello]) -> dict[str, str]:
        """The sites that cannot take part with the others, and why."""
        different = {}
        for name, hello in hellos.items():
            try:
                cls._compare(name, hello)
                others = [each for other, each in hellos.items() if other != name]
                _refuse_stranger(name, hello, others)
                _refuse_widening(name, hello, others)
            except UserError as problem:
                different[name] = printable(str(problem))
        return different

    def with_site(self, name: str, hello: Hello) -> "Census":
        """With one more, which has no class that the others lack."""
        self._compare(name, hello)
        strange = [label for label in hello.classes if label not in self.classes]
        if strange:
            raise UserError(
                f"{name} has the class {strange[0]}, the run has {_listed(self.classes)}; "
                "--labels at the site regroups them"
            )
        return replace(self, sites=dict(sorted({**self.sites, name: hello}.items())))

    @staticmethod
    def _compare(name: str, hello: Hello) -> None:
        if hello.protofed != version("protofed"):
            raise UserError(
                f"{name} runs protofed {hello.protofed}, the server {version('protofed')}; install the same version"
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
        census: Census = checked(cls, content, sender, "census")
        return census

    def _places(self, hello: Hello) -> torch.Tensor:
        """The number that each class of a site has in the run."""
        return torch.tensor([self.classes.index(label) for label in hello.classes])

    def _blank(self, hello: Hello, counts: tuple[int, ...]) -> Images:
        labels = torch.repeat_interleave(self._places(hello), torch.tensor(counts))
        pixel = torch.zeros(1, 1, 1, 1, dtype=torch.uint8)
        return Images(pixel.expand(len(labels), *self.image_shape), labels)


def _refuse_stranger(name: str, hello: Hello, others: list[Hello]) -> None:
    """Raise where a site has no class that any other has."""
    known = {label for other in others for label in other.classes}
    if known and not known & set(hello.classes):
        raise UserError(
            f"{name} has the classes {_listed(hello.classes)}, and no other site has any of them "
            f"({_listed(sorted(known))}); --labels at the site regroups them"
        )


def _refuse_widening(name: str, hello: Hello, others: list[Hello]) -> None:
    """Raise where one site would bring in many classes, or other spellings of the others'.

    Lists are joined by name, and everybody's head has a row for each class. Of two sites nobody can say which is right.
    """
    if len(others) < 2:
        return
    known = {label for other in others for label in other.classes}
    own = [label for label in hello.classes if label not in known]
    most = max(_MOST_OWN_CLASSES, len(hello.classes) - len(own))
    if len(own) > min(most, max(_MOST_CLASSES - len(known), 0)):
        raise UserError(
            f"{name} has {len(own)} classes that no other site has ({_listed(own)}); one site may add {most}, and "
            f"a run can have {_MOST_CLASSES}; --labels at the site regroups them, --classes at another site names "
            "them as well"
        )
    forms = {loose_form(label): label for label in known}
    for label in own:
        if loose_form(label) in forms:
            raise UserError(
                f"{name} has the class {label!r}, the others {forms[loose_form(label)]!r}; --labels at the site "
                "regroups them"
            )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_FEW]) + (f" and {len(names) - _FEW} more" if len(names) > _FEW else "")
