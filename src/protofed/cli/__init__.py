"""The command line: one file per command, each thin."""

from protofed.cli.app import main

__all__ = ["main"]
