"""One run: options become a federation, which is run into a folder, and opened again."""

from protofed.runs.config_file import read_config
from protofed.runs.opened import Run
from protofed.runs.options import Options
from protofed.runs.run import run

__all__ = ["Options", "Run", "read_config", "run"]
