"""A run that has happened, or is happening: read from its folder."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from protofed.errors import UserError
from protofed.federation import RunFolder
from protofed.models import Split, load_weights

_LAST_ROUNDS = 5


class Run:
    """One run folder: its configuration, rounds, summary and model."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._folder = RunFolder(self.path)

    @property
    def config(self) -> dict[str, Any]:
        """run.json: everything resolved."""
        return self._folder.read_json("run.json")

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """The lines of rounds.jsonl."""
        return self._folder.rounds()

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json, which exists once the run is complete."""
        if not self.complete:
            raise UserError(f"the run in {self.path} is not complete; continue it with --resume")
        return self._folder.read_json("summary.json")

    @property
    def complete(self) -> bool:
        """Whether all rounds are done and summed up."""
        return (self.path / "summary.json").exists()

    @cached_property
    def options(self) -> dict[str, Any]:
        """The options that would run it again."""
        options = self.config.get("options")
        if not isinstance(options, dict):
            raise UserError(f"{self.path / 'run.json'} is damaged: it has no options")
        return options

    def model(self) -> Split:
        """The global model at its final weights."""
        from protofed.runs.assembly import reassemble

        if not (self.path / "model.safetensors").exists():
            raise UserError(f"{self.path} has no global model: with this method every client keeps its own")
        model = reassemble(self.config, self.path).context.model
        load_weights(model, self.path / "model.safetensors")
        return model.eval()

    def prototypes(self) -> dict[str, Any]:
        """The global prototypes: `rows` [classes, d] and `count` [classes]."""
        path = self.path / "prototypes.safetensors"
        if not path.exists():
            raise UserError(f"{self.path} has no global prototypes: this method keeps none")
        try:
            return dict(load_file(path))
        except SafetensorError as problem:
            raise UserError(f"{path} is damaged ({problem})") from None


def mean_of_last(rounds: list[dict[str, Any]], last: int = _LAST_ROUNDS) -> Any:
    """Accuracy in the contract's form, averaged over the last evaluated rounds."""
    evaluated = [record["accuracy"] for record in rounds if record["accuracy"] is not None]
    return _mean(evaluated[-last:])


def best_validated(rounds: list[dict[str, Any]]) -> Any:
    """Accuracy of the round whose model did best on validation data; None where there was no such data."""
    validated = [record for record in rounds if record["validation"] is not None]
    return max(validated, key=lambda record: record["validation"])["accuracy"] if validated else None


def _mean(views: list[Any]) -> Any:
    """The mean of trees of numbers, built like the last of them; what is missing in one does not count."""
    known = [view for view in views if view is not None]
    if not known:
        return None
    if isinstance(known[-1], Mapping):
        return {key: _mean([view.get(key) for view in known]) for key in known[-1]}
    return sum(known) / len(known)
