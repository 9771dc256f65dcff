"""What a published data set is, where its original files are under a data root, and how they become domains."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import md5
from pathlib import Path
from typing import Any

from protofed.data.images import Domain, RawData
from protofed.errors import UserError, unknown_name
from protofed.settings import SettingInfo, keyword_settings

Size = tuple[int, int] | None
Reader = Callable[..., RawData]


@dataclass(frozen=True)
class Source(ABC):
    """Something that can be read by name from original files under a data root."""

    name: str
    description: str

    @property
    @abstractmethod
    def domains(self) -> tuple[str, ...]:
        """The names of the domains, where they are known beforehand."""

    @property
    @abstractmethod
    def licence(self) -> str:
        """Under which terms the images may be used."""

    @property
    @abstractmethod
    def options(self) -> dict[str, SettingInfo]:
        """The settings of this data, for `--set data.KEY=VALUE`."""

    @abstractmethod
    def locate(self, root: Path) -> Path | None:
        """The folder that holds the original files, if there is one."""

    @abstractmethod
    def load(self, root: Path, size: Size, settings: Mapping[str, Any]) -> RawData:
        """The domains, with their origin."""

    @abstractmethod
    def missing(self, root: Path | None) -> UserError:
        """The line for data that is not there: what is lacking, and where to get it."""

    @abstractmethod
    def wrong_files(self, root: Path) -> list[str]:
        """Files whose checksum is known and not met."""


@dataclass(frozen=True)
class Original(Source):
    """One data set as its publisher hands it out.

    `places` are folders under the data root, tried in turn. A place holds the set if each of `needs` matches a file
    there: glob patterns, alternatives separated by `|`. `read(folder, size, *, settings...)` returns the domains.
    `counts` are training and test images of each domain as the whole set gives them with its default settings.
    """

    publisher: str
    download: str
    terms: str
    layout: tuple[str, ...]
    split: str
    needs: tuple[str, ...]
    read: Reader
    places: tuple[str, ...]
    counts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    sites: tuple[str, ...] = ()
    md5: Mapping[str, str] = field(default_factory=dict)
    size: str = "their own size"

    @property
    def domains(self) -> tuple[str, ...]:
        """The names of the domains, where they are known beforehand."""
        return self.sites or tuple(self.counts) or (self.name,)

    @property
    def licence(self) -> str:
        """Under which terms the images may be used."""
        return self.terms

    @property
    def options(self) -> dict[str, SettingInfo]:
        """The keyword arguments of the reader."""
        return keyword_settings(self.read, f"data {self.name}")

    def locate(self, root: Path) -> Path | None:
        """The first place that has all that is needed."""
        return next((root / place for place in self.places if not self._lacking(root / place)), None)

    def load(self, root: Path, size: Size, settings: Mapping[str, Any]) -> RawData:
        """The domains, with a warning where the number of images is not that of the whole set."""
        folder = self.locate(root)
        if folder is None:
            raise self.missing(root)
        raw = self.read(folder, size, **settings)
        # A reader whose settings change the split says in `source` which it made.
        origin = [f"original files of {self.name} in folder {folder.relative_to(root).as_posix()}"]
        origin += [f"split: {raw.source or self.split}", *(f"{key}={value}" for key, value in settings.items())]
        # Settings may change how many images there are.
        warnings = raw.warnings if settings else (*raw.warnings, *self._odd_counts(raw))
        return replace(raw, source="; ".join(origin), licence=self.terms, warnings=warnings)

    def missing(self, root: Path | None) -> UserError:
        """What is lacking, and where to get it."""
        place = self.places[0]
        fetch = f"put {self.download} into ROOT/{place}; `protofed data {self.name}` explains how"
        if root is None:
            return UserError(f"data {self.name} is read from its original files under --data-root ROOT: {fetch}")
        if not (root / place).is_dir():
            return UserError(f"data {self.name} was not found: the data root {root} has no folder {place}; {fetch}")
        lacking = self._lacking(root / place)[0].replace("|", " or ")
        return UserError(f"data {self.name} is not complete: {root / place} has no {lacking}; {fetch}")

    def wrong_files(self, root: Path) -> list[str]:
        """Files whose checksum is known and not met."""
        folder = self.locate(root)
        known = (
            {path: self.md5[path.name] for path in sorted(folder.rglob("*")) if path.name in self.md5} if folder else {}
        )
        return [path.name for path, expected in known.items() if _digest(path) != expected]

    def within(self, folder: str) -> "Original":
        """The same set, looked for in a benchmark's own folder too."""
        return replace(self, places=(*self.places, *(f"{folder}/{place}" for place in self.places)))

    def _lacking(self, folder: Path) -> list[str]:
        if not folder.is_dir():
            return list(self.needs)
        return [need for need in self.needs if not any(_matches(folder, pattern) for pattern in need.split("|"))]

    def _odd_counts(self, raw: RawData) -> list[str]:
        notes: list[str] = []
        for name, domain in raw.domains.items():
            counted = (len(domain.train), len(domain.test))
            expected = self.counts.get(name, counted)
            if counted != expected:
                notes.append(
                    f"domain {name} has {counted[0]} training and {counted[1]} test images; "
                    f"the whole set has {expected[0]} and {expected[1]}"
                )
        return notes


