"""Both views of a federation: the server's model per domain, and what each client would use, per client."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any, Literal, TypeVar

import numpy as np

from protofed.clients import Absent, Evaluate, Failed, Job, Predict, Predicted, Project, Projected, RunContext, Score
from protofed.federation.engine import Engine
from protofed.method import Method
from protofed.models import nothing
from protofed.records import Message

J = TypeVar("J", bound=Job)
R = TypeVar("R", Score, Predicted, Projected)

_LISTED_CLIENTS = 100
"""Above this many clients only the average and quantiles of the personal view are written."""


_SCORED_TOGETHER = 512
"""Samples of small test sets that go through a model in one job."""

_NO_SAMPLES = Score(0, 0)

View = Literal["personal", "local"]


@dataclass(frozen=True)
class Member:
    """One model of an ensemble, encoded, and its share in the mean."""

    client: str
    weight: float
    model: Message


class _Case:
    """What decides a client's score: a model, the message loaded over it, a test set, and who predicts if it matters.

    The model is the server's (None), a client's own by name, or one nobody has trained yet, by its architecture.
    Messages are told apart by identity: comparing their bytes would cost more than it could save.
    """

    def __init__(
        self, model: str | int | None, message: Message | None, test: tuple[str, bool], predicts: str | None = None
    ) -> None:
        self.model = model
        self.message = message
        self.test = test
        self.network = (model, id(message), predicts)

    def __hash__(self) -> int:
        return hash((self.network, self.test))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Case) and (self.network, self.test) == (other.network, other.test)


class Evaluator:
    """Decides which model is scored on which test set, and lays the results out as the contract says."""

    def __init__(self, context: RunContext, engine: Engine) -> None:
        self._context = context
        self._engine = engine
        self._ever_trained: set[str] = set()
        # The default prediction looks at nothing but the network, so the same network gives the same score.
        self._network_decides = type(context.method).predict is Method.predict
        self._lasting: dict[_Case, Score] = {}
        partition = context.partition
        self._own_holdout = any(len(indices) for indices in partition.holdout.values())
        self._held_out = partition.held_out
        self._absences: list[dict[str, str]] = []

    @property
    def personal_test(self) -> str:
        """Which test set the personal view uses, for run.json."""
        return "own hold-out" if self._own_holdout else "own domain's test set"

    def trained(self, clients: Iterable[str]) -> None:
        """These clients' own models may have changed; what is known of the others' still holds."""
        changed = set(clients)
        self._ever_trained |= changed
        self._lasting = {case: score for case, score in self._lasting.items() if case.model not in changed}

    def absences(self) -> list[dict[str, str]]:
        """Who could not be asked since this was last asked for, as events of a round."""
        told, self._absences = self._absences, []
        return told

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
        # Where test images are dealt out, too, the only tests are the clients' own.
        tested = any(len(domain.test) for domain in self._context.dataset.domains.values())
        if members and tested:
            domains = self._ensemble_scores(round, members)
        elif global_model is not None and tested:
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
        if not self._context.validation:
            return None
        scores = self._client_scores("personal", round, broadcast_to, validates=True).values()
        total = sum(score.total for score in scores)
        return sum(score.correct for score in scores) / total if total else None

    def project(self, round: int, broadcast_to: Callable[[str], Message]) -> dict[str, Any]:
        """Let every client project its part prototypes; the accuracy of each client's model before and after."""
        domain = self._context.partition.domain
        jobs = [
            Project(round, client, None if self._own_holdout else domain[client])
            for client in self._context.partition.clients
        ]
        done = self._perform([(job, broadcast_to(job.client)) for job in jobs], Projected)
        return {
            when: _client_view({job.client: getattr(done[job], when) for job in jobs if job in done})
            for when in ("before", "after")
        }

    def _personal_view(
        self, round: int, domains: dict[str, Score] | None, broadcast_to: Callable[[str], Message]
    ) -> dict[str, Any] | None:
        partition = self._context.partition
        if not self._own_holdout and not all(partition.domain.values()):
            return None  # pooled data has no domain of its own
        method = self._context.method
        if domains is not None and method.kind == "global" and method.predicts_alike and not self._own_holdout:
            # Every client would use the server's model on its own domain, which has just been scored.
            return _client_view({client: domains[domain] for client, domain in partition.domain.items()})
        return _client_view(self._client_scores("personal", round, broadcast_to))

    def _ensemble_scores(self, round: int, members: Sequence["Member"]) -> dict[str, Score]:
        """Per domain, the mean of the members' class probabilities."""
        domains = self._context.dataset.domains
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
        jobs = [Evaluate("global", round, None, domain) for domain in self._context.dataset.domains]
        scores = self._perform([(job, global_model) for job in jobs], Score)
        return {str(job.domain): scores.get(job, _NO_SAMPLES) for job in jobs}

    def _client_scores(
        self, view: View, round: int, broadcast_to: Callable[[str], Message], validates: bool = False
    ) -> dict[str, Score]:
        """Every client's score; where several would use the same model on the same images, it is scored once."""
        clients = self._context.partition.clients
        if self._uses_servers_model(view):
            messages = dict.fromkeys(clients, broadcast_to(clients[0]))
        else:
            messages = {client: broadcast_to(client) for client in clients}
        cases = {client: self._case(view, client, messages[client], validates) for client in clients}
        known = dict(self._lasting)
        new: dict[_Case, str] = {}
        for client, case in cases.items():
            if case not in known:
                new.setdefault(case, client)
        pooled = (validates or self._own_holdout) and not self._engine.scattered
        together = self._together(new, validates) if pooled else [[case] for case in new]
        jobs = {self._job(view, round, [new[case] for case in group], validates): group for group in together if group}
        scores = self._perform([(job, messages[str(job.client)]) for job in jobs], Score)
        for job, group in jobs.items():
            if job in scores:  # else nobody was there to do it
                known.update(zip(group, scores[job].parts or (scores[job],), strict=True))
        self._lasting = {case: score for case, score in known.items() if case.message is None}
        return {client: known.get(case, _NO_SAMPLES) for client, case in cases.items()}

    def _uses_servers_model(self, view: View) -> bool:
        """Whether every client would use the server's model, whatever else its message says."""
        return self._network_decides and view == "personal" and self._context.method.kind == "global"

    def _case(self, view: View, client: str, message: Message, validates: bool) -> "_Case":
        own = validates or self._own_holdout
        test = (client if own else self._context.partition.domain[client], validates)
        if not self._network_decides:
            return _Case(client, message, test, client)
        if self._uses_servers_model(view):
            return _Case(None, message, test)
        model = client if client in self._ever_trained else self._context.architecture_of(client)
        loads = view == "personal" and self._context.method.loads != nothing
        return _Case(model, message if loads else None, test)

    def _together(self, cases: Iterable["_Case"], validates: bool) -> list[list["_Case"]]:
        """Cases whose test sets go through one model together, cut so that there is work for every process.

        Where the cuts are depends on nothing but the partition, and so do the results. Empty test sets are left out.
        """
        by_model: dict[Any, list[list[_Case]]] = {}
        room: dict[Any, int] = {}
        for case in cases:
            size = self._context.test_size(case.test[0], validates)
            if not size:
                continue
            if room.get(case.network, 0) <= 0:
                by_model.setdefault(case.network, []).append([])
                room[case.network] = _SCORED_TOGETHER
            by_model[case.network][-1].append(case)
            room[case.network] -= size
        return [group for groups in by_model.values() for group in groups]

    def _job(self, view: View, round: int, clients: Sequence[str], validates: bool) -> Evaluate:
        own = validates or self._own_holdout
        domain = None if own else self._context.partition.domain[clients[0]]
        return Evaluate(view, round, clients[0], domain, validates, tuple(clients[1:]))

    def _perform(self, jobs: Sequence[tuple[J, Message]], kind: type[R]) -> dict[J, R]:
        """The result of every job but of those that nobody was there to do.

        Any other failure here is ours, not a client's, and ends the run.
        """
        results: dict[Any, R] = {}
        for job, result in self._engine.perform(jobs):
            if isinstance(result, Absent):
                who = getattr(job, "client", None) or getattr(job, "domain", None)
                self._absences.append({"client": str(who), "event": "not evaluated", "reason": result.reason})
                continue
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
        view["pooled"] = _fraction(
            Score(sum(score.correct for score in seen.values()), sum(score.total for score in seen.values()))
        )
        if self._held_out:
            view["held_out"] = {domain: view[domain] for domain in self._held_out}
        return view


def _client_view(scores: Mapping[str, Score]) -> dict[str, Any]:
    values = {client: _fraction(score) for client, score in scores.items()}
    average = _mean(values.values())
    if len(values) <= _LISTED_CLIENTS:
        return {**values, "average": average}
    low, middle, high = quantiles([value for value in values.values() if value is not None], n=4)
    return {"average": average, "quantiles": {"0.25": low, "0.5": middle, "0.75": high}}


def _fraction(score: Score) -> float | None:
    return score.correct / score.total if score.total else None


def _mean(values: Iterable[float | None]) -> float | None:
    """Over those that are known."""
    listed = [value for value in values if value is not None]
    return sum(listed) / len(listed) if listed else None
