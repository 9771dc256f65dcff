"""Runs that an earlier version has begun: what it did without saying so, said in today's settings."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from protofed.registry import find_method
from protofed.runs.options import Options


def unsaid_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that an earlier version did not know, or left open, and the default that was in force."""
    known = {name: field.default for name, field in Options.model_fields.items() if not field.default_factory}
    return {name: value for name, value in known.items() if value is not None and options.get(name) is None}


def unsaid_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Settings that hold in a run from before there were such settings, where today's defaults are others."""
    method = config["method"]
    if "run_defaults" in method or ".py:" in method["name"]:
        return {}
    known = method.get("knobs", {})
    unsaid = {
        entry.metadata.get("name", entry.name): str(entry.metadata["before"])
        for entry in fields(find_method(method["name"]))
        if entry.metadata.get("before") is not None and entry.name not in known
    }
    augment = config["data"].get("augment")
    return {**unsaid, **({} if augment is None else {"data.augment": augment})}
