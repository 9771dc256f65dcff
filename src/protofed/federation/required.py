"""What the files of a run folder must hold before anything is read out of them; a file without it is damaged."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protofed.errors import UserError

Keys = Mapping[str, Any]
"""By name the type of an entry, or the keys it must have itself; `object` where any value will do."""

ROUND_KEYS: Keys = {
    "round": int,
    "participants": list,
    "accuracy": object,
    "bytes": {"up": dict, "down": dict},
    "seconds": dict,
    "events": list,
}
RUN_KEYS: Keys = {
    "options": dict,
    "method": {"name": str},
    "data": {"name": str, "classes": list, "domains": dict},
    "partition": {"protocol": str, "clients": dict, "held_out": list},
    "model": {"name": str},
    "plan": {"epochs": list},
    "engine": {"name": str, "workers": int},
    "seed": int,
}
SUMMARY_KEYS: Keys = {"accuracy": dict | None, "bytes": {"up": dict, "down": dict}, "seconds": dict}


def require(content: dict[str, Any], keys: Keys, where: Path | str) -> dict[str, Any]:
    """The content, which has these keys; a UserError names the first that it lacks."""
    for name, wanted in keys.items():
        kind = dict if isinstance(wanted, Mapping) else wanted
        if name not in content or not isinstance(content[name], kind):
            raise UserError(f"{where} is damaged: it has no readable {name!r}")
        if isinstance(wanted, Mapping):
            require(content[name], wanted, where)
    return content
