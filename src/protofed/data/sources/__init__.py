"""Published data sets, read from their original files under a data root."""

from protofed.data.sources.source import Benchmark, Original, Reader, Source
from protofed.data.sources.table import SOURCES

__all__ = ["SOURCES", "Benchmark", "Original", "Reader", "Source"]
