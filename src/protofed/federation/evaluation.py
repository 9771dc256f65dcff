"""Both views of a federation: the server's model per domain, and what each client would use, per client."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import quantiles
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from protofed.clients import (
    Absent,
    DiskFailed,
    Evaluate,
    Failed,
    Job,
    Predict,
    Predicted,
    Project,
    Projected,
    RunContext,
    Score,
)
from protofed.errors import UserError
from protofed.federation.engine import Engine
from protofed.federation.predictions import KeptScore, ScoredImages, kept_predictions, together
from protofed.method import Method
from protofed.metrics import ACCURACY, KeptPredictions, find_metric
from protofed.models import nothing
from protofed.records import Message

J = TypeVar("J", bound=Job)
R = TypeVar("R", Score, Predicted, Projected)

_LISTED_CLIENTS = 100
"""Above this many clients only the average and quantiles of the personal view are written."""


_SCORED_TOGETHER = 512
"""Samples of small test sets that go through a model in one job."""

_NO_SAMPLES = Score(0, 0)

_MOST_KEPT = 2**24
"""Probabilities of clients' models that are kept; more are too many for a file beside a run."""

View = Literal["global", "personal", "local"]


@dataclass(frozen=True)
class Member:
    """One model of an ensemble, encoded, and its share in the mean."""

    client: str
    weight: float
    model: Message


class _ScoringKey(NamedTuple):
    """All that decides a client's score; clients with the same key have the same score, so it is computed once."""

    model: str | int | None
    """Whose weights: the server's (None), a client's by name, or by architecture while untrained."""
    message: int | None
    """Identity of the message that is loaded over them; comparing its bytes would cost more than it could save."""
    predictor: str | None
    """The client that predicts, where the method's prediction looks at more than the network."""
    test: tuple[str, bool]
    """The test set: a client's own or a domain's, and whether it is kept from training to validate on."""

    @property
    def network(self) -> tuple[object, ...]:
        """What the test images go through."""
        return self.model, self.message, self.predictor


