"""Why a model decided as it did, whether sites agree, and what its features look like; never trains."""

from protofed.explain.embeddings import embed
from protofed.explain.explaining import explain
from protofed.explain.explanations import Explanations

__all__ = ["Explanations", "embed", "explain"]
