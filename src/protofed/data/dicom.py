"""DICOM files as pictures: stored values, rescaled and windowed as their tags say, and who they are of.

Of the tags only these are read: size, frames, depth, colour, rescaling, window, patient, study, and whether writing is
burned into the pixels. Patient and study keep images of one person together; they are stored and sent nowhere.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protofed.errors import missing_extra

DICOM_SUFFIXES = (".dcm", ".dicom", ".ima")
_MARK_AT, _MARK = 128, b"DICM"
_TAGS = [
    "Rows",
    "Columns",
    "SamplesPerPixel",
    "PhotometricInterpretation",
    "BitsAllocated",
    "BitsStored",
    "PixelRepresentation",
    "NumberOfFrames",
    "RescaleSlope",
    "RescaleIntercept",
    "ModalityLUTSequence",
    "WindowCenter",
    "WindowWidth",
    "VOILUTSequence",
    "SharedFunctionalGroupsSequence",
    "PerFrameFunctionalGroupsSequence",
    "PatientID",
    "StudyInstanceUID",
    "BurnedInAnnotation",
]


class NoImage(Exception):
    """A DICOM file without pixels, such as a report or a directory."""


@dataclass(frozen=True)
class DicomHeader:
    """What a DICOM file is, without its pixels."""

    size: tuple[int, int]
    frames: int
    colour: bool
    bits: int
    deep: bool
    """Whether its values are brought to 8 bits together with those of other files, and not by themselves."""
    own_range: bool
    """Whether nothing says how to show it, so that its own darkest and brightest values have to do."""
    person: str
    """Of whom it is: patient, or else study; empty where neither is told."""
    burned_in: str
    """YES, NO or empty: whether the pixels hold writing."""


def is_dicom(path: Path) -> bool:
    """By the ending of its name, or by the mark in its content."""
    if path.suffix.lower() in DICOM_SUFFIXES:
        return True
    try:
        with path.open("rb") as file:
            return file.read(_MARK_AT + len(_MARK))[_MARK_AT:] == _MARK
    except OSError:
        return False


def dicom_header(path: Path) -> DicomHeader:
    """What the tags of a file say; raises NoImage, or whatever pydicom raises where it is damaged."""
    return _header(_read(path, pixels=False))


def dicom_values(path: Path, frame: int) -> tuple[DicomHeader, NDArray[Any]]:
    """One frame as it is to be seen: uint8 [H, W] or [H, W, 3], or float32 [H, W] in stored values where it is deep."""
    content = _read(path, pixels=True)  # says which extra is missing, where pydicom is
    from pydicom.pixels.utils import pixel_array

    header = _header(content)
    stored = pixel_array(content, index=frame)
    if header.colour:
        return header, _colour(content, stored)
    values = _rescaled(content, stored.astype(np.float64), frame)
    shown = _windowed(content, values, frame)
    if shown is None and header.deep:
        shown = values
    top = 2.0**header.bits - 1 if header.deep else 255.0
    if shown is None:
        low, high = (values.min(), values.max()) if header.own_range else (0.0, 2.0**header.bits - 1)
        shown = (values - low) * (255 / max(high - low, 1e-12))
    if content.PhotometricInterpretation == "MONOCHROME1":
        shown = top - shown
    return header, shown.astype(np.float32) if header.deep else np.clip(np.rint(shown), 0, 255).astype(np.uint8)


def _read(path: Path, pixels: bool) -> Any:
    try:
        from pydicom import dcmread
    except ImportError:
        raise missing_extra(
            f"{path} is a DICOM file, which needs pydicom (or convert it to 8- or 16-bit PNG)", "dicom"
        ) from None
    return dcmread(path) if pixels else dcmread(path, stop_before_pixels=True, specific_tags=list(_TAGS))


def _header(content: Any) -> DicomHeader:
    if not content.get("Rows") or not content.get("Columns"):
        raise NoImage
    bits = int(content.get("BitsStored") or 8)
    colour = int(content.get("SamplesPerPixel") or 1) == 3 or content.PhotometricInterpretation == "PALETTE COLOR"
    bare = not colour and not _has_window(content) and not _is_rescaled(content)
    signed = bool(content.get("PixelRepresentation"))
    return DicomHeader(
        size=(int(content.Rows), int(content.Columns)),
        frames=int(content.get("NumberOfFrames") or 1),
        colour=colour,
        bits=bits,
        deep=bare and 8 < bits <= 16 and not signed,
        own_range=not colour and not _has_window(content) and (signed or bits > 16 or _is_rescaled(content)),
        person=str(content.get("PatientID") or "").strip() or str(content.get("StudyInstanceUID") or "").strip(),
        burned_in=str(content.get("BurnedInAnnotation") or "").strip().upper(),
    )


def _of_frame(content: Any, frame: int, group: str) -> Any:
    """What enhanced files say of one frame, or of all frames; files of one frame say it at the top."""
    for name, number in (("PerFrameFunctionalGroupsSequence", frame), ("SharedFunctionalGroupsSequence", 0)):
        groups = content.get(name) or []
        if number < len(groups) and groups[number].get(group):
            return groups[number].get(group)[0]
    return content


def _is_rescaled(content: Any) -> bool:
    told = _of_frame(content, 0, "PixelValueTransformationSequence")
    slope, intercept = told.get("RescaleSlope"), told.get("RescaleIntercept")
    plain = float(1 if slope is None else slope) == 1 and float(intercept or 0) == 0
    return not plain or bool(content.get("ModalityLUTSequence"))


def _has_window(content: Any) -> bool:
    told = _of_frame(content, 0, "FrameVOILUTSequence")
    return bool(content.get("VOILUTSequence")) or (
        told.get("WindowCenter") is not None and told.get("WindowWidth") is not None
    )


def _rescaled(content: Any, values: NDArray[np.float64], frame: int) -> NDArray[np.float64]:
    """Stored values in the unit of the device, such as Hounsfield's."""
    from pydicom.pixels.processing import apply_modality_lut

    if content.get("ModalityLUTSequence"):
        return np.asarray(apply_modality_lut(values.astype(np.int64), content), dtype=np.float64)
    told = _of_frame(content, frame, "PixelValueTransformationSequence")
    slope, intercept = told.get("RescaleSlope"), told.get("RescaleIntercept")
    return values * float(1 if slope is None else slope) + float(intercept or 0)