@dataclass(frozen=True)
class Benchmark(Source):
    """Several sets with the same classes, whose domains it joins: the usual members, or others of its `choices`."""

    members: tuple[str, ...]
    choices: Mapping[str, Original]

    @property
    def domains(self) -> tuple[str, ...]:
        """The domains of all members."""
        return tuple(domain for name in self.members for domain in self.choices[name].domains)

    @property
    def licence(self) -> str:
        """The terms of all members."""
        return "; ".join(dict.fromkeys(f"{name}: {self.choices[name].licence}" for name in self.members))

    @property
    def options(self) -> dict[str, SettingInfo]:
        """Which members to take, and what these take themselves."""
        text = f"the sets to take domains from, out of {', '.join(self.choices)}"
        merged = {"members": SettingInfo("members", "names separated by commas", ",".join(self.members), text, str)}
        for member in self.choices.values():
            merged |= member.options
        return merged

    def locate(self, root: Path) -> Path | None:
        """The data root itself, if it holds one member at least."""
        return root if any(self.member(name).locate(root) for name in self.members) else None

    def member(self, name: str) -> Original:
        """One of the choices, which may also be in the benchmark's own folder."""
        if name not in self.choices:
            raise unknown_name(f"member of {self.name}", name, self.choices)
        return self.choices[name].within(self.name)

    def load(self, root: Path, size: Size, settings: Mapping[str, Any]) -> RawData:
        """The domains of the members asked for; of the usual members those that are there, with a warning."""
        asked = [name.strip() for name in settings.get("members", "").split(",") if name.strip()]
        warnings: list[str] = []
        read: dict[str, RawData] = {}
        for name in asked or self.members:
            member = self.member(name)
            if not asked and member.locate(root) is None:
                warnings.append(f"{self.name} is used without {name}, whose original files are not in the data root")
                continue
            read[name] = member.load(root, size, {key: settings[key] for key in settings if key in member.options})
        first = next(iter(read))
        domains: dict[str, Domain] = {}
        for name, raw in read.items():
            if raw.classes != read[first].classes:
                raise UserError(f"{name} has other classes than {first}; omit one with --set data.members=NAME,NAME")
            domains |= raw.domains
            warnings += raw.warnings
        return RawData(
            read[first].classes,
            domains,
            source="; ".join(raw.source for raw in read.values()),
            licence="; ".join(f"{name}: {raw.licence}" for name, raw in read.items()),
            warnings=tuple(warnings),
        )

    def missing(self, root: Path | None) -> UserError:
        """That none of the members is there."""
        where = (
            "is read from original files under --data-root ROOT" if root is None else f"is not in the data root {root}"
        )
        names = ", ".join(self.members)
        return UserError(
            f"data {self.name} {where}: put the files of {names} there; `protofed data {self.name}` explains how"
        )

    def wrong_files(self, root: Path) -> list[str]:
        """Those of all members."""
        return [file for name in self.members for file in self.member(name).wrong_files(root)]


def _matches(folder: Path, pattern: str) -> bool:
    return next(folder.glob(pattern), None) is not None


def _digest(path: Path) -> str:
    digest = md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