class Evaluator:
    """Decides which model is scored on which test set, and lays the results out as the contract says."""

    def __init__(self, context: RunContext, engine: Engine) -> None:
        self._context = context
        self._engine = engine
        self._ever_trained: set[str] = set()
        # The default prediction looks at nothing but the network, so the same network gives the same score.
        self._network_decides = type(context.method).predict is Method.predict
        self._cached_scores: dict[_ScoringKey, Score] = {}
        partition = context.partition
        self._own_holdout = any(len(indices) for indices in partition.holdout.values())
        self._held_out = partition.held_out
        self._absences: list[dict[str, str]] = []
        self._images = ScoredImages(context)
        self._kept: dict[str, Mapping[str, Score]] | None = None

    @property
    def personal_test(self) -> str:
        """Which test set the personal view uses, for run.json."""
        return "own hold-out" if self._own_holdout else "own domain's test set"

    def trained(self, clients: Iterable[str]) -> None:
        """These clients' own models may have changed; the cached scores of the others still hold."""
        changed = set(clients)
        self._ever_trained |= changed
        self._cached_scores = {key: score for key, score in self._cached_scores.items() if key.model not in changed}

    def absences(self) -> list[dict[str, str]]:
        """Clients that did not answer since the last call, as events of a round."""
        absences, self._absences = self._absences, []
        return absences

    def evaluate(
        self,
        round: int,
        global_model: Message | None,
        broadcast_to: Callable[[str], Message],
        members: Sequence["Member"] = (),
        local: bool = False,
        keep: bool = False,
    ) -> dict[str, Any]:
        """Accuracy in every view that makes sense for the method; null where one does not.

        Where there are members, the global view is that of their ensemble. With `keep` the class probabilities of all
        test images can be asked for (`predictions`) until the next evaluation.
        """
        self._kept = {} if keep else None
        domains: dict[str, Score] | None = None
        # Where test images are dealt out, too, the only tests are the clients' own.
        tested = any(len(domain.test) for domain in self._context.dataset.domains.values())
        if members and tested:
            domains = self._ensemble_scores(round, members)
        elif global_model is not None and tested:
            domains = self._domain_scores(round, global_model)
        accuracy: dict[str, Any] = {
            "global": None if domains is None else global_view(domains, self._held_out),
            "personal": self._personal_view(round, None if members else domains, broadcast_to, global_model),
        }
        if keep and domains is not None:
            self._kept = {"global": domains, **(self._kept or {})}
        if local:
            accuracy["local"] = client_view(self._client_scores("local", round, broadcast_to))
        return accuracy

    @property
    def validates(self) -> bool:
        """Whether some client keeps images from training to validate on."""
        context = self._context
        return bool(context.validation) and any(context.test_size(name, True) for name in context.partition.clients)

    def predictions(self) -> KeptPredictions | None:
        """What the last evaluation kept; None where that is nothing."""
        return None if self._kept is None else kept_predictions(self._context, self._kept, self._own_holdout)

    def validate(self, round: int, broadcast_to: Callable[[str], Message], metric: str = ACCURACY) -> float | None:
        """A metric of what clients would use now on what they keep from training; None where they keep nothing."""
        if not self._context.validation:
            return None
        if metric != ACCURACY:
            kept = self._client_scores("personal", round, broadcast_to, validates=True, keep=True)
            validated = together(self._images, kept)
            return None if validated is None else find_metric(metric).of(validated)
        scores = self._client_scores("personal", round, broadcast_to, validates=True).values()
        total = sum(score.total for score in scores)
        return sum(score.correct for score in scores) / total if total else None

    def project(self, round: int, broadcast_to: Callable[[str], Message]) -> dict[str, Any]:
        """Let every client project its part prototypes; the accuracy of each client's model before and after."""
        domain = self._context.tested_on
        jobs = [
            Project(round, client, None if self._own_holdout else domain[client])
            for client in self._context.partition.clients
        ]
        done = self._perform([(job, broadcast_to(job.client)) for job in jobs], Projected)
        return {
            when: client_view({job.client: getattr(done[job], when) for job in jobs if job in done})
            for when in ("before", "after")
        }

    def _personal_view(
        self,
        round: int,
        domains: dict[str, Score] | None,
        broadcast_to: Callable[[str], Message],
        global_model: Message | None,
    ) -> dict[str, Any] | None:
        tested_on = self._context.tested_on
        if not self._own_holdout and not all(tested_on.values()):
            return None
        method = self._context.method
        if domains is not None and method.kind == "global" and method.predicts_alike and not self._own_holdout:
            # Every client would use the server's model on its own domain, which has just been scored.
            scores = {client: domains[domain] for client, domain in tested_on.items()}
        elif global_model is not None and self._uses_servers_model("personal") and not self._engine.scattered:
            # The model that is saved, which need not be the one that is sent.
            scores = self._client_scores("global", round, lambda _: global_model, keep=self._kept is not None)
        else:
            scores = self._client_scores("personal", round, broadcast_to, keep=self._kept is not None)
        if self._kept is not None:
            self._kept["personal"] = scores
        return client_view(scores)

    def _ensemble_scores(self, round: int, members: Sequence["Member"]) -> dict[str, Score]:
        """Per domain, the mean of the members' class probabilities."""
        domains = self._context.dataset.domains
        jobs = [(Predict(round, name, member.client), member.model) for name in domains for member in members]
        predicted = self._perform(jobs, Predicted)
        scores: dict[str, Score] = {}
        for name, domain in domains.items():
            mean = sum(
                member.weight * predicted[Predict(round, name, member.client)].probabilities for member in members
            )
            correct = int((np.asarray(mean).argmax(1) == domain.test.y.numpy()).sum())
            scores[name] = KeptScore(correct, len(domain.test), probabilities=np.asarray(mean))
        return scores

    def _domain_scores(self, round: int, global_model: Message) -> dict[str, Score]:
        jobs = [Evaluate("global", round, None, domain) for domain in self._context.dataset.domains]
        scores = self._scored([(job, global_model) for job in jobs], keep=self._kept is not None)
        return {str(job.domain): scores.get(job, _NO_SAMPLES) for job in jobs}

    def _client_scores(
        self,
        view: View,
        round: int,
        broadcast_to: Callable[[str], Message],
        validates: bool = False,
        keep: bool = False,
    ) -> dict[str, Score]:
        """Every client's score; where several would use the same model on the same images, it is scored once."""
        messages = self._messages(view, broadcast_to)
        keys = {client: self._scoring_key(view, client, message, validates) for client, message in messages.items()}
        scores = {} if keep else dict(self._cached_scores)
        missing = {key: client for client, key in reversed(keys.items()) if key not in scores}
        jobs = self._jobs(view, round, dict(reversed(missing.items())), validates)
        results = self._scored([(job, messages[str(job.client)]) for job in jobs], keep and self._few_enough(jobs))
        for job, result in results.items():  # an absent client has none
            scores.update(zip(jobs[job], result.parts or (result,), strict=True))
        self._cached_scores = {key: score for key, score in scores.items() if key.message is None}
        return {client: scores.get(key, _NO_SAMPLES) for client, key in keys.items()}

    def _scored(self, jobs: Sequence[tuple[Evaluate, Message]], keep: bool) -> dict[Evaluate, Score]:
        """The score of every job whose client answered, with its probabilities where they are to be kept."""
        if not keep:
            return self._perform(jobs, Score)
        predicted = self._perform([(replace(job, probabilities=True), message) for job, message in jobs], Predicted)
        plain = {replace(job, probabilities=False): result.probabilities for job, result in predicted.items()}
        return {job: self._images.score(job, probabilities) for job, probabilities in plain.items()}

    def _few_enough(self, jobs: Iterable[Evaluate]) -> bool:
        """Whether what the jobs predict is no more than can be kept."""
        images = sum(sum(self._images.sizes(job)) for job in jobs)
        return images * len(self._context.dataset.classes) <= _MOST_KEPT

    def _messages(self, view: View, broadcast_to: Callable[[str], Message]) -> dict[str, Message]:
        """What each client would be sent; one message for all where it makes no difference."""
        clients = self._context.partition.clients
        if self._uses_servers_model(view):
            return dict.fromkeys(clients, broadcast_to(clients[0]))
        return {client: broadcast_to(client) for client in clients}

    def _uses_servers_model(self, view: View) -> bool:
        """Whether every client would use the server's model, whatever else the message holds."""
        return self._network_decides and view != "local" and self._context.method.kind == "global"

    def _scoring_key(self, view: View, client: str, message: Message, validates: bool) -> _ScoringKey:
        own = validates or self._own_holdout
        test = (client if own else self._context.tested_on[client], validates)
        if not self._network_decides:
            return _ScoringKey(client, id(message), client, test)
        if self._uses_servers_model(view):
            return _ScoringKey(None, id(message), None, test)
        model = client if client in self._ever_trained else self._context.architecture_of(client)
        loads = view == "personal" and self._context.method.loads != nothing
        return _ScoringKey(model, id(message) if loads else None, None, test)

    def _jobs(
        self, view: View, round: int, clients: Mapping[_ScoringKey, str], validates: bool
    ) -> dict[Evaluate, Sequence[_ScoringKey]]:
        """One job per key, for any client that has it; small test sets share a job."""
        own = validates or self._own_holdout
        share = own and not self._engine.scattered
        jobs: dict[Evaluate, Sequence[_ScoringKey]] = {}
        for group in self._group_by_network(clients) if share else [[key] for key in clients]:
            first, *others = (clients[key] for key in group)
            domain = None if own else self._context.tested_on[first]
            jobs[Evaluate(view, round, first, domain, validates, tuple(others))] = group
        return jobs

    def _group_by_network(self, keys: Iterable[_ScoringKey]) -> list[list[_ScoringKey]]:
        """Keys whose test sets go through one network together, cut so that there is work for every process.

        Where the cuts are depends on nothing but the partition, and so do the results. Empty test sets are left out.
        """
        groups: dict[object, list[list[_ScoringKey]]] = {}
        capacity: dict[object, int] = {}
        for key in keys:
            size = self._context.test_size(*key.test)
            if not size:
                continue
            if capacity.get(key.network, 0) <= 0:
                groups.setdefault(key.network, []).append([])
                capacity[key.network] = _SCORED_TOGETHER
            groups[key.network][-1].append(key)
            capacity[key.network] -= size
        return [group for of_network in groups.values() for group in of_network]

    def _perform(self, jobs: Sequence[tuple[J, Message]], kind: type[R]) -> dict[J, R]:
        """The result of every job whose client answered.

        Any other failure here is ours, not a client's, and ends the run.
        """
        results: dict[Any, R] = {}
        for job, result in self._engine.perform(jobs):
            if isinstance(result, Absent):
                subject = getattr(job, "client", None) or getattr(job, "domain", None)
                self._absences.append({"client": str(subject), "event": "not evaluated", "reason": result.reason})
                continue
            if isinstance(result, DiskFailed):
                raise UserError(result.reason)
            if not isinstance(result, kind):
                assert isinstance(result, Failed)
                raise RuntimeError(f"{job} failed: {result.reason}\n{result.trace}")
            results[job] = result
        return results


def global_view(scores: Mapping[str, Score], held_out: Sequence[str]) -> dict[str, Any]:
    """Per domain, their plain mean, and over all samples together; held-out domains count apart."""
    trained_on = {domain: score for domain, score in scores.items() if domain not in held_out}
    view: dict[str, Any] = {domain: _fraction(score) for domain, score in scores.items()}
    view["average"] = _mean(_fraction(score) for score in trained_on.values())
    view["pooled"] = _fraction(
        Score(sum(score.correct for score in trained_on.values()), sum(score.total for score in trained_on.values()))
    )
    if held_out:
        view["held_out"] = {domain: view[domain] for domain in held_out}
    return view


def client_view(scores: Mapping[str, Score]) -> dict[str, Any]:
    """Per client and their plain mean; of many clients the mean and quantiles."""
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
