"""Using a finished run: predictions and scores on other images, model files for other programs, a newcomer."""

from protofed.inference.classifier import Classifier
from protofed.inference.evaluating import evaluate
from protofed.inference.export import FORMATS, card_of, export
from protofed.inference.predict import predict

__all__ = ["FORMATS", "Classifier", "card_of", "evaluate", "export", "predict"]
