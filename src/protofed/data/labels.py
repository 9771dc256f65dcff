"""Regrouping classes by a rule such as `0=healthy,1-4=diseased`, or by a file; spellings that look like one class."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from protofed.data.images import Images, RawData
from protofed.data.names import loose_form, one_form
from protofed.data.problems import Problem, warning
from protofed.data.tables import read_table
from protofed.errors import UserError, unknown_name

_LABEL_COLUMNS = {
    "old": ("label", "old", "from", "name"),
    "new": ("class", "new", "to", "becomes"),
    "domain": ("domain", "site", "center", "centre", "hospital", "clinic"),
}


def parse_labels(rule: str, classes: Sequence[str]) -> dict[str, list[int]]:
    """New class -> old class numbers, in the order of the rule; old classes go by name, number or range of them."""
    groups: dict[str, list[int]] = {}
    assigned: dict[int, str] = {}
    for item in rule.split(","):
        old, equals, new = (text.strip() for text in item.rpartition("="))
        if not (equals and old and new):
            raise UserError(f"labels: {item.strip()!r} is not OLD=NEW; for example 0=healthy,1-4=diseased")
        for number in _old_classes(old, classes):
            if assigned.setdefault(number, new) != new:
                raise UserError(
                    f"labels: class {classes[number]!r} is mapped to both {assigned[number]!r} and {new!r}; choose one"
                )
            if number not in groups.setdefault(new, []):
                groups[new].append(number)
    if len(groups) < 2:
        raise UserError(f"labels {rule!r} leaves only one class; name at least two, for example 0=healthy,1-4=diseased")
    return groups


def regroup(data: RawData, rule: str) -> RawData:
    """The same images under new classes, by a rule or by the file that it names.

    Images of a class that a rule does not mention are left out, with a warning; a file says which change.
    """
    new = renaming(rule, data.classes, held_classes(data))
    regrouped = _relabelled(data, new, f"labels {rule!r}")
    return replace(regrouped, warnings=(*regrouped.warnings, *new.notes))


@dataclass(frozen=True)
class Renaming:
    """New classes, and for every site which of them an old one becomes; one that becomes none is left out."""

    classes: tuple[str, ...]
    new_class: Mapping[str, Mapping[str, str]]
    notes: tuple[str, ...]


def renaming(rule: str, classes: Sequence[str], held: Mapping[str, set[str]]) -> Renaming:
    """What a rule, or the file that it names, makes of classes; `held` are those of which every site has images."""
    if _is_file(rule):
        return _renaming_of_file(Path(rule).expanduser(), classes, held)
    groups = parse_labels(rule, classes)
    new_class = {classes[number]: new for new, numbers in groups.items() for number in numbers}
    left_out = [name for name in classes if name not in new_class]
    notes = _numbered(rule, classes)
    if left_out:
        notes.insert(0, f"images of {', '.join(left_out)} are left out, because the labels rule does not mention them")
    return Renaming(tuple(groups), dict.fromkeys(held, new_class), tuple(notes))


def _numbered(rule: str, classes: Sequence[str]) -> list[str]:
    """What the numbers in a rule stand for where classes have names: folders are counted in the order of the alphabet,
    which is seldom that of grades."""
    told = []
    for old in (item.rpartition("=")[0].strip() for item in rule.split(",")):
        ends = [end.strip() for end in old.split("-")]
        if all(end.isdecimal() and end not in classes for end in ends):
            names = [classes[number] for number in _old_classes(old, classes)]
            told.append(f"{old} is {', '.join(names)}")
    meant = "; if the rule means other classes, write their names"
    return [f"labels by number: {'; '.join(told)}{meant}"] if told else []


def _is_file(rule: str) -> bool:
    """A rule has a sign of equality, which the name of a file that exists may have, too."""
    path = Path(rule).expanduser()
    if path.is_file():
        return True
    if "=" not in rule and path.suffix.lower() in (".csv", ".txt", ".tsv"):
        raise UserError(f"there is no file {rule}; --labels takes a csv with the columns label and class, or a rule")
    return False


def _renaming_of_file(path: Path, classes: Sequence[str], held: Mapping[str, set[str]]) -> Renaming:
    """Classes as a file maps them, for all sites or for one; others keep their names, and an empty name is left out."""
    rows = _label_rows(path)
    known = {loose_form(name) for name in held}
    for row in rows:
        if row["old"] not in classes:
            raise unknown_name(f"class in {path.name} line {row['line']}:", row["old"], classes)
        if row["domain"] and loose_form(row["domain"]) not in known:
            raise unknown_name(f"domain in {path.name} line {row['line']}:", row["domain"], held)
    new_class: dict[str, dict[str, str]] = {}
    for domain in held:
        here = [row for row in rows if not row["domain"] or loose_form(row["domain"]) == loose_form(domain)]
        # A line for one site goes before one for all.
        told = {row["old"]: row["new"] for row in sorted(here, key=lambda row: bool(row["domain"]))}
        new_class[domain] = {old: told.get(old, old) for old in classes if told.get(old, old)}
    order = dict.fromkeys(
        new_class[domain][old]
        for old in classes
        for domain in held
        if old in new_class[domain] and (old in held[domain] or not any(old in names for names in held.values()))
    )
    if len(order) < 2:
        raise UserError(f"{path} leaves only one class; name at least two")
    gone = sorted({f"{old} of {name}" for name in held for old in held[name] if old not in new_class[name]})
    notes = [f"images of {', '.join(gone)} are left out, because {path.name} gives them no class"] if gone else []
    return Renaming(tuple(order), new_class, tuple(notes))


def _label_rows(path: Path) -> list[dict[str, str]]:
    """Lines of a csv file with headings, or plain lines OLD=NEW."""
    table = read_table(path, _LABEL_COLUMNS)
    if {"old", "new"} <= table.headings.keys():
        return [{"domain": "", **row} for row in table.rows]
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        old, equals, new = (one_form(text) for text in line.rpartition("="))
        if not (equals and old):
            raise UserError(
                f"{path} line {number}: {line.strip()!r} is not OLD=NEW; a label file has such lines, or the "
                "columns label and class (and site, if a line applies to one site)"
            )
        rows.append({"old": old, "new": new, "domain": "", "line": str(number)})
    return rows


def _relabelled(data: RawData, new: Renaming, rule: str) -> RawData:
    """Every site's images under the new classes; those without one are left out."""

    def relabelled(images: Images, part: str, domain: str) -> Images:
        mine = new.new_class[domain]
        places = torch.tensor(
            [new.classes.index(mine[old]) if mine.get(old) in new.classes else -1 for old in data.classes]
        )
        y = places[images.y]
        kept = y >= 0
        if not kept.any():
            raise UserError(f"{rule} leaves no {part} images in domain {domain}; include classes it has")
        return Images(images.x, y).take(kept.nonzero()[:, 0])

    domains = {
        name: domain.mapped(lambda images, part, name=name: relabelled(images, part, name))  # type: ignore[misc]
        for name, domain in data.domains.items()
    }
    return replace(data, classes=new.classes, domains=domains)


