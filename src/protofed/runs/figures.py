"""The figures of a round by name, for tables, charts and trackers."""

from collections.abc import Iterator, Mapping
from typing import Any

_SHOWN = ("train_loss", "cross_entropy", "loss_parts", "accuracy", "validation", "bytes", "samples", "seconds")


def figures_of(record: Mapping[str, Any], separator: str = ".") -> dict[str, float | None]:
    """Of a line of rounds.jsonl: `accuracy.global.average`, `bytes.up.total`, and so on; None where there is none."""
    return dict(flat({key: record.get(key) for key in _SHOWN}, separator))


def flat(content: Mapping[str, Any], separator: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested dictionaries as one; lists are left out."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from flat(value, separator, f"{prefix}{key}{separator}")
        elif not isinstance(value, list):
            yield f"{prefix}{key}", value
