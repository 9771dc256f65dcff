"""Using what came of a run: predictions for new images, and files that other programs can load."""

from protofed.inference.classifier import Classifier
from protofed.inference.export import FORMATS, card_of, export
from protofed.inference.predict import predict

__all__ = ["FORMATS", "Classifier", "card_of", "export", "predict"]
