"""Listed files become labelled images: groups, pages, a division into training and test images, all problems at once.

Folders and manifests list files (`Listing`); what follows is the same for both.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from protofed.data.decoding import BadImage, ImageHeader, decoder_warnings, headers_of
from protofed.data.files import (
    LabelledFile,
    class_order,
    decode_images,
    in_threads,
    read_domains,
    recognise_images,
)
from protofed.data.images import RawData
from protofed.data.problems import Problem, counted, error, refuse, some_names, warning, warnings_of
from protofed.data.splits import DEFAULT_TEST_SHARE, own_split
from protofed.errors import UserError

PARTS = ("train", "test", "validation")
_SAMPLED = 32 * 2**10

Headers = Callable[[Sequence[str]], list[list[ImageHeader] | Problem]]
"""What every page of some files is, or why one cannot be read."""


@dataclass(frozen=True)
class ReadOptions:
    """How files are read, where there is a choice."""

    test_share: float | None = None
    """What a site without test images keeps to test on; None for a fifth."""
    group_by: str | None = None
    """`folder`, `none` or a regular expression: which images belong together; None for what the data says."""
    pages: str | None = None
    """`all`, `first` or numbers such as `1,3-5`: which pages of a file are images; None for all."""
    split_seed: int = 0
    unreadable: str = "refuse"
    """`refuse` or `skip`: what is done about files that cannot be read."""
    undecoded: bool = False
    """Whether files that were decoded before may stay as they are until somebody asks for their pixels."""

    def __post_init__(self) -> None:
        if self.test_share is not None and not 0 < self.test_share < 1:
            raise UserError(f"test share {self.test_share:g} is out of range; it must be above 0 and below 1")
        if self.unreadable not in ("refuse", "skip"):
            raise UserError(f"data.unreadable={self.unreadable} is not valid; use refuse or skip")
        self.chosen_pages(1)
        try:
            re.compile(self.group_by or "")
        except re.error as problem:
            raise UserError(
                f"--group-by {self.group_by} is not a regular expression ({problem}); use folder, none or a "
                "pattern such as (\\d+)_"
            ) from None

    def chosen_pages(self, count: int) -> list[int]:
        """Which of so many pages, counted from 0."""
        if self.pages in (None, "all"):
            return list(range(count))
        if self.pages == "first":
            return [0]
        wanted: set[int] = set()
        for part in str(self.pages).split(","):
            first, dash, last = (text.strip() for text in part.partition("-"))
            if not first.isdecimal() or (dash and not last.isdecimal()) or int(first) < 1:
                raise UserError(f"--pages {self.pages} is not valid; use all, first, or numbers such as 1,3-5")
            wanted.update(range(int(first) - 1, int(last or first)))
        return [page for page in range(count) if page in wanted]


class ListedFile(NamedTuple):
    """One file as a folder or a manifest lists it."""

    path: str
    domain: str
    label: str
    key: str
    """Its name within the data, the same on every machine."""
    part: str = ""
    """train, test or validation; empty where its site has not decided."""
    group: str = ""
    where: str = ""
    """What to call it in a message: the line of a manifest, or the file itself."""


@dataclass(frozen=True)
class Listing:
    """All files of some data, before any is opened."""

    place: Path
    source: str
    files: tuple[ListedFile, ...]
    problems: tuple[Problem, ...] = ()
    grouped_by: str = ""
    """What the groups are: `column patient`, or `folder`."""
    mend_split: str = ""
    """How to give a site test images."""

    def fingerprint(self) -> str:
        """Changes with names, labels and content of the files, not with their place; of long files the ends count."""
        digests = in_threads(_content_mark, [file.path for file in self.files])
        lines = [
            "\0".join((file.domain, file.part, file.label, file.key, digest))
            for file, digest in zip(self.files, digests, strict=True)
        ]
        return blake2b("\n".join(sorted(lines)).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


@dataclass(frozen=True)
class SettledFiles:
    """Labelled images by site, their classes, and everything that is wrong with them."""

    files: Mapping[str, Sequence[LabelledFile]]
    classes: tuple[str, ...]
    problems: tuple[Problem, ...]
    splits: Mapping[str, Mapping[str, Any]]
    """How every site was divided that had not decided itself."""


def read_listing(listing: Listing, size: tuple[int, int] | None, options: ReadOptions) -> RawData:
    """The images of listed files; refused, with all that is wrong, where they cannot be trained on."""
    settled = settle(listing, options)
    refuse(settled.problems, listing.place)
    skip = options.unreadable == "skip"
    read = recognise_images if options.undecoded else decode_images
    raw = read_domains(settled.files, settled.classes, size, read, skip=skip, where=listing.place)
    return replace(
        raw,
        source=listing.source,
        warnings=(*warnings_of(settled.problems), *raw.warnings),
        fingerprint=listing.fingerprint(),
        reading=settled.splits,
    )


def read_headers(paths: Sequence[str | Path]) -> list[list[ImageHeader] | Problem]:
    """What every page of some files is, or why one cannot be read."""

    def look(path: str | Path) -> list[ImageHeader] | Problem:
        try:
            return headers_of(Path(path))
        except BadImage as bad:
            return bad.problem

    with decoder_warnings():
        return in_threads(look, paths)


def settle(listing: Listing, options: ReadOptions, headers: Headers = read_headers) -> SettledFiles:
    """Open the listed files, choose pages and groups, divide sites; nothing is refused here, everything is told."""
    told = headers([file.path for file in listing.files])
    problems = [*listing.problems]
    opened: list[tuple[ListedFile, list[ImageHeader]]] = []
    for file, found in zip(listing.files, told, strict=True):
        if isinstance(found, Problem):
            skipped = options.unreadable == "skip" and found.kind in ("unreadable", "unsupported")
            problems.append(replace(found, severity="warning", text=f"left out: {found.text}") if skipped else found)
        else:
            opened.append((file, found))
    problems += _remarks(opened, options)
    groups = _groups(listing, opened, options, problems)
    problems += _on_both_sides(listing, opened, groups)
    files: dict[str, list[LabelledFile]] = {}
    splits: dict[str, dict[str, Any]] = {}
    for domain in dict.fromkeys(file.domain for file in listing.files):
        members = [position for position, (file, _) in enumerate(opened) if file.domain == domain]
        if not members:
            problems.append(error("no-images", domain, f"domain {domain} has no readable image"))
            continue
        parts, record = _parts(listing, domain, [opened[p][0] for p in members], [groups[p] for p in members], options)
        if record.get("problem"):
            problems.append(record["problem"])
        elif record:
            splits[domain] = record
        files[domain] = [
            LabelledFile(opened[p][0].path, opened[p][0].label, part, page, opened[p][1][page])
            for p, part in zip(members, parts, strict=True)
            for page in options.chosen_pages(len(opened[p][1]))
        ]
    classes = class_order(file.label for members in files.values() for file in members)
    return SettledFiles(files, classes, tuple(problems), splits)


def _parts(
    listing: Listing, domain: str, files: Sequence[ListedFile], groups: Sequence[tuple[str, str]], options: ReadOptions
) -> tuple[list[str], dict[str, Any]]:
    """The part of each file of a site, and how it was drawn where the site had not decided; or a problem."""
    open_ones = [position for position, file in enumerate(files) if not file.part]
    parts = [file.part for file in files]
    if not open_ones:
        if options.test_share is not None:
            text = f"domain {domain} has its own test images, so --test-share is not used there"
            return parts, {"problem": warning("own-test", "", text)}
        return parts, {}
    share = DEFAULT_TEST_SHARE if options.test_share is None else options.test_share
    own = [groups[position] for position in open_ones]
    drawn = own_split(domain, own, [files[p].label for p in open_ones], share, options.split_seed)
    if drawn is None:
        one = "patient or group" if own[0][0] == "patient" else "image"
        text = f"domain {domain} has only one {one}, so nothing is left for testing"
        return [part or "train" for part in parts], {
            "problem": error("no-test", listing.place, text, f"add others, or {listing.mend_split}")
        }
    for position, part in zip(open_ones, drawn, strict=True):
        parts[position] = part
    grouped = sum(kind == "patient" for kind, _ in own)
    return parts, {
        "test_share": share,
        "seed": options.split_seed,
        "groups": len(set(own)),
        "grouped_by": (options.group_by or listing.grouped_by or "patient tags") if grouped else None,
    }


def _groups(
    listing: Listing,
    opened: Sequence[tuple[ListedFile, Sequence[ImageHeader]]],
    options: ReadOptions,
    problems: list[Problem],
) -> list[tuple[str, str]]:
    """What is kept together: a patient, or else the file itself, which can never be taken for a patient."""
    if options.group_by in (None, "none", "folder"):
        named = [_group(file, headers[0], options.group_by, listing) for file, headers in opened]
    else:
        found = [re.search(str(options.group_by), file.key) for file, _ in opened]
        named = ["" if match is None else match[1 if match.re.groups else 0] or "" for match in found]
        missed = [file.key for (file, _), name in zip(opened, named, strict=True) if not name]
        if missed:
            text = f"--group-by {options.group_by} finds nothing in {len(missed)} names: {some_names(missed)}"
            problems.append(warning("no-group", missed[0], text, "each of these counts as its own group", missed))
    return [("patient", name) if name else ("file", file.key) for (file, _), name in zip(opened, named, strict=True)]


def _group(file: ListedFile, header: ImageHeader, group_by: str | None, listing: Listing) -> str:
    if group_by == "none":
        return ""
    if group_by == "folder":
        return os.path.basename(os.path.dirname(file.path))
    if listing.grouped_by.startswith("column") and file.group:
        return file.group
    # Tags know better than the name of a folder, which may be a date.
    return header.person or file.group


def _on_both_sides(
    listing: Listing, opened: Sequence[tuple[ListedFile, Sequence[ImageHeader]]], groups: Sequence[tuple[str, str]]
) -> list[Problem]:
    """Patients some of whose images are trained on and others tested on."""
    first: dict[tuple[str, tuple[str, str]], ListedFile] = {}
    told: dict[tuple[str, tuple[str, str]], Problem] = {}
    for (file, headers), group in zip(opened, groups, strict=True):
        before = first.setdefault((file.domain, group), file)
        if before.part == file.part or (file.domain, group) in told:
            continue
        # A tag is a person's number in a clinic, and no business of a log.
        name = "the patient of this file" if headers[0].person == group[1] else f"patient {group[1]}"
        text = f"{name} of domain {file.domain} is in both {before.part} and {file.part}"
        mend = f"keep all images of a patient in one of them (the other is {before.key})"
        if not listing.grouped_by.startswith("column"):
            mend += ", or use --group-by none if these are not patients"
        told[file.domain, group] = error("patient-on-both-sides", file.where or file.key, text, mend)
    return list(told.values())


def _remarks(opened: Sequence[tuple[ListedFile, Sequence[ImageHeader]]], options: ReadOptions) -> list[Problem]:
    """What is said of all files of a kind together."""
    films = [file.key for file, headers in opened if headers[0].film > 1]
    paged = [(file.key, len(headers)) for file, headers in opened if len(headers) > 1]
    burned = [file.key for file, headers in opened if headers[0].burned_in not in (None, "NO")]
    ranged = [file.key for file, headers in opened if headers[0].own_range]
    remarks: list[Problem] = []

    def remark(kind: str, names: Sequence[str], text: str, mend: str) -> None:
        if names:
            said = f"{counted(len(names), 'file', 'has')} {text}: {some_names(names)}"
            remarks.append(warning(kind, names[0], said, mend, names))

    remark(
        "first-frame", films, "several frames, of which only the first is read", "save other frames as separate files"
    )
    total, taken = sum(n for _, n in paged), sum(len(options.chosen_pages(n)) for _, n in paged)
    text = f"{total} pages or frames in total, of which {taken} are read"
    remark("pages", [name for name, _ in paged], text, "choose with --pages first, all or 1,3-5")
    said = Counter(headers[0].burned_in for _, headers in opened)["YES"]
    text = f"pixels that may show names: the DICOM tags of {said} say so, those of the others do not rule it out"
    remark("burned-in", burned, text, "look at them before anything leaves; text in the pixels is not detected")
    text = "no window in the DICOM tags, so each is scaled from its own darkest to its brightest value"
    remark("no-window", ranged, text, "export them with a window to keep their brightness")
    return remarks


def _content_mark(path: str) -> str:
    """A hash of a file, of long ones of their ends and length."""
    try:
        with open(path, "rb") as file:
            content = file.read(2 * _SAMPLED + 1)
            if len(content) > 2 * _SAMPLED:
                length = file.seek(0, 2)
                file.seek(-_SAMPLED, 2)
                content = content[:_SAMPLED] + file.read() + str(length).encode()
    except OSError:
        return ""
    return blake2b(content, digest_size=12).hexdigest()
