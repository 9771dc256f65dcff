"""Trackers of experiments as callbacks: MLflow and Weights & Biases, each with a run of its own for every run here.

A tracker that fails does not stop a federation: it is left out with a warning. The ids are kept in `trackers.json` of
the run folder, so that a resumed run goes on where it was.
"""

import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from protofed.errors import missing_extra, unknown_name
from protofed.runs.figures import figures_of, flat
from protofed.runs.opened import Run
from protofed.runs.tensorboard import TensorBoard
from protofed.system import write_atomically

log = logging.getLogger("protofed")

_IDS = "trackers.json"
_NOT_IN_NAMES = re.compile(r"[^/\w.\- :]")
"""What MLflow does not take in the name of a metric."""
_LONGEST_VALUE = 500
_Figures = Mapping[str, float]


class _TrackedRun(Protocol):
    """One run as a tracker has it."""

    id: str

    def log(self, figures: _Figures, round: int) -> None: ...

    def finish(self, summary: _Figures, failed: bool) -> None: ...


class Tracker(ABC):
    """Callback of a run, or of many side by side: hands every figure of every round to a tracker."""

    name: str

    def __init__(self) -> None:
        self._open: dict[Path, _TrackedRun] = {}

    @abstractmethod
    def begin(self, run: Run, id: str | None) -> _TrackedRun:
        """Begin a run of the tracker, or go on with that of `id`."""

    def run_start(self, run: Run, rounds_done: int) -> None:
        """Begin, or go on where an interrupted run was."""

        def begin() -> None:
            ids = _ids(run.path) if rounds_done else {}
            self._open[run.path] = tracked = self.begin(run, ids.get(self.name))
            write_atomically(run.path / _IDS, json.dumps({**ids, self.name: tracked.id}).encode())

        self._attempt(begin, run)

    def round_end(self, run: Run, record: dict[str, Any]) -> None:
        """All figures of a round."""
        if (tracked := self._open.get(run.path)) is not None:
            self._attempt(lambda: tracked.log(_finite(figures_of(record, "/")), record["round"]), run)

    def run_end(self, run: Run) -> None:
        """The summary, and the end."""
        self._finish(run, {"summary": {"accuracy": run.summary["accuracy"]}}, failed=False)

    def run_failed(self, run: Run, _reason: str) -> None:
        """The end of a run that failed."""
        self._finish(run, {}, failed=True)

    def _finish(self, run: Run, summary: Mapping[str, Any], failed: bool) -> None:
        if (tracked := self._open.pop(run.path, None)) is not None:
            self._attempt(lambda: tracked.finish(_finite(dict(flat(summary, "/"))), failed), run)

    def _attempt(self, act: Callable[[], None], run: Run) -> None:
        """Whatever a tracker throws, the run is worth more; one that has failed is left alone."""
        try:
            act()
        except Exception as problem:
            log.warning("%s: %s; the run continues without it", self.name, " ".join(str(problem).split())[:200])
            self._open.pop(run.path, None)


class MLflow(Tracker):
    """Callback: to MLflow, at `tracking_uri` or where MLFLOW_TRACKING_URI says."""

    name = "mlflow"

    def __init__(self, experiment: str = "protofed", tracking_uri: str | None = None) -> None:
        super().__init__()
        try:
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise missing_extra("tracking with MLflow needs mlflow-skinny, which is not installed", "mlflow") from None
        self._client = MlflowClient(tracking_uri=tracking_uri)
        self._experiment = experiment

    def begin(self, run: Run, id: str | None) -> _TrackedRun:
        """With the options of the run as its parameters."""
        if id is not None:
            self._client.update_run(id, status="RUNNING")
            return _MLflowRun(self._client, id)
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(self._experiment)
        made = self._client.create_run(experiment, run_name=run.path.name).info.run_id
        for key, value in _settings(run).items():
            self._client.log_param(made, _NOT_IN_NAMES.sub("_", key), value)
        return _MLflowRun(self._client, made)


class _MLflowRun:
    """A run of MLflow."""

    def __init__(self, client: Any, id: str) -> None:
        self._client = client
        self.id = id

    def log(self, figures: _Figures, round: int) -> None:
        """As metrics of a step."""
        for name, value in figures.items():
            self._client.log_metric(self.id, _NOT_IN_NAMES.sub("_", name), value, step=round)

    def finish(self, summary: _Figures, failed: bool) -> None:
        """With its status."""
        for name, value in summary.items():
            self._client.log_metric(self.id, _NOT_IN_NAMES.sub("_", name), value)
        self._client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


class WandB(Tracker):
    """Callback: to Weights & Biases; with WANDB_MODE=offline to files that `wandb sync` sends later."""

    name = "wandb"

    def __init__(self, project: str = "protofed") -> None:
        super().__init__()
        try:
            import wandb
        except ImportError:
            raise missing_extra("tracking with Weights & Biases needs wandb, which is not installed", "wandb") from None
        self._wandb: Any = wandb
        self._project = project

    def begin(self, run: Run, id: str | None) -> _TrackedRun:
        """With the options of the run as its configuration."""
        made = self._wandb.init(
            project=self._project,
            name=run.path.name,
            id=id,
            resume=None if id is None else "allow",
            config=_settings(run),
            reinit="create_new",
        )
        return _WandBRun(made)


class _WandBRun:
    """A run of Weights & Biases."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self.id: str = run.id

    def log(self, figures: _Figures, round: int) -> None:
        """As history of a step."""
        self._run.log(dict(figures), step=round)

    def finish(self, summary: _Figures, failed: bool) -> None:
        """With its status."""
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=int(failed))


_TRACKERS: dict[str, Callable[[], object]] = {"mlflow": MLflow, "tensorboard": TensorBoard, "wandb": WandB}
TRACKERS = tuple(_TRACKERS)
"""What `--track` takes."""


def make_tracker(name: str) -> object:
    """The callback for a tracker, with the tracker's own settings from its environment."""
    if name not in _TRACKERS:
        raise unknown_name("tracker", name, _TRACKERS)
    return _TRACKERS[name]()


def _settings(run: Run) -> dict[str, str]:
    """The options of a run that are set, as texts."""
    given = {**run.options, **run.options["set"]}
    return {
        key: str(value)[:_LONGEST_VALUE] for key, value in given.items() if key != "set" and value not in (None, [], "")
    }


def _finite(figures: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in figures.items() if value is not None}


def _ids(folder: Path) -> dict[str, str]:
    try:
        return dict(json.loads((folder / _IDS).read_text()))
    except (OSError, ValueError):
        return {}
