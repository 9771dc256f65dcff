"""The two kinds of trouble that protofed names: a mistake of the user, and a message that cannot be used."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A user error; the text says, in one line, what is wrong and what would be right."""


class InUse(UserError):
    """Another process is working in the folder."""


class BadMessage(Exception):
    """A message that is truncated, corrupted, misshapen or not finite; the text names the sender and the field."""


class NotFinite(BadMessage):
    """A message with NaN or infinite values: what the training of its sender ended in."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that is not in `known`, with the nearest ones suggested."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names)}"
    return UserError(f"unknown {kind} {name!r}; {hint}")


def missing_extra(what: str, extra: str) -> UserError:
    """The error where an optional package is not installed: what needs it, and the extra that brings it."""
    return UserError(f"{what}; pip install 'protofed[{extra}]'")
