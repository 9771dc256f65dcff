"""Lists a folder of your own: `SITE/CLASS/...`, or `SITE/train/CLASS/...`, and so on for `test` and `val`.

Images may lie in folders below that of their class, of patients or dates.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from protofed.data.archives import npz_files, read_npz
from protofed.data.decoding import IMAGE_KINDS
from protofed.data.images import RawData
from protofed.data.listing import ListedFile, Listing, ReadOptions, read_listing
from protofed.data.names import one_form
from protofed.data.problems import counted, error, refuse, some_names, warning
from protofed.data.walk import FolderWalk
from protofed.errors import UserError

FOLDER_LAYOUT = (
    "a folder holds one DOMAIN.npz per domain (x_train, y_train, x_test, y_test), "
    "or images as DOMAIN/train/CLASS/*.png and DOMAIN/test/CLASS/*.png, or as DOMAIN/CLASS/*.png"
)
_PART_NAMES = {
    "train": ("train", "training"),
    "test": ("test", "testing"),
    "validation": ("val", "validation", "valid", "dev"),
}
_PART_OF = {name: part for part, names in _PART_NAMES.items() for name in names}


def read_folder(folder: Path, image_size: tuple[int, int] | None = None, options: ReadOptions | None = None) -> RawData:
    """The domains of a folder; npz files win where there are both forms. Image files are read at `image_size`."""
    check_folder(folder)
    archives = npz_files(folder)
    if archives:
        return read_npz(archives, source=f"folder {folder.name} (npz)")
    return read_listing(list_folder(folder), image_size, options or ReadOptions())


def check_folder(folder: Path) -> None:
    """Refuse what is no folder."""
    if not folder.exists():
        raise UserError(f"folder {folder} does not exist; {FOLDER_LAYOUT}")
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; {FOLDER_LAYOUT}")


def visible_folders(folder: Path) -> list[Path]:
    """Sub-folders, sorted, without hidden ones and what archivers leave behind."""
    return FolderWalk().folders(folder)


def list_folder(folder: Path) -> Listing:
    """The image files of a folder with their site, class and part; refused where it is laid out in another way."""
    walk = FolderWalk()
    sites = walk.folders(folder)
    if not sites:
        refuse(walk.problems, folder)
        raise UserError(f"folder {folder} contains no data; {FOLDER_LAYOUT}")
    if {"train", "test"} <= {site.name for site in sites}:
        raise UserError(
            f"{folder} contains train and test itself; move them into {folder}/DOMAIN, one folder per domain"
        )
    files = [file for site in sites for file in _SiteFolder(folder, site, walk).files()]
    loose = [path.name for path in walk.loose_files(folder)]
    if loose:
        text = f"{counted(len(loose), 'image', 'lies')} beside the folders of the sites, left out: {some_names(loose)}"
        walk.problems.append(warning("outside", loose[0], text, f"images go into {folder}/SITE/CLASS/", loose))
    nested = any(file.group for file in files)
    return Listing(
        folder,
        f"folder {folder.name} (image files)",
        tuple(files),
        tuple(walk.all_problems(folder)),
        "folder" if nested else "",
        "create a folder test beside train",
    )


class _SiteFolder:
    """One site's folder."""

    def __init__(self, root: Path, folder: Path, walk: FolderWalk) -> None:
        self._root, self._folder, self._walk = root, folder, walk
        self._name = one_form(folder.name)

    def files(self) -> Iterator[ListedFile]:
        """What it holds, its parts in the order train, test, validation."""
        folders = self._walk.folders(self._folder)
        parts: dict[str, list[Path]] = {}
        for path in folders:
            if path.name.casefold() in _PART_OF:
                parts.setdefault(_PART_OF[path.name.casefold()], []).append(path)
        self._tell_loose(self._folder)
        if "train" not in parts:
            yield from self._undivided(folders, parts)
            return
        others = [path.name for path in folders if path.name.casefold() not in _PART_OF]
        if others:
            text = f"folders beside train and test are left out: {some_names(others)}"
            self._walk.problems.append(
                warning("outside", self._folder, text, "move them elsewhere, or into a part", others)
            )
        for part in (part for part in _PART_NAMES if part in parts):
            # A site without test images divides what it would train on.
            name = part if part != "train" or "test" in parts else ""
            found = [file for path in parts[part] for file in self._part(path, name)]
            if not found and part != "validation":
                self._tell_nothing(parts[part][0], f"{self._folder.name}/{part}/CLASS/")
            yield from found

    def _undivided(self, folders: list[Path], parts: Mapping[str, list[Path]]) -> Iterator[ListedFile]:
        """A site whose folders are classes."""
        if "test" in parts:
            text = f"{self._folder} has a folder test, but no folder train"
            mend = f"images go into {self._folder.name}/train/CLASS/, or all of them into {self._folder.name}/CLASS/"
            self._walk.problems.append(error("no-train", self._folder, text, mend))
            return
        found = [file for label in folders for file in self._class(label, "")]
        if not found:
            self._tell_nothing(self._folder, f"{self._folder.name}/CLASS/ or {self._folder.name}/train/CLASS/")
        yield from found

    def _part(self, folder: Path, part: str) -> Iterator[ListedFile]:
        self._tell_loose(folder)
        for label in self._walk.folders(folder):
            yield from self._class(label, part)

    def _class(self, folder: Path, part: str) -> Iterator[ListedFile]:
        images = self._walk.images(folder)
        if not images:
            text = f"the class folder {folder.relative_to(self._root).as_posix()} holds no images"
            self._walk.problems.append(warning("empty-folder", folder, text, "fill or remove it"))
        label, below, inside = one_form(folder.name), len(str(self._root)) + 1, len(str(folder)) + 1
        for path in images:
            group, nested, _ = path[inside:].partition("/")
            yield ListedFile(path, self._name, label, path[below:], part, one_form(group) if nested else "")

    def _tell_loose(self, folder: Path) -> None:
        loose = [path.name for path in self._walk.loose_files(folder)]
        if loose:
            lying = counted(len(loose), "image", "lies")
            text = f"{lying} beside the folders of the classes, left out: {some_names(loose)}"
            mend = f"images go into {folder}/CLASS/"
            self._walk.problems.append(warning("outside", folder, text, mend, loose))

    def _tell_nothing(self, folder: Path, wanted: str) -> None:
        text = f"{folder} holds no images"
        self._walk.problems.append(error("no-images", folder, text, f"images ({IMAGE_KINDS}) go into {wanted}"))
