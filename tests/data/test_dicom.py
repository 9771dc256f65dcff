"""DICOM files: what their tags say is what is seen, worked out by hand; pydicom's own samples are read."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protofed.data import load
from protofed.data.decoding import BadImage, Picture, decode, headers_of
from protofed.data.files import read_images
from protofed.errors import UserError

pydicom = pytest.importorskip("pydicom")

STORED = np.array([[0, 10, 20, 30], [40, 50, 60, 70], [80, 90, 100, 110], [200, 255, 1, 2]], dtype=np.uint8)


def dicom(path: Path, pixels: Any = STORED, patient: str = "17", **tags: Any) -> Path:
    """Write pixels [H, W], [frames, H, W] or [H, W, 3] with any tags."""
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    content = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    colour = pixels.ndim == 3 and pixels.shape[-1] == 3
    frames = pixels.shape[0] if pixels.ndim == 3 and not colour else 1
    content.Rows, content.Columns = pixels.shape[:2] if colour else pixels.shape[-2:]
    content.SamplesPerPixel = 3 if colour else 1
    content.PhotometricInterpretation = "RGB" if colour else "MONOCHROME2"
    if colour:
        content.PlanarConfiguration = 0
    if frames > 1:
        content.NumberOfFrames = frames
    content.BitsAllocated = content.BitsStored = pixels.dtype.itemsize * 8
    content.HighBit = content.BitsStored - 1
    content.PixelRepresentation = int(pixels.dtype.kind == "i")
    content.PatientID = patient
    content.StudyInstanceUID = generate_uid()
    content.SOPClassUID, content.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
    content.BurnedInAnnotation = "NO"
    for name, value in tags.items():
        setattr(content, name, value)
    content.HighBit = content.BitsStored - 1
    content.PixelData = pixels.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    content.save_as(path, enforce_file_format=True)
    return path


def seen(path: Path, page: int = 0) -> Any:
    return decode(Picture(path, page))[1]


def test_eight_bits_are_seen_as_they_are(tmp_path: Path) -> None:
    assert np.array_equal(seen(dicom(tmp_path / "a.dcm"))[0], STORED)
    inverse = dicom(tmp_path / "b.dcm", PhotometricInterpretation="MONOCHROME1")
    assert np.array_equal(seen(inverse)[0], 255 - STORED)


def test_rescaled_and_windowed_by_the_standard(tmp_path: Path) -> None:
    stored = np.array([[0, 1000, 1064, 1400]] * 4, dtype=np.uint16)
    path = dicom(
        tmp_path / "ct.dcm",
        stored,
        RescaleSlope=1,
        RescaleIntercept=-1024,
        WindowCenter=[40, 600],
        WindowWidth=[400, 1],
    )
    # PS3.3 C.11.2.1.2: ((x - (c - 0.5)) / (w - 1) + 0.5) * 255, between 0 and 255.
    units = np.array([-1024, -24, 40, 376])
    wanted = np.rint(np.clip((units - 39.5) / 399 + 0.5, 0, 1) * 255)
    assert np.array_equal(seen(path)[0, 0], wanted)
    exact = dicom(tmp_path / "e.dcm", stored, WindowCenter=1000, WindowWidth=400, VOILUTFunction="LINEAR_EXACT")
    assert np.array_equal(seen(exact)[0, 0], np.rint(np.clip((stored[0] - 1000.0) / 400 + 0.5, 0, 1) * 255))
    sigmoid = dicom(tmp_path / "s.dcm", stored, WindowCenter=1000, WindowWidth=400, VOILUTFunction="SIGMOID")
    assert np.array_equal(seen(sigmoid)[0, 0], np.rint(255 / (1 + np.exp(-4 * (stored[0] - 1000.0) / 400))))


def test_deep_images_without_a_window_are_scaled_together(tmp_path: Path) -> None:
    one = dicom(tmp_path / "one.dcm", np.full((4, 4), 4095, dtype=np.uint16), BitsStored=12)
    half = dicom(tmp_path / "half.dcm", np.full((4, 4), 2048, dtype=np.uint16), BitsStored=12)
    pixels, notes = read_images([one, half])
    assert pixels[:, 0, 0, 0].tolist() == [255, 128]
    assert "12 bits" in notes[0]
    dark = dicom(
        tmp_path / "x.dcm", np.full((4, 4), 4095, np.uint16), BitsStored=12, PhotometricInterpretation="MONOCHROME1"
    )
    assert seen(dark).max() == 0


def test_what_says_nothing_is_shown_by_its_own_range(tmp_path: Path) -> None:
    path = dicom(tmp_path / "a.dcm", np.array([[-1000, 0], [500, 1000]] * 2, dtype=np.int16))
    assert seen(path)[0, :2].tolist() == [[0, 128], [191, 255]]
    assert headers_of(path)[0].own_range


def test_frames_and_colour(tmp_path: Path) -> None:
    frames = np.stack([STORED, 255 - STORED, STORED // 2])
    path = dicom(tmp_path / "three.dcm", frames)
    assert len(headers_of(path)) == 3
    assert all(np.array_equal(seen(path, number)[0], frames[number]) for number in range(3))
    colours = np.stack([STORED, STORED // 2, STORED // 4], axis=-1)
    assert np.array_equal(seen(dicom(tmp_path / "rgb.dcm", colours)), colours.transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("name", "colour"),
    [
        ("CT_small.dcm", False),
        ("MR_small.dcm", False),
        ("MR_small_RLE.dcm", False),
        ("SC_rgb_rle.dcm", True),
        ("SC_rgb_small_odd.dcm", True),
        ("SC_ybr_full_422_uncompressed.dcm", True),
        ("examples_palette.dcm", True),
        ("examples_rgb_color.dcm", True),
        ("SC_rgb_jpeg_dcmtk.dcm", True),
        ("liver_1frame.dcm", False),
        ("rtdose.dcm", False),
    ],
)
def test_samples_of_pydicom(name: str, colour: bool) -> None:
    path = Path(pydicom.__file__).parent / "data" / "test_files" / name
    header, values = decode(Picture(path))
    assert header.colour == colour
    assert values.shape[0] == (3 if colour else 1)
    assert values.max() > values.min()


def test_the_sample_slice_as_its_modality_says() -> None:
    """Without a window the CT is shown from its own lowest to its highest Hounsfield unit."""
    path = Path(pydicom.__file__).parent / "data" / "test_files" / "CT_small.dcm"
    content = pydicom.dcmread(path)
    units = content.pixel_array.astype(float) * float(content.RescaleSlope) + float(content.RescaleIntercept)
    wanted = np.rint((units - units.min()) / (units.max() - units.min()) * 255)
    assert np.array_equal(seen(path)[0], wanted)


def test_what_is_no_image(tmp_path: Path) -> None:
    base = Path(pydicom.__file__).parent / "data" / "test_files"
    with pytest.raises(BadImage, match="contains no image"):
        headers_of(base / "rtplan.dcm")
    (tmp_path / "a.dcm").write_bytes(b"text")
    with pytest.raises(BadImage, match="cannot be read"):
        headers_of(tmp_path / "a.dcm")
    with pytest.raises(BadImage, match="cannot be read"):
        decode(Picture(base / "MR_truncated.dcm"))


def test_burned_in_names_are_warned_of(tmp_path: Path) -> None:
    for number, said in enumerate(("YES", "NO", "", "NO", "NO", "NO")):
        tags = {"BurnedInAnnotation": said} if said else {}
        path = dicom(tmp_path / "a" / "xy"[number % 2] / f"{number}.dcm", patient=str(number), **tags)
        if not said:
            content = pydicom.dcmread(path)
            del content.BurnedInAnnotation
            content.save_as(path)
    (told,) = [text for text in load(str(tmp_path)).warnings if "may show names" in text]
    assert "2 files have pixels that may show names: the DICOM tags of 1 say so" in told


def test_without_the_extra_its_name_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dicom(tmp_path / "a" / "x" / "0.dcm")
    monkeypatch.setitem(__import__("sys").modules, "pydicom", None)
    with pytest.raises(UserError, match=r"protofed\[dicom\]"):
        load(str(tmp_path))
