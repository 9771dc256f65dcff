"""Regrouping classes by a rule such as `0=healthy,1-4=diseased`."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from protofed.data.images import Domain, Images, RawData
from protofed.errors import UserError, unknown_name


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
                    f"labels: class {classes[number]!r} goes to {assigned[number]!r} and to {new!r}; choose one"
                )
            if number not in groups.setdefault(new, []):
                groups[new].append(number)
    if len(groups) < 2:
        raise UserError(f"labels {rule!r} leaves one class only; name at least two, for example 0=healthy,1-4=diseased")
    return groups


def regroup(data: RawData, rule: str) -> RawData:
    """The same images under new classes; images of a class the rule does not mention are left out, with a warning."""
    groups = parse_labels(rule, data.classes)
    new_label = torch.full((len(data.classes),), -1, dtype=torch.int64)
    for label, numbers in enumerate(groups.values()):
        new_label[numbers] = label

    def relabelled(images: Images, part: str, domain: str) -> Images:
        y = new_label[images.y]
        kept = y >= 0
        if not kept.any():
            raise UserError(f"labels {rule!r} leaves no {part} images in domain {domain}; mention classes it has")
        return Images(images.x, y).take(kept.nonzero()[:, 0])

    domains = {
        name: Domain(name, relabelled(domain.train, "train", name), relabelled(domain.test, "test", name))
        for name, domain in data.domains.items()
    }
    left_out = [name for number, name in enumerate(data.classes) if new_label[number] < 0]
    warnings = data.warnings
    if left_out:
        warnings += (f"images of {', '.join(left_out)} are left out, because the labels rule does not mention them",)
    return replace(data, classes=tuple(groups), domains=domains, warnings=warnings)


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
