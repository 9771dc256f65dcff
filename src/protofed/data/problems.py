"""What is wrong with data: found in one go, over all files, each with the way to mend it."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from protofed.errors import UserError

Severity = Literal["error", "warning"]

_MOST_IN_ONE_LINE = 20
_MOST_NAMES = 3


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with some data; an error keeps it from being trained on, a warning does not."""

    kind: str
    """A word for programs, such as `unreadable` or `empty-folder`."""
    text: str
    mend: str = ""
    file: str = ""
    """The file or folder that has it; of several the first."""
    files: tuple[str, ...] = ()
    """All of them, where they are told together."""
    severity: Severity = "warning"

    def __str__(self) -> str:
        place = f"{self.file}: " if self.file and self.file not in self.text else ""
        return f"{place}{self.text}{f'; {self.mend}' if self.mend else ''}"

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        content = asdict(self)
        return {**content, "files": list(self.files or ((self.file,) if self.file else ()))}


def error(kind: str, file: object, text: str, mend: str = "", files: Sequence[str] = ()) -> Problem:
    """A problem that keeps the data from being trained on."""
    return Problem(kind, text, mend, str(file), tuple(files), "error")


def warning(kind: str, file: object, text: str, mend: str = "", files: Sequence[str] = ()) -> Problem:
    """A problem that is told, and no more."""
    return Problem(kind, text, mend, str(file), tuple(files))


def some_names(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def counted(count: int, noun: str, verb: str = "") -> str:
    """`1 image` or `3 images`, and the verb that goes with it (`is`, `looks`)."""
    if count == 1:
        return f"1 {noun}{f' {verb}' if verb else ''}"
    plural = {"is": "are", "has": "have", "lies": "lie", "looks": "look", "appears": "appear"}
    return f"{count} {noun}s{f' {plural[verb]}' if verb else ''}"


def refuse(problems: Iterable[Problem], where: object) -> None:
    """Raise one UserError that tells every error among the problems, if there is one."""
    wrong = [problem for problem in problems if problem.severity == "error"]
    if not wrong:
        return
    if len(wrong) == 1:
        raise UserError(str(wrong[0]))
    shown = " | ".join(f"({number}) {problem}" for number, problem in enumerate(wrong[:_MOST_IN_ONE_LINE], start=1))
    left = len(wrong) - _MOST_IN_ONE_LINE
    more = f" | and {left} more, which `protofed data {where}` lists" if left > 0 else ""
    raise UserError(f"{where} has {len(wrong)} problems: {shown}{more}")


def warnings_of(problems: Iterable[Problem]) -> tuple[str, ...]:
    """Those that are no errors, in words."""
    return tuple(str(problem) for problem in problems if problem.severity == "warning")
