"""Names of sites and classes, in any script: one spelling for what looks the same, and which names cannot be used."""

import re
import unicodedata

from protofed.errors import UserError

_TAKEN_NAMES = ("average", "pooled", "held_out")
_SEPARATORS = re.compile(r"[\W_]+")


def one_form(name: str) -> str:
    """The name with every accent composed: file systems and archives write the same name in different ways."""
    return unicodedata.normalize("NFC", name).strip()


def loose_form(name: str) -> str:
    """The name without case, blanks and separators, by which different spellings are recognised."""
    return _SEPARATORS.sub("", unicodedata.normalize("NFKC", name).casefold())


def is_site_name(name: str) -> bool:
    """Whether clients, files and results can be named so: letters and digits of any script, _ . - and inner blanks."""
    if not name or name != name.strip() or name[0] == "." or name in _TAKEN_NAMES:
        return False
    return all(letter in "_.- " or unicodedata.category(letter)[0] in "LMN" for letter in name)


def check_site_name(name: str, what: str = "domain") -> None:
    """Refuse a name that would clash with a file, an option or a key of the results."""
    if not is_site_name(name):
        raise UserError(
            f"{what} {name!r} needs another name: only letters and digits of any script, spaces and _ . -, not "
            f"starting with a dot, and none of {', '.join(_TAKEN_NAMES)}"
        )
