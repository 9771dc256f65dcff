"""All files below a folder, in one order everywhere, and what in it cannot be followed."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from protofed.data.decoding import IMAGE_KINDS, IMAGE_SUFFIXES, is_image
from protofed.data.problems import Problem, counted, error, some_names, warning

_SYSTEM_FILES = ("thumbs.db", "desktop.ini", "ehthumbs.db", "icon\r")
_VOLUMES = (".nii", ".nii.gz", ".mha", ".nrrd")


@dataclass
class FolderWalk:
    """What was found on the way through folders; one may look into several."""

    others: list[str] = field(default_factory=list)
    """Files that are no images."""
    problems: list[Problem] = field(default_factory=list)

    def images(self, folder: Path) -> list[str]:
        """The images in a folder and all folders below it, sorted by folder and name; texts, for they may be many."""
        found: list[str] = []
        for path in self._files(str(folder), frozenset({_identity(folder.stat())})):
            known = path[path.rfind(".") :].lower() in IMAGE_SUFFIXES
            (found if known or is_image(Path(path)) else self.others).append(path)
        return found

    def folders(self, folder: Path) -> list[Path]:
        """The folders in a folder, sorted, without hidden ones and what archivers leave behind."""
        return [Path(entry.path) for entry in self._entries(str(folder)) if entry.is_dir()]

    def loose_files(self, folder: Path) -> list[Path]:
        """Image files that lie in the folder itself."""
        files = [Path(entry.path) for entry in self._entries(str(folder), tell=False) if entry.is_file()]
        return [path for path in files if is_image(path)]

    def all_problems(self, root: Path) -> list[Problem]:
        """Those met on the way, and the files that are no images, counted by the ending of their names."""
        endings: dict[str, list[str]] = {}
        for path in self.others:
            endings.setdefault(_ending(path), []).append(os.path.relpath(path, root))
        return [*self.problems, *(_strange_files(ending, names) for ending, names in sorted(endings.items()))]

    def _files(self, folder: str, above: frozenset[tuple[int, int]]) -> Iterator[str]:
        for entry in self._entries(folder):
            if not entry.is_dir():
                yield entry.path
                continue
            here = _identity(entry.stat())
            if here in above:
                self.problems.append(
                    warning("endless-link", entry.path, "this link leads back to a folder above it and is not followed")
                )
            else:
                yield from self._files(entry.path, above | {here})

    def _entries(self, folder: str, tell: bool = True) -> list["os.DirEntry[str]"]:
        """What can be followed, sorted by name; what cannot is told."""
        try:
            with os.scandir(folder) as entries:
                listed = sorted((entry for entry in entries if not _hidden(entry.name)), key=lambda entry: entry.name)
        except PermissionError:
            mend = "give yourself permission to read it, for example with chmod u+rx"
            self.problems.append(error("no-permission", folder, "the folder cannot be read (no permission)", mend))
            return []
        except FileNotFoundError:
            mend = "try again when nobody is writing to the folder"
            self.problems.append(error("changed", folder, "the folder disappeared while it was read", mend))
            return []
        dangling = [entry for entry in listed if entry.is_symlink() and not os.path.exists(entry.path)]
        if tell:
            for entry in dangling:
                text = f"this link leads nowhere ({os.readlink(entry.path)}) and is left out"
                self.problems.append(warning("dangling-link", entry.path, text, "restore the file or remove the link"))
        return [entry for entry in listed if entry not in dangling] if dangling else listed


def image_listing(folder: Path) -> tuple[list[Path], list[Problem]]:
    """The images below a folder, and what in it is none or cannot be followed."""
    walk = FolderWalk()
    found = [Path(path) for path in walk.images(folder)]
    return found, walk.all_problems(folder)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _hidden(name: str) -> bool:
    return name.startswith((".", "__")) or name.lower() in _SYSTEM_FILES


def _ending(path: str) -> str:
    return next((ending for ending in _VOLUMES if path.lower().endswith(ending)), os.path.splitext(path)[1].lower())


def _strange_files(ending: str, names: Sequence[str]) -> Problem:
    kind = f"ending in {ending}" if ending else "without an extension"
    verb = "is not an image and is" if len(names) == 1 else "are not images and are"
    mend = f"images are {IMAGE_KINDS} files"
    if ending in _VOLUMES:
        mend = "volumes are not supported: save their slices as PNG, or as DICOM"
    return warning(
        "not-an-image",
        names[0],
        f"{counted(len(names), 'file')} {kind} {verb} left out: {some_names(names)}",
        mend,
        names,
    )
