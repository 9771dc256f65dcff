"""What to look at before training: copies, near copies on both sides of a split, shortcuts a model would learn."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protofed.data.problems import Problem, counted, some_names, warning

NEAR = 3
"""Bits of 64 in which two perceptual hashes may differ: of four bands of 16 bits one is then equal."""

_NEAR_BRIGHTNESS = 4.0
_FLAT = 2.0
_COMMON = 2000
_PAIRS_AT_ONCE = 2_000_000
_ENOUGH = 5
_TELLING = 0.95
_ONE_BRIGHTNESS = 0.5


@dataclass(frozen=True, eq=False)
class ImageTable:
    """One row for every image."""

    names: Sequence[str]
    site: NDArray[np.object_]
    part: NDArray[np.object_]
    label: NDArray[np.object_]
    digest: NDArray[np.object_]
    thumbnail: NDArray[np.uint8]
    """[N, 8, 9]"""
    seen: NDArray[np.bool_]
    """Whether there is a look at the image; there is none at further pages of a file."""
    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    kind: NDArray[np.object_]
    """Size, channels, bits and format, as text."""
    size: NDArray[np.object_]

    def sites(self) -> list[str]:
        """In the order in which they come."""
        return list(dict.fromkeys(self.site.tolist()))


def findings(table: ImageTable) -> list[Problem]:
    """All that can be said from the table alone; nothing where no file could be read."""
    if not table.names:
        return []
    return [*_copies(table), *_near_copies(table), *_blanks(table), *_shortcuts(table), *_few(table)]


def _copies(table: ImageTable) -> Iterator[Problem]:
    """Files with equal content: on both sides of a split, under two labels, or merely twice."""
    digests = table.digest.tolist()
    several = {digest for digest, count in Counter(digests).items() if count > 1}
    groups: dict[bytes, list[int]] = {}
    for row, digest in enumerate(digests):
        if digest in several:
            groups.setdefault(digest, []).append(row)
    leaked: list[list[int]] = []
    mixed: list[list[int]] = []
    plain: list[list[int]] = []
    for rows in groups.values():
        two_labels, both_sides = len(set(table.label[rows].tolist())) > 1, _on_both_sides(table, rows)
        for found, holds in ((leaked, both_sides), (mixed, two_labels), (plain, not (both_sides or two_labels))):
            if holds:
                found.append(rows)
    for kind, found, text, mend in (
        ("copy-in-test", leaked, ("test image", "is", "also a training image"), "keep each in one part"),
        ("two-labels", mixed, ("image", "appears", "under different labels"), "decide on one label"),
        ("copies", plain, ("image", "appears", "more than once"), "keep one of each, unless this is intended"),
    ):
        if found:
            names = [table.names[row] for rows in found for row in rows]
            shown = [" = ".join(table.names[row] for row in rows[:3]) for rows in found]
            noun, verb, rest = text
            yield warning(kind, names[0], f"{counted(len(found), noun, verb)} {rest}: {some_names(shown)}", mend, names)


def _on_both_sides(table: ImageTable, rows: Sequence[int]) -> bool:
    parts = set(table.part[rows].tolist())
    return "test" in parts and len(parts) > 1


def _near_copies(table: ImageTable) -> Iterator[Problem]:
    """Test images that look like a training image, though their files differ."""
    usable = table.seen & (table.thumbnail.reshape(len(table.names), -1).std(1) > _FLAT)
    train = np.flatnonzero(usable & (table.part == "train"))
    test = np.flatnonzero(usable & (table.part == "test"))
    if not len(train) or not len(test):
        return
    pairs = near_pairs(table.thumbnail[train], table.thumbnail[test])
    found = [(int(test[b]), int(train[a])) for b, a in pairs.items() if table.digest[test[b]] != table.digest[train[a]]]
    if found:
        shown = [f"{table.names[b]} like {table.names[a]}" for b, a in found]
        text = f"{counted(len(found), 'test image', 'looks')} almost like a training image: {some_names(shown)}"
        mend = "check whether they show the same person or moment; if so, --group-by keeps them together"
        yield warning("near-copy-in-test", table.names[found[0][0]], text, mend, [table.names[b] for b, _ in found])


def hashes(thumbnails: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """A perceptual hash of 64 bits: whether each pixel of a row is darker than the next."""
    bits = thumbnails[:, :, 1:] > thumbnails[:, :, :-1]
    packed = np.packbits(bits.reshape(len(bits), 64), axis=1)
    return np.ascontiguousarray(packed).view(np.uint64)[:, 0]


def near_pairs(train: NDArray[np.uint8], test: NDArray[np.uint8]) -> dict[int, int]:
    """For test thumbnails that look like a training thumbnail: the number of the first one that is nearest."""
    one, other = hashes(train), hashes(test)
    best: dict[int, tuple[int, int]] = {}
    for band in range(4):
        ours, theirs = (
            (values >> np.uint64(16 * band)).astype(np.uint64) & np.uint64(0xFFFF) for values in (one, other)
        )
        order = np.argsort(ours, kind="stable")
        first, last = (np.searchsorted(ours[order], theirs, side) for side in ("left", "right"))
        # What half of all images have in this band says nothing; other bands tell them apart.
        counts = np.where(last - first <= _COMMON, last - first, 0)
        for rows in np.array_split(np.arange(len(test)), max(1, int(counts.sum()) // _PAIRS_AT_ONCE)):
            b = np.repeat(rows, counts[rows])
            within = np.arange(len(b)) - np.repeat(np.cumsum(counts[rows]) - counts[rows], counts[rows])
            a = order[first[b] + within]
            distance = _bits(one[a] ^ other[b])
            near = distance <= NEAR
            a, b, distance = a[near], b[near], distance[near]
            alike = np.abs(train[a].astype(np.int16) - test[b]).mean((1, 2)) <= _NEAR_BRIGHTNESS
            for left, right, bits in zip(a[alike].tolist(), b[alike].tolist(), distance[alike].tolist(), strict=True):
                best[right] = min(best.get(right, (65, 0)), (bits, left))
    return {right: left for right, (_, left) in sorted(best.items())}


def _bits(values: NDArray[np.uint64]) -> NDArray[np.int64]:
    bits = np.unpackbits(values.view(np.uint8).reshape(len(values), 8), axis=1)
    return np.asarray(bits.sum(1), dtype=np.int64)


def _blanks(table: ImageTable) -> Iterator[Problem]:
    rows = np.flatnonzero(table.seen & (table.std < 1.0))
    if len(rows):
        names = [table.names[row] for row in rows.tolist()]
        text = f"{counted(len(names), 'image', 'is')} of one colour: {some_names(names)}"
        yield warning("blank", names[0], text, "check whether they were exported correctly", names)


def _shortcuts(table: ImageTable) -> Iterator[Problem]:
    """What tells the classes of a site apart without looking at what is shown."""
    for site in table.sites():
        rows = np.flatnonzero((table.site == site) & table.seen)
        counts = Counter(table.label[rows].tolist())
        classes = sorted(name for name, count in counts.items() if count >= _ENOUGH)
        if len(rows) >= 2 * _ENOUGH and table.mean[rows].std() < _ONE_BRIGHTNESS:
            text = f"all {len(rows)} images of {site} have the same brightness, {table.mean[rows].mean():.0f} of 255"
            yield warning(
                "one-brightness", site, text, "check whether they were normalised, unlike those of other sites"
            )
        if len(counts) == 1 and len(set(table.label.tolist())) > 1:
            text = f"{site} has only images of {next(iter(counts))}, so a model may learn the site instead of the class"
            yield warning("one-class", site, text, "add images of other classes, or test on other sites")
        if len(classes) < 2:
            continue
        rows = rows[np.isin(table.label[rows].astype(str), classes)]
        labels = table.label[rows]
        if _told_by(table.size[rows], labels):
            yield _size_shortcut(table, site, rows, classes, "size-shortcut", "the size of an image", table.size)
        elif _told_by(table.kind[rows], labels):
            yield _size_shortcut(table, site, rows, classes, "format-shortcut", "format or depth", table.kind)
        for name in classes if len(classes) > 2 else classes[:1]:
            area = _area(table.mean[rows], labels == name)
            if max(area, 1 - area) >= _TELLING:
                text = (
                    f"in {site}, brightness alone separates {name} from the others (area under the curve "
                    f"{max(area, 1 - area):.2f})"
                )
                mend = "a model would learn that; check whether the classes come from different devices or exports"
                yield warning("brightness-shortcut", site, text, mend)


def _size_shortcut(
    table: ImageTable,
    site: str,
    rows: NDArray[np.intp],
    classes: Sequence[str],
    kind: str,
    what: str,
    column: NDArray[np.object_],
) -> Problem:
    common = {name: Counter(column[rows][table.label[rows] == name].tolist()).most_common(1)[0][0] for name in classes}
    said = ", ".join(f"{name} is {value}" for name, value in common.items())
    mend = "a model may learn that; export all classes the same way, or crop them to one size"
    return warning(kind, site, f"in {site}, {what} alone predicts the class: {said}", mend)


def _told_by(values: NDArray[np.object_], labels: NDArray[np.object_]) -> bool:
    """Whether the other images with the same value nearly always have the same label, and guessing does not."""
    counts: dict[str, Counter[str]] = {}
    for (value, label), count in Counter(zip(values.tolist(), labels.tolist(), strict=True)).items():
        counts.setdefault(value, Counter())[label] = count
    right = 0
    for of_value in counts.values():
        for label, count in of_value.items():
            others = max((n for other, n in of_value.items() if other != label), default=0)
            right += count if count > 1 and count - 1 >= others else 0
    guess = max(Counter(labels.tolist()).values())
    return right / len(labels) >= _TELLING and guess / len(labels) <= _TELLING - 0.1


def _area(values: NDArray[np.float64], chosen: NDArray[np.bool_]) -> float:
    """How often a chosen one is brighter than another, ties counted half."""
    _, codes, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[codes]
    one, other = int(chosen.sum()), int((~chosen).sum())
    return float((ranks[chosen].sum() - one * (one + 1) / 2) / (one * other)) if one and other else 0.5


def _few(table: ImageTable) -> Iterator[Problem]:
    """Classes of which a site has too few to learn from, or far fewer than of others."""
    for site in table.sites():
        rows = (table.site == site) & (table.part == "train")
        counts = Counter(table.label[rows].tolist())
        few = [f"{name} ({count})" for name, count in sorted(counts.items()) if count < 2 * _ENOUGH]
        if few:
            text = f"{site} has fewer than {2 * _ENOUGH} training images of {some_names(few)}"
            yield warning("few", site, text, "results on these classes will be mostly luck")
        if len(counts) > 1 and max(counts.values()) > 10 * min(counts.values()):
            text = (
                f"{site} has {max(counts.values())} training images of one class and {min(counts.values())} of another"
            )
            yield warning("imbalance", site, text, "accuracy hides that; look at recall per class, or use --balanced")
