"""Both views of a federation: the server's model per domain, and what each client would use, per client."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any, TypeVar

import numpy as np

from protofed.clients import Evaluate, Failed, Job, Predict, Predicted, Project, Projected, Score, Setting
from protofed.federation.engine import Engine
from protofed.records import Message

J = TypeVar("J", bound=Job)
R = TypeVar("R", Score, Predicted, Projected)

_LISTED_CLIENTS = 100
"""Above this many clients only the average and quantiles of the personal view are written."""


@dataclass(frozen=True)
class Member:
    """One model of an ensemble, encoded, and its share in the mean."""

    client: str
    weight: float
    model: Message


class Evaluator:
    """Decides which model is scored on which test set, and lays the results out as the contract says."""

    def __init__(self, setting: Setting, engine: Engine) -> None:
        self._setting = setting
        self._engine = engine
        partition = setting.partition
        self._own_holdout = any(len(indices) for indices in partition.holdout.values())
        self._held_out = partition.held_out

    @property
    def personal_test(self) -> str:
        """Which test set the personal view uses, for run.json."""
        return "own hold-out" if self._own_holdout else "own domain's test set"

    def evaluate(
        self,
        round: int,
        global_model: Message | None,
        broadcast_to: Callable[[str], Message],
        members: Sequence["Member"] = (),
        local: bool = False,
    ) -> dict[str, Any]:
        """Accuracy in every view that makes sense for the method; null where one does not.

        Where there are members, the global view is that of their ensemble.
        """
        domains: dict[str, Score] | None = None
        if members:
            domains = self._ensemble_scores(round, members)
        elif global_model is not None:
            domains = self._domain_scores(round, global_model)
        accuracy: dict[str, Any] = {
            "global": None if domains is None else self._global_view(domains),
            "personal": self._personal_view(round, None if members else domains, broadcast_to),
        }
        if local:
            accuracy["local"] = _client_view(self._client_scores("local", round, broadcast_to))
        return accuracy

    def validate(self, round: int, broadcast_to: Callable[[str], Message]) -> float | None:
        """Accuracy of what clients would use now on what they keep from training; None where they keep nothing."""
        if not self._setting.validation:
            return None
        jobs = [Evaluate("personal", round, client, None, validates=True) for client in self._setting.partition.clients]
        scores = self._perform([(job, broadcast_to(str(job.client))) for job in jobs], Score).values()
        total = sum(score.total for score in scores)
        return sum(score.correct for score in scores) / total if total else None

    def project(self, round: int, broadcast_to: Callable[[str], Message]) -> dict[str, Any]:
        """Let every client project its part prototypes; the accuracy of each client's model before and after."""
        domain = self._setting.partition.domain
        jobs = [
            Project(round, client, None if self._own_holdout else domain[client])
            for client in self._setting.partition.clients
        ]
        done = self._perform([(job, broadcast_to(job.client)) for job in jobs], Projected)
        return {
            when: _client_view({job.client: getattr(done[job], when) for job in jobs}) for when in ("before", "after")
        }

    def _personal_view(
        self, round: int, domains: dict[str, Score] | None, broadcast_to: Callable[[str], Message]
    ) -> dict[str, Any] | None:
        partition = self._setting.partition
        if not self._own_holdout and not all(partition.domain.values()):
            return None  # pooled data has no domain of its own
        if domains is not None and self._setting.method.kind == "global" and not self._own_holdout:
            # Every client would use the server's model on its own domain, which has just been scored.
            return _client_view({client: domains[domain] for client, domain in partition.domain.items()})
        return _client_view(self._client_scores("personal", round, broadcast_to))

    def _ensemble_scores(self, round: int, members: Sequence["Member"]) -> dict[str, Score]:
        """Per domain, the mean of the members' class probabilities."""
        domains = self._setting.dataset.domains
        jobs = [(Predict(round, name, member.client), member.model) for name in domains for member in members]
        predicted = self._perform(jobs, Predicted)
        scores = {}
        for name, domain in domains.items():
            mean = sum(
                member.weight * predicted[Predict(round, name, member.client)].probabilities for member in members
            )
            correct = int((np.asarray(mean).argmax(1) == domain.test.y.numpy()).sum())
            scores[name] = Score(correct, len(domain.test))
        return scores

    def _domain_scores(self, round: int, global_model: Message) -> dict[str, Score]:
        jobs = [Evaluate("global", round, None, domain) for domain in self._setting.dataset.domains]
        scores = self._perform([(job, global_model) for job in jobs], Score)
        return {str(job.domain): scores[job] for job in jobs}

    def _client_scores(self, view: Any, round: int, broadcast_to: Callable[[str], Message]) -> dict[str, Score]:
        domain = self._setting.partition.domain
        jobs = [
            Evaluate(view, round, client, None if self._own_holdout else domain[client])
            for client in self._setting.partition.clients
        ]
        scores = self._perform([(job, broadcast_to(str(job.client))) for job in jobs], Score)
        return {str(job.client): scores[job] for job in jobs}

    def _perform(self, jobs: Sequence[tuple[J, Message]], kind: type[R]) -> dict[J, R]:
        """The result of every job; a failure here is ours, not a client's, and ends the run."""
        results: dict[Any, R] = {}
        for job, result in self._engine.perform(jobs):
            if not isinstance(result, kind):
                assert isinstance(result, Failed)
                raise RuntimeError(f"{job} failed: {result.reason}\n{result.trace}")
            results[job] = result
        return results

    def _global_view(self, scores: Mapping[str, Score]) -> dict[str, Any]:
        """Per domain, their plain mean, and over all samples together; held-out domains count apart."""
        seen = {domain: score for domain, score in scores.items() if domain not in self._held_out}
        view: dict[str, Any] = {domain: _fraction(score) for domain, score in scores.items()}
        view["average"] = _mean(_fraction(score) for score in seen.values())
        view["pooled"] = sum(score.correct for score in seen.values()) / sum(score.total for score in seen.values())
        if self._held_out:
            view["held_out"] = {domain: view[domain] for domain in self._held_out}
        return view


def _client_view(scores: Mapping[str, Score]) -> dict[str, Any]:
    values = {client: _fraction(score) for client, score in scores.items()}
    average = _mean(values.values())
    if len(values) <= _LISTED_CLIENTS:
        return {**values, "average": average}
    low, middle, high = quantiles(values.values(), n=4)
    return {"average": average, "quantiles": {"0.25": low, "0.5": middle, "0.75": high}}


def _fraction(score: Score) -> float:
    return score.correct / score.total if score.total else 0.0


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
