"""The same images as DICOM, as PNG in folders of patients and in a semicolon csv give the same federation, bit for bit.

    python -m benchmarks.same_images FILE.npz [--out DIR]

deals the images of an archive out to two sites, three images a patient, writes them in the three forms, gives one
command for each, and compares models and accuracies.
"""

import argparse
import csv
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from protofed.cli import main as protofed

SITES = ("Zürich", "north")
IMAGES_OF_A_PATIENT = 3
OPTIONS = ["--model", "cnn", "--rounds", "8", "--epochs", "2", "--lr", "0.1", "--engine", "loop", "--quiet"]


class Sample(NamedTuple):
    """One image of a patient at a site."""

    pixels: Any
    label: str
    site: str
    patient: str
    name: str


def samples(x: Any, y: Any, classes: list[str]) -> Iterator[Sample]:
    """Images [N, H, W] dealt out in turn, by class and site, so that a patient has one diagnosis."""
    for number, label in enumerate(classes):
        for count, position in enumerate(np.flatnonzero(y == number)):
            site, own = count % len(SITES), count // len(SITES)
            patient = f"{label[0]}{own // IMAGES_OF_A_PATIENT:03d}"
            yield Sample(x[position], label, SITES[site], patient, f"{own % IMAGES_OF_A_PATIENT}")


def write_dicom(folder: Path, sample: Sample) -> None:
    """SITE/CLASS/PATIENT-NAME.dcm, with the patient in its tags."""
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

    path = folder / sample.site / sample.label / f"{sample.patient}-{sample.name}.dcm"
    path.parent.mkdir(parents=True, exist_ok=True)
    meta = FileMetaDataset()
    meta.TransferSyntaxUID, meta.MediaStorageSOPClassUID = ExplicitVRLittleEndian, SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    content = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    content.SOPClassUID, content.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
    content.PatientID, content.BurnedInAnnotation = sample.patient, "NO"
    content.Rows, content.Columns = sample.pixels.shape
    content.SamplesPerPixel, content.PhotometricInterpretation = 1, "MONOCHROME2"
    content.BitsAllocated = content.BitsStored = 8
    content.HighBit, content.PixelRepresentation = 7, 0
    content.PixelData = sample.pixels.tobytes()
    content.save_as(path, enforce_file_format=True)


def write_forms(folder: Path, dealt: list[Sample]) -> dict[str, Path]:
    """The three forms, by name, and what to give as --data."""
    rows = [["Datei", "file", "label", "site", "Patient ID"]]
    order = {site: number for number, site in enumerate(sorted(SITES))}
    listed = sorted(dealt, key=lambda each: (order[each.site], each.label, each.patient, each.name))
    (folder / "table").mkdir(parents=True)
    for number, sample in enumerate(listed):
        write_dicom(folder / "dicom", sample)
        place = folder / "png" / sample.site / sample.label / sample.patient
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(sample.pixels).save(place / f"{sample.name}.png")
        Image.fromarray(sample.pixels).save(folder / "table" / f"{number:05d}.png")
        rows.append([str(number), f"{number:05d}.png", sample.label, sample.site, sample.patient])
    with (folder / "table" / "list.csv").open("w", newline="", encoding="cp1252") as file:
        csv.writer(file, delimiter=";", lineterminator="\r\n").writerows(rows)
    return {"dicom": folder / "dicom", "png": folder / "png", "csv": folder / "table" / "list.csv"}


def run_forms(folder: Path, forms: dict[str, Path], options: list[str]) -> dict[str, Path]:
    """One command for each form; the run folders."""
    runs = {}
    for name, place in forms.items():
        runs[name] = folder / f"run-{name}"
        assert protofed(["run", "fedavg", "--data", str(place), *options, "--out", str(runs[name])]) == 0
    return runs


def main() -> None:
    """Write, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    folder = arguments.out or Path(tempfile.mkdtemp())
    with np.load(arguments.archive) as content:
        x = np.concatenate([content["x_train"], content["x_test"]])
        y = np.concatenate([content["y_train"], content["y_test"]])
        names = [str(name) for name in content["classes"]]
    x = x[..., 0] if x.ndim == 4 else x
    runs = run_forms(folder, write_forms(folder, list(samples(x, y, names))), OPTIONS)
    for name, run in runs.items():
        config = json.loads((run / "run.json").read_text())
        accuracy = json.loads((run / "summary.json").read_text())["accuracy_final"]["global"]
        print(name, config["partition"]["hash"], accuracy)
    models = {(run / "model.safetensors").read_bytes() for run in runs.values()}
    print("same model, bit for bit" if len(models) == 1 else "the models differ")


if __name__ == "__main__":
    main()