def _windowed(content: Any, values: NDArray[np.float64], frame: int) -> NDArray[np.float64] | None:
    """What its first window, or its table, shows, from 0 to 255 (DICOM PS3.3 C.11.2); None where it has neither."""
    from pydicom.pixels.processing import apply_voi

    if content.get("VOILUTSequence"):
        bits = int(content.VOILUTSequence[0].LUTDescriptor[2])
        table = np.asarray(apply_voi(values.astype(np.int64), content), dtype=np.float64)
        return np.asarray(table * (255 / (2**bits - 1)))
    if not _has_window(content):
        return None
    told = _of_frame(content, frame, "FrameVOILUTSequence")
    centre, width = _first(told.get("WindowCenter")), _first(told.get("WindowWidth"))
    function = str(told.get("VOILUTFunction") or content.get("VOILUTFunction") or "LINEAR").upper()
    if function == "SIGMOID":
        return 255 / (1 + np.exp(-4 * (values - centre) / max(width, 1e-12)))
    if function == "LINEAR_EXACT":
        share = (values - centre) / max(width, 1e-12) + 0.5
    elif width > 1:
        share = (values - (centre - 0.5)) / (width - 1) + 0.5
    else:
        share = (values > centre - 0.5).astype(np.float64)
    return np.clip(share, 0, 1) * 255


def _first(value: Any) -> float:
    """Files may offer several windows; the first is the one to begin with."""
    return float(value) if np.ndim(value) == 0 else float(value[0])


def _colour(content: Any, stored: NDArray[Any]) -> NDArray[np.uint8]:
    """8 bits a channel; pydicom has turned YBR into RGB already."""
    from pydicom.pixels.processing import apply_color_lut

    bits = int(content.BitsStored)
    if content.PhotometricInterpretation == "PALETTE COLOR":
        stored = apply_color_lut(stored, content)
        bits = int(content.RedPaletteColorLookupTableDescriptor[2])
    if bits == 8:
        return np.asarray(stored, dtype=np.uint8)
    scaled = np.rint(stored.astype(np.float64) * (255 / (2**bits - 1)))
    return np.asarray(np.clip(scaled, 0, 255), dtype=np.uint8)
