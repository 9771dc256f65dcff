"""Published data sets, read from their original files under a data root."""

from protofed.data.sources.options import DataOption, checked, options_of
from protofed.data.sources.source import Benchmark, Original, Source
from protofed.data.sources.table import SOURCES

__all__ = ["SOURCES", "Benchmark", "DataOption", "Original", "Source", "checked", "options_of"]
