"""MedMNIST: one npz file per set, in one or several sizes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from protofed.data.images import RawData
from protofed.data.npz import BROKEN, read_arrays
from protofed.data.sources.arrays import damaged, domain, images
from protofed.data.sources.source import Size

ORGANS = (
    *("bladder", "femur-left", "femur-right", "heart", "kidney-left", "kidney-right"),
    *("liver", "lung-left", "lung-right", "pancreas", "spleen"),
)
_SIDES = (28, 64, 128, 224)


@dataclass(frozen=True)
class MedSet:
    """One of the two-dimensional sets with one label per image; `counts` are train, validation and test."""

    stem: str
    what: str
    classes: tuple[str, ...]
    counts: tuple[int, int, int]
    md5: str
    licence: str = "CC BY 4.0"


MED_SETS = (
    MedSet(
        "pathmnist",
        "colorectal tissue",
        (
            *("adipose", "background", "debris", "lymphocytes", "mucus", "smooth muscle", "normal colon mucosa"),
            *("cancer-associated stroma", "colorectal adenocarcinoma epithelium"),
        ),
        (89996, 10004, 7180),
        "a8b06965200029087d5bd730944a56c1",
    ),
    MedSet(
        "dermamnist",
        "skin lesions",
        (
            *(
                "actinic keratoses and intraepithelial carcinoma",
                "basal cell carcinoma",
                "benign keratosis-like lesions",
            ),
            *("dermatofibroma", "melanoma", "melanocytic nevi", "vascular lesions"),
        ),
        (7007, 1003, 2005),
        "0744692d530f8e62ec473284d019b0c7",
        "CC BY-NC 4.0",
    ),
    MedSet(
        "octmnist",
        "retinal optical coherence tomography",
        ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
        (97477, 10832, 1000),
        "c68d92d5b585d8d81f7112f81e2d0842",
    ),
    MedSet(
        "pneumoniamnist",
        "chest X-rays of children",
        ("normal", "pneumonia"),
        (4708, 524, 624),
        "28209eda62fecd6e6a2d98b1501bb15f",
    ),
    MedSet(
        "retinamnist",
        "fundus photographs by grade of retinopathy",
        ("0", "1", "2", "3", "4"),
        (1080, 120, 400),
        "bd4c0672f1bba3e3a89f0e4e876791e4",
    ),
    MedSet(
        "breastmnist",
        "breast ultrasound",
        ("malignant", "normal or benign"),
        (546, 78, 156),
        "750601b1f35ba3300ea97c75c52ff8f6",
    ),
    MedSet(
        "bloodmnist",
        "blood cells",
        (
            *("basophil", "eosinophil", "erythroblast", "immature granulocyte"),
            *("lymphocyte", "monocyte", "neutrophil", "platelet"),
        ),
        (11959, 1712, 3421),
        "7053d0359d879ad8a5505303e11de1dc",
    ),
    MedSet(
        "tissuemnist",
        "kidney cortex cells",
        (
            *("collecting duct or connecting tubule", "distal convoluted tubule", "glomerular endothelial"),
            *("interstitial endothelial", "leukocyte", "podocyte", "proximal tubule", "thick ascending limb"),
        ),
        (165466, 23640, 47280),
        "ebe78ee8b05294063de985d821c1c34b",
    ),
    MedSet("organamnist", "organs in axial CT", ORGANS, (34581, 6491, 17778), "866b832ed4eeba67bfb9edee1d5544e6"),
    MedSet("organcmnist", "organs in coronal CT", ORGANS, (13000, 2392, 8268), "0afa5834fb105f7705a7d93372119a21"),
    MedSet("organsmnist", "organs in sagittal CT", ORGANS, (13940, 2452, 8829), "e5c39f1af030238290b9557d9503af9d"),
)


def med_reader(med: MedSet) -> Callable[[Path, Size], RawData]:
    """The reader of one set."""

    def read(folder: Path, size: Size) -> RawData:
        """Validation images are trained on: a run takes its own validation images out of the training images."""
        path = _fitting(folder, med.stem, size)
        try:
            archive = read_arrays(path)
            x = np.concatenate([archive["train_images"], archive["val_images"]])
            y = np.concatenate([archive["train_labels"].reshape(-1), archive["val_labels"].reshape(-1)])
            test = images(archive["test_images"], archive["test_labels"], f"{path}, test")
        except BROKEN as problem:
            raise damaged(path, problem) from None
        return RawData(med.classes, {med.stem: domain(med.stem, images(x, y, str(path)), test, len(med.classes))})

    return read


def _fitting(folder: Path, stem: str, size: Size) -> Path:
    """The smallest file with the size asked for, or else the largest there is; without a wish the smallest."""
    names = {side: folder / (f"{stem}.npz" if side == 28 else f"{stem}_{side}.npz") for side in _SIDES}
    present = {side: path for side, path in names.items() if path.is_file()}
    enough = [side for side in present if size is None or side >= max(size)]
    return present[min(enough)] if enough else present[max(present)]
