"""Results of a sweep: the content of sweep.json, and tables of it."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from protofed.errors import UserError
from protofed.federation.required import require
from protofed.metrics import ACCURACY, Metric, find_metric
from protofed.studies.schedule import Failure
from protofed.studies.schema import VIEWS
from protofed.text import Table, interval, percent

SWEEP_FILE = "sweep.json"
_KEYS = {
    "method": str,
    "over": dict,
    "score": str,
    "validation": str,
    "seeds": list,
    "options": {"data": str},
    "trials": list,
    "best": dict | None,
    "missing": list,
}


class Sweep:
    """The content of sweep.json, and tables of it."""

    def __init__(self, path: Path, content: dict[str, Any], failures: Sequence[Failure] = ()) -> None:
        self.path = path
        self.content = content
        self.failures = tuple(failures)

    @classmethod
    def read(cls, path: str | Path) -> "Sweep":
        """The sweep in a folder, complete or not."""
        file = Path(path) / SWEEP_FILE
        try:
            content = json.loads(file.read_text())
        except OSError:
            raise UserError(f"{path} holds no {SWEEP_FILE}; give the --out of a sweep") from None
        except ValueError:
            raise UserError(f"{file} is damaged: it is not JSON") from None
        if not isinstance(content, dict):
            raise UserError(f"{file} is damaged: it is not a JSON object")
        return cls(Path(path), require(content, _KEYS, file))

    @property
    def _metric(self) -> Metric:
        return find_metric(self.content.get("metric", ACCURACY))

    def table(self) -> Table:
        """The trials, best first; validation data only."""
        keys = list(self.content["over"])
        rows = [
            [
                str(trial["rank"] or "-"),
                *(trial["settings"][key] for key in keys),
                percent(trial["validation"]["mean"]) if trial["validation"] else "-",
                percent(trial["validation"]["std"]) if trial["validation"] else "-",
            ]
            for trial in sorted(self.content["trials"], key=lambda trial: trial["rank"] or math.inf)
        ]
        return Table(f"{self._metric.heading} (%) on validation data", ["rank", *keys, "validation", "std"], rows)

    def winner(self) -> str:
        """One line on the best trial and its result on test data."""
        best = self.content["best"]
        if best is None:
            return "no winner yet: not all trials are done"
        settings = ", ".join(f"{key}={value}" for key, value in best["settings"].items())
        on_test_data = [
            f"{percent(best['test'][view]['average']['mean'])} % ({view} view)"
            for view in VIEWS
            if best["test"][view] is not None
        ]
        by_metric = [
            f"{self._metric.title} {percent(average['mean'])} % ({interval(average['interval'])}, {view} view)"
            for view, entry in (best.get("by_metric") or {}).items()
            if entry is not None and self._metric.name != ACCURACY and (average := entry["average"])
        ]
        return f"best: {settings}; on test data {', '.join([*on_test_data, *by_metric])}"

    def missing(self) -> list[str]:
        """A line for every run without a result."""
        return [f"{entry['trial']}, seed {entry['seed']}: {entry['reason']}" for entry in self.content["missing"]]

    def markdown(self) -> str:
        """sweep.md."""
        content = self.content
        how = {"last": "mean of the last 5 evaluated rounds", "best": "best evaluated round"}[content["score"]]
        blocks = [
            f"# Sweep of {content['method']}",
            f"{self._metric.heading} in % on {100 * float(content['validation']):.0f} % of each client's training "
            f"images, held out from training; {how}; seeds {', '.join(map(str, content['seeds']))}.",
            self.table().markdown(),
        ]
        if content["missing"]:
            blocks += ["**Not complete.** Missing:", "\n".join(f"- {line}" for line in self.missing())]
        return "\n\n".join([*blocks, self.winner()]) + "\n"
