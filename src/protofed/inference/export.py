"""A run's model in a file that other programs load, checked against the run's own predictions before it is kept."""

import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from protofed.errors import UserError, missing_extra, unknown_name
from protofed.inference.classifier import Classifier
from protofed.inference.predict import image_files, pixels_for
from protofed.models import Split, load_weights, tensors, torchs_own_kernels
from protofed.models.freezing import complete_tensors, thawed
from protofed.runs.opened import LAST
from protofed.seeding import generator
from protofed.system import one_thread, write_atomically

_TOLERANCE = 1e-4
"""Largest difference of a probability that another runtime's arithmetic may make."""
_TRIED = 8
"""Images of noise that are predicted where the user gives none."""

Export = Callable[[Classifier, Path], Callable[[Tensor], Tensor]]


def export(
    classifier: Classifier,
    format: str = "onnx",
    out: str | Path | None = None,
    images: str | Path | None = None,
) -> Path:
    """Write the model and, beside it, a card that describes its inputs and outputs.

    The file is read back and its predictions compared with the run's, on the images of a folder or on noise; one that
    predicts otherwise is not kept.
    """
    if format not in FORMATS:
        raise unknown_name("format", format, FORMATS)
    path = Path(out) if out is not None else _default(classifier, format)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial{path.suffix}")
    pixels = _noise(classifier) if images is None else pixels_for(classifier, image_files(Path(images)))
    try:
        with one_thread(), torch.no_grad():
            written = FORMATS[format](classifier, temporary)
            difference = float((written(pixels[:]) - classifier(pixels[:])).abs().max())
        if not difference <= _TOLERANCE:
            raise UserError(_differs(format, difference))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    card = {**_card(classifier, format), "check": {"images": len(pixels), "largest_difference": difference}}
    write_atomically(card_of(path), json.dumps(card, indent=2).encode() + b"\n")
    return path


def card_of(path: Path) -> Path:
    """The card of an exported file."""
    return path.with_name(f"{path.name}.json")


def _default(classifier: Classifier, format: str) -> Path:
    name = "model" if classifier.client is None else classifier.client
    if classifier.model_of != LAST:
        name += f"_{classifier.model_of}"
    return classifier.run.path / "export" / f"{name}.{format}"


def _noise(classifier: Classifier) -> Tensor:
    return torch.randint(0, 256, (_TRIED, *classifier.image_shape), generator=generator(0, "export")).to(torch.uint8)


def _differs(format: str, difference: float) -> str:
    text = f"the predictions of the {format} file differ from the run's by up to {difference:.2g}, so it was not kept"
    if format == "safetensors":
        text += "; this run predicts with more than one network's head (an ensemble, prototypes): use --format onnx"
    return text


def _card(classifier: Classifier, format: str) -> dict[str, Any]:
    """What a program must know to use the file."""
    channels, height, width = classifier.image_shape
    inside = format == "onnx"
    config = classifier.config
    return {
        "format": format,
        "classes": list(classifier.classes),
        "input": {
            "name": "pixels",
            "shape": ["batch", channels, height, width],
            "type": "uint8" if inside else str(classifier.dtype).removeprefix("torch."),
            "colours": "grey" if channels == 1 else "red, green, blue",
            "resize": "bilinear to height x width before",
        },
        "output": "class probabilities" if inside else "class scores; softmax makes them probabilities",
        "normalise": {
            "inside": inside,
            "mean": list(classifier.normalise.mean),
            "std": list(classifier.normalise.std),
            "formula": "(pixel / 255 - mean) / std",
        },
        "model": config["model"]["name"],
        "model_options": config["model"]["options"],
        "method": config["method"]["name"],
        "client": classifier.client,
        "accuracy": classifier.summary["accuracy_final"],
        "versions": config["versions"],
    }


def _to_safetensors(classifier: Classifier, path: Path) -> Callable[[Tensor], Tensor]:
    """The weights of the network; the card is also in its header."""
    network = classifier.networks[0]
    assert isinstance(network, Split)
    everything = complete_tensors(network, tensors(network))
    named = {name: tensor.detach().contiguous() for name, tensor in everything.items()}
    path.write_bytes(save(named, metadata={"protofed": json.dumps(_card(classifier, "safetensors"))}))
    again = thawed(network)
    with torch.no_grad():
        for tensor in tensors(again).values():
            tensor.zero_()
    load_weights(again, path)

    def probabilities(pixels: Tensor) -> Tensor:
        scores: Tensor = again(classifier.normalise(pixels, classifier.dtype))
        return scores.softmax(1)

    return probabilities


def _to_onnx(classifier: Classifier, path: Path) -> Callable[[Tensor], Tensor]:
    """The whole classifier, normalisation inside; batches of any size."""
    try:
        import onnx
        import onnxruntime  # type: ignore[import-untyped]
        import onnxscript  # noqa: F401  # torch's exporter needs it
    except ImportError as error:
        raise missing_extra(f"onnx needs {error.name}, which is not installed", "export") from None
    example = _noise(classifier)
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torchs_own_kernels(classifier):
            warnings.simplefilter("ignore")
            torch.onnx.export(
                classifier,
                (example,),
                str(path),
                input_names=["pixels"],
                output_names=["probabilities"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"{classifier.config['method']['name']} cannot be written as onnx ({reason}); use --format safetensors"
        ) from error
    finally:
        logger.setLevel(level)
    model = onnx.load(str(path))
    onnx.helper.set_model_props(model, {"protofed": json.dumps(_card(classifier, "onnx"))})
    onnx.checker.check_model(model)
    onnx.save(model, str(path))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def probabilities(pixels: Tensor) -> Tensor:
        # One image alone and the rest together: a file that is fixed to one size of batch shows here.
        parts = [part.numpy() for part in (pixels[:1], pixels[1:]) if len(part)]
        return torch.cat([torch.from_numpy(session.run(None, {"pixels": part})[0]) for part in parts])

    return probabilities


FORMATS: dict[str, Export] = {"onnx": _to_onnx, "safetensors": _to_safetensors}
