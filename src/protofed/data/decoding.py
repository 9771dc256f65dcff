"""One image file: what it is, and its pixels. Whatever can be read is read here, and nowhere else."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from protofed.data.dicom import NoImage, dicom_header, dicom_values, is_dicom
from protofed.data.problems import Problem, error, warning
from protofed.errors import UserError

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".webp", ".gif", ".jfif")
IMAGE_KINDS = "png, jpg, tif, bmp, webp, gif or DICOM"

_GREY_MODES = ("1", "L", "LA", "La")
_DEEP_MODES = ("I", "I;16", "I;16L", "I;16B", "I;16N")
_MAY_MOVE = ("GIF", "WEBP", "PNG")
"""Formats whose further frames are a film, of which the first frame is the picture."""


class BadImage(Exception):
    """A file that cannot be used; it holds the problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


@dataclass(frozen=True)
class ImageHeader:
    """What an image is, without its pixels."""

    size: tuple[int, int]
    colour: bool
    deep: bool
    bits: int = 8
    format: str = ""
    pages: int = 1
    """How many images the file holds."""
    film: int = 1
    """How many frames it holds, of which the first is the image."""
    person: str = ""
    burned_in: str | None = None
    """Of DICOM files: what they say of writing in their pixels."""
    own_range: bool = False

    def looks_like(self, other: "ImageHeader") -> bool:
        """Whether pixels of the same kind are behind it."""
        return (self.size, self.colour, self.deep) == (other.size, other.colour, other.deep)


class Picture(NamedTuple):
    """One image: a file, or a page of one."""

    path: Path
    page: int = 0
    header: ImageHeader | None = None

    @property
    def name(self) -> str:
        """As people call it; pages count from 1."""
        several = self.page or (self.header is not None and self.header.pages > 1)
        return f"{self.path}#{self.page + 1}" if several else str(self.path)


def is_image(path: Path) -> bool:
    """Whether a file is to be read as an image, by its name or, for DICOM, by its content."""
    if path.name.startswith("."):
        return False
    return path.suffix.lower() in IMAGE_SUFFIXES or is_dicom(path)


def headers_of(path: Path) -> list[ImageHeader]:
    """What every page of a file is; raises BadImage."""
    with _problems_of(path):
        if path.suffix.lower() not in IMAGE_SUFFIXES and is_dicom(path):
            return _dicom_headers(path)
        with Image.open(path) as image:
            first = _pillow_header(path, image)
            if first.pages == 1:
                return [first]
            return [_page_header(path, image, page, first.pages) for page in range(first.pages)]


def header_of(picture: Picture) -> ImageHeader:
    """What an image is; raises BadImage."""
    return picture.header or headers_of(picture.path)[picture.page]


def decode(picture: Picture, size: tuple[int, int] | None = None) -> tuple[ImageHeader, NDArray[Any]]:
    """Pixels [C, H, W] at `size`, in the file's own range of values, and what the file is now; raises BadImage."""
    path = picture.path
    with _problems_of(path):
        if path.suffix.lower() not in IMAGE_SUFFIXES and is_dicom(path):
            told, array = dicom_values(path, picture.page)
            header, image = _from_dicom(told), Image.fromarray(array)
        else:
            with Image.open(path) as opened:
                if picture.page:
                    opened.seek(picture.page)
                header = _pillow_header(path, opened)
                image = ImageOps.exif_transpose(opened)
                image = image.convert("F" if header.deep else "RGB" if header.colour else "L")
        if size is not None and (image.height, image.width) != size:
            image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
        values = np.asarray(image)
        if header.deep and (values.min() < 0 or values.max() > 65535):
            mend = "save it as an 8- or 16-bit image"
            raise BadImage(error("unsupported", path, "pixel values must lie between 0 and 65535", mend))
    return header, values.transpose(2, 0, 1) if values.ndim == 3 else values[None]


def changed(path: Path) -> Problem:
    """The problem of a file that is not what it was a moment ago."""
    mend = "try again when nobody is writing to the folder"
    return error("changed", path, f"{path} changed while it was read", mend)


@contextmanager
def decoder_warnings() -> Iterator[None]:
    """Inside: what decoders warn of is passed over, but an image of absurd size is an error.

    Filters of warnings belong to the process: they are set here once, and not by the threads that decode.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def _pillow_header(path: Path, image: Image.Image) -> ImageHeader:
    mode, size, kind = image.mode, (image.height, image.width), str(image.format or "")
    if mode == "F":
        text, mend = "floating-point images are not supported", "save it as an 8- or 16-bit image"
        raise BadImage(error("unsupported", path, text, mend))
    deep = mode in _DEEP_MODES
    frames = int(getattr(image, "n_frames", 1)) if kind in ("TIFF", *_MAY_MOVE) else 1
    pages, film = (frames, 1) if kind == "TIFF" else (1, frames)
    colour = not deep and mode not in _GREY_MODES
    return ImageHeader(size, colour, deep, 16 if deep else 1 if mode == "1" else 8, kind, pages, film)


def _page_header(path: Path, image: Image.Image, page: int, pages: int) -> ImageHeader:
    image.seek(page)
    here = _pillow_header(path, image)
    return ImageHeader(here.size, here.colour, here.deep, here.bits, here.format, pages)


def _dicom_headers(path: Path) -> list[ImageHeader]:
    header = _from_dicom(dicom_header(path))
    return [header] * header.pages


def _from_dicom(told: Any) -> ImageHeader:
    return ImageHeader(
        told.size,
        told.colour,
        told.deep,
        told.bits,
        "DICOM",
        pages=max(1, told.frames),
        person=told.person,
        burned_in=told.burned_in,
        own_range=told.own_range,
    )


@contextmanager
def _problems_of(path: Path) -> Iterator[None]:
    """Inside: whatever a decoder raises becomes a BadImage. Damage can surface anywhere in it, as any exception."""
    try:
        yield
    except (BadImage, UserError):
        raise
    except NoImage:
        raise BadImage(warning("no-image", path, "this DICOM file contains no image and is left out")) from None
    except FileNotFoundError:
        raise BadImage(changed(path)) from None
    except PermissionError:
        mend = "give yourself permission to read it, for example with chmod u+r"
        raise BadImage(error("no-permission", path, "the image cannot be read (no permission)", mend)) from None
    except Exception as problem:
        unknown = isinstance(problem, UnidentifiedImageError)
        reason = "not an image" if unknown else str(problem).partition("\n")[0] or type(problem).__name__
        text = f"the image cannot be read ({reason})"
        raise BadImage(error("unreadable", path, text, "replace or remove the file")) from None
