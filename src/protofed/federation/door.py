"""The one door through which clients' answers come in, whatever engine they run on.

What a client answers is what it chose to send. Here it is held against what was asked, against the census and against
what a record of the run can be. Whatever does not pass leaves out the client it came from, with a short reason that is
safe to print; nothing of it reaches the others, the files or the terminal.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from protofed.clients import (
    Absent,
    Evaluate,
    Failed,
    Job,
    Predicted,
    Prepared,
    Project,
    Projected,
    Result,
    Score,
    Summarise,
    Train,
    Trained,
    TrainedGroup,
    TrainGroup,
)
from protofed.clients.wire import LONGEST_NAME, MOST_LOSSES
from protofed.errors import BadMessage
from protofed.federation.engine import Engine
from protofed.records import ClassTable, Mean, Message, Record, decode, encode, parts_of
from protofed.text import printable

LARGEST = 1e18
"""No number of an upload is larger: its square would not be finite in float32, and no network computes with it."""
_LARGEST_LOSS = 1e30
_ROUNDING = 1.0 + 1e-4
"""Counts travel in float32, and sums of them are rounded."""
_DEVIATIONS = 12
"""So many standard deviations of its noise a count may be off; an honest one is never farther."""
_SEEN = 4
"""Samples that are drawn at random may be more than expected, but not so many times."""
_SPARE_ROWS = 1024
_SPARE_BYTES = 2**20


class Door:
    """An engine whose answers are checked: each job is answered once, by what was asked for or by why it is not."""

    def __init__(self, engine: Engine, prepared: Prepared) -> None:
        self.name, self.workers = engine.name, getattr(engine, "workers", 1)
        self.scattered = getattr(engine, "scattered", False)
        self.trains_groups = getattr(engine, "trains_groups", False)
        self._engine = engine
        self._context, self._templates = prepared.context, prepared.templates

    def perform(self, jobs: Sequence[tuple[Job, Message]]) -> Iterator[tuple[Job, Result]]:
        """The answers as they come; what nobody asked for, or has answered already, is dropped."""
        open_jobs = dict.fromkeys(job for job, _ in jobs)
        for job, result in self._engine.perform(jobs):
            if job in open_jobs:
                del open_jobs[job]
                yield job, self._checked(job, result)
        for job in open_jobs:
            yield job, refused(job, "it gave no answer")

    def close(self) -> None:
        """Stop all processes that the engine started."""
        self._engine.close()

    def upload(self, client: str, round: int, blob: bytes) -> Record:
        """What a client has uploaded in a round; BadMessage where it cannot be used."""
        self._refuse_long(client, blob)
        try:
            upload = decode(blob, self._templates.upload, client, self._context.guard.quantise, LARGEST)
            self._refuse_claims(client, round, upload)
        except (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
            # Nothing of the kind is known; whatever it is, it came with this upload.
            raise BadMessage(f"{client}: the upload cannot be read ({type(error).__name__})") from error
        return upload

    def _checked(self, job: Job, result: Any) -> Result:
        if isinstance(result, Failed):
            return replace(result, reason=printable(result.reason))
        try:
            self._check(job, result)
        except BadMessage as problem:
            return refused(job, str(problem))
        return result  # type: ignore[no-any-return]

    def _check(self, job: Job, result: Any) -> None:
        """BadMessage where a result cannot be that of the job."""
        if isinstance(job, Train | Summarise):
            self._check_trained(job, _of_kind(result, Trained))
        elif isinstance(job, TrainGroup):
            if len(_of_kind(result, TrainedGroup).each) != len(job.clients):
                raise BadMessage("it answers for clients it was not asked about")
            for client, one in zip(job.clients, result.each, strict=True):
                if isinstance(one, Trained):
                    self._check_trained(Train(job.round, client), one)
        elif isinstance(job, Evaluate):
            self._check_evaluated(job, result)
        elif isinstance(job, Project):
            _of_kind(result, Projected)
            for score in (result.before, result.after):
                self._check_score(score, [self._test_size(job.domain, job.client)])
        else:
            self._check_probabilities(_of_kind(result, Predicted), self._test_size(job.domain, None))

    def _check_evaluated(self, job: Evaluate, result: Any) -> None:
        sizes = self._test_sizes(job)
        if job.probabilities:
            self._check_probabilities(_of_kind(result, Predicted), sum(sizes))
        else:
            self._check_score(_of_kind(result, Score), sizes)

    def _check_trained(self, job: Train | Summarise, result: Trained) -> None:
        most = self._most_samples(job)
        if type(result.samples) is not int or not 0 <= result.samples <= most:
            raise BadMessage(f"it claims {result.samples!r} samples, but has at most {most}")
        if len(result.loss) > MOST_LOSSES:
            raise BadMessage(f"it reports {len(result.loss)} losses")
        for name, value in result.loss.items():
            if not name.isprintable() or len(name) > LONGEST_NAME:
                raise BadMessage(f"it reports a loss named {name[:LONGEST_NAME]!r}")
            if math.isfinite(value) and abs(value) > _LARGEST_LOSS:
                raise BadMessage(f"it reports a loss of {value:.1e}")

    def _most_samples(self, job: Train | Summarise) -> int:
        """How many samples a client can have trained on in a round, at most."""
        size, plan = self._context.sizes[job.client], self._context.plan
        if isinstance(job, Summarise):
            return size
        return _SEEN * (plan.epochs[job.round] * (plan.batch if plan.unit == "steps" else size) + plan.batch)

    def _check_score(self, score: Score, sizes: list[int]) -> None:
        """A score on as many samples as the test sets have, client by client where there are several."""
        parts = score.parts or (score,)
        told = [part.total for part in parts]
        if told != sizes or score.total != sum(sizes):
            raise BadMessage(f"it scores {_few(told)} samples instead of {_few(sizes)}")
        if any(not 0 <= part.correct <= part.total for part in (score, *parts)):
            raise BadMessage("its score is not a valid score")

    def _test_sizes(self, job: Evaluate) -> list[int]:
        if job.domain is not None:
            return [self._test_size(job.domain, None)]
        return [self._context.test_size(client, job.validates) for client in (str(job.client), *job.alike)]

    def _test_size(self, domain: str | None, client: str | None) -> int:
        if domain is not None:
            return len(self._context.dataset.domains[domain].test)
        return self._context.test_size(str(client))

    def _check_probabilities(self, result: Predicted, images: int) -> None:
        expected = (images, len(self._context.dataset.classes))
        if result.probabilities.shape != expected:
            raise BadMessage(f"its probabilities are not {expected[0]}x{expected[1]} numbers")

    @cached_property
    def _example(self) -> tuple[int, int]:
        """How many bytes an upload has, and how many a further row of its tables takes."""
        template = self._templates.upload
        return len(encode(template, "template").blob), _row_bytes(template)

    def _refuse_long(self, client: str, blob: bytes) -> None:
        """No more bytes than a record of the run can have, with a row for each of the client's samples."""
        known, row = self._example
        longest = 2 * known + _SPARE_BYTES + row * (self._context.sizes[client] + _SPARE_ROWS)
        if len(blob) > longest:
            raise BadMessage(f"{client}: the upload has {len(blob)} bytes, at most {longest} are expected")

    def _refuse_claims(self, client: str, round: int, upload: Record) -> None:
        """Sample counts and weights are claims; the census says how large they can be."""
        context = self._context
        at = context.at(round, client)
        for name, item in parts_of(upload).items():
            if isinstance(item.value, ClassTable):
                most = self._most_counted(client, len(item.value.count))
                _refuse_more(client, name, "samples", float(item.value.count.double().sum()), most)
            if isinstance(item, Mean):
                weight = torch.as_tensor(item.weight, dtype=torch.float64)
                heaviest = context.method.largest_weight(at)
                most = heaviest if weight.ndim == 0 else self._most_counted(client, len(weight))
                _refuse_more(client, name, "a weight", float(weight.sum()), most)

    def _most_counted(self, client: str, classes: int) -> float:
        """How many samples the rows of a table can stand for, with the noise that a guard adds to each count."""
        context, guard = self._context, self._context.guard
        plan, size = context.plan, context.sizes[client]
        passed = max(plan.epochs) * plan.batch if plan.unit == "steps" else 0
        counted = float(max(size, passed))
        if not guard.noisy:
            return counted
        tables = len(parts_of(self._templates.upload))
        deviation = max(guard.effective_row_noise, guard.noise) * math.sqrt(2 * tables)
        return counted + classes * (1 + _DEVIATIONS * deviation)


def _of_kind(result: Any, kind: type[Any]) -> Any:
    if not isinstance(result, kind):
        raise BadMessage("it answers another question")
    return result


def refused(job: Job, reason: str, not_finite: bool = False) -> Failed:
    """The answer that stands for one that cannot be used.

    Who trains is left out; who is only scored is absent, and the run goes on without the score.
    """
    kind = Failed if isinstance(job, Train | TrainGroup | Summarise) else Absent
    return kind(printable(reason), not_finite=not_finite)


def _refuse_more(client: str, field: str, what: str, claimed: float, most: float) -> None:
    if not claimed <= most * _ROUNDING:
        raise BadMessage(
            f"{client}: field {field!r} claims {what} of {claimed:.4g}, but at most {most:.4g} is possible"
        )


def _row_bytes(record: Any) -> int:
    """Bytes of one row of every field that may have as many rows as its sender chose."""
    if not isinstance(record, Record):
        return 0
    parts = record.wire_template()
    free = [part for name, part in parts.items() if name in record.free_rows]
    own: int = sum(math.prod(part.shape[1:]) * part.element_size() for part in free)
    return own + sum(_row_bytes(part) for part in parts.values())


def _few(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers[:5]) + (", ..." if len(numbers) > 5 else "")
