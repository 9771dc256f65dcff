"""Event files for TensorBoard, on request: every figure of every round, in `tensorboard/` of each run folder."""

from pathlib import Path
from typing import Any

from protofed.errors import missing_extra
from protofed.runs.figures import figures_of
from protofed.runs.opened import Run


class TensorBoard:
    """Callback of a run, or of many side by side."""

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise missing_extra("--tensorboard needs tensorboard, which is not installed", "tensorboard") from None
        self._make = SummaryWriter
        self._writers: dict[Path, Any] = {}

    def run_start(self, run: Run, rounds_done: int) -> None:
        """Begin a file; what an interrupted round may have written is dropped."""
        folder = str(run.path / "tensorboard")
        self._writers[run.path] = self._make(folder, purge_step=rounds_done + 1 if rounds_done else None)

    def round_end(self, run: Run, record: dict[str, Any]) -> None:
        """Loss, accuracy, bytes and seconds of a round."""
        writer = self._writers[run.path]
        for name, value in figures_of(record, "/").items():
            if value is not None:
                writer.add_scalar(name, value, record["round"])
        writer.flush()

    def run_end(self, run: Run) -> None:
        """Close the file."""
        if run.path in self._writers:
            self._writers.pop(run.path).close()

    def run_failed(self, run: Run, _reason: str) -> None:
        """Close the file of a failed run."""
        self.run_end(run)