def _held(data: RawData, domain: str) -> set[str]:
    """The classes of which a site has images."""
    parts = (data.domains[domain].train, data.domains[domain].test)
    return {data.classes[int(label)] for part in parts for label in part.y.tolist()}


def alike_classes(held: Mapping[str, set[str]]) -> list[Problem]:
    """Class names that differ only in case, blanks or separators, with the file that would join them.

    `held` are the classes of every site.
    """
    spellings: dict[str, dict[str, list[str]]] = {}
    for site, names in held.items():
        for name in sorted(names):
            spellings.setdefault(loose_form(name) or name, {}).setdefault(name, []).append(site)
    problems = []
    for sites_of in (sites_of for sites_of in spellings.values() if len(sites_of) > 1):
        best = max(sites_of, key=lambda name: (len(sites_of[name]), name))
        said = ", ".join(f"{name!r} ({', '.join(sites)})" for name, sites in sites_of.items())
        lines = " and ".join(f"{name}={best}" for name in sites_of if name != best)
        mend = f"if they are, write {lines} into a file and pass it as --labels FILE"
        problems.append(warning("spelling", "", f"these look like one class but are counted separately: {said}", mend))
    return problems


def held_classes(data: RawData) -> dict[str, set[str]]:
    """The classes of which every site has images."""
    return {name: _held(data, name) for name in data.domains}


def _old_classes(text: str, classes: Sequence[str]) -> list[int]:
    single = class_number(text, classes)
    if single is not None:
        return [single]
    # A class name may hold a dash itself, so every dash is tried as the middle of a range.
    for position, character in enumerate(text):
        if character == "-":
            first, last = (class_number(side.strip(), classes) for side in (text[:position], text[position + 1 :]))
            if first is not None and last is not None:
                if first > last:
                    raise UserError(f"labels: the range {text!r} runs backwards; write the lower class first")
                return list(range(first, last + 1))
    raise unknown_name("class in labels", text, [*classes, *map(str, range(len(classes)))])


def class_number(text: str, classes: Sequence[str]) -> int | None:
    """Of a class by its name, or by its number where no class is called so; None for neither."""
    if text in classes:
        return classes.index(text)
    if text.isdecimal() and int(text) < len(classes):
        return int(text)
    return None
