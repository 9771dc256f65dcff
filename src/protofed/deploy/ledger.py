"""A site's own account of what it has given away, on its own disk, whatever the server says.

    ledger.jsonl              one line for each answer that depends on the images: run, round, kind, hash, epsilon
    runs/RUN/answers/         the answers of the round in hand, sealed: asked again, the site sends the same bytes

An answer is on disk before it leaves, and so a site that is killed at any moment never answers a round twice with
different noise. A round that is over is not answered again. What all runs together may cost is in the policy.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from protofed.deploy.policy import Policy, Refused
from protofed.system import write_atomically

_FILE = "ledger.jsonl"
_TERMS = "terms"

EpsilonOf = Callable[[Sequence[int]], float | None]
"""What a run has cost after these rounds (from 0); None where it promises nothing."""


@dataclass(frozen=True)
class Budget:
    """What a site has spent so far, over all runs."""

    rounds: int
    epsilon: float | None
    """The sum over runs; None where one of them promised nothing."""
    delta: float

    def in_words(self, policy: Policy) -> str:
        """For the console."""
        cost = "no epsilon is guaranteed" if self.epsilon is None else f"epsilon {self.epsilon:.2f}"
        if policy.epsilon is not None:
            cost += f" of {policy.epsilon:g}"
        rounds = f"{self.rounds} rounds" + (f" of {policy.total_rounds}" if policy.total_rounds is not None else "")
        return f"{cost}, {rounds} in all"


class SiteLedger:
    """All answers of a site, in all runs; nothing is answered that is not in it."""

    def __init__(self, state: Path, policy: Policy) -> None:
        self._path = state / _FILE
        self._policy = policy
        self._lines = list(self._read())

    def run(self, run: str, folder: Path, epsilon_of: EpsilonOf, delta: float) -> "RunLedger":
        """The account of one run."""
        return RunLedger(self, self._policy, run, folder, epsilon_of, delta)

    def budget(self) -> Budget:
        """What has been spent over all runs; epsilons and deltas of different runs add up."""
        uploads = [line for line in self._lines if line["kind"] == "train"]
        last = {line["run"]: line for line in uploads}
        costs = [line["epsilon"] for line in last.values()]
        known = [float(cost) for cost in costs if cost is not None]
        delta = sum(float(line["delta"]) for line in last.values())
        return Budget(len(uploads), sum(known) if len(known) == len(costs) else None, delta)

    def of_run(self, run: str) -> list[dict[str, Any]]:
        """The lines of a run."""
        return [line for line in self._lines if line["run"] == run]

    def append(self, line: dict[str, Any]) -> None:
        """Write a line, and see to it that it is on the disk."""
        with self._path.open("ab") as file:
            if file.tell() and not self._ends_whole():
                file.write(b"\n")  # of a site that was killed in the middle of one
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._path.chmod(0o600)
        self._lines.append(line)

    def _ends_whole(self) -> bool:
        return self._path.read_bytes().endswith(b"\n")

    def _read(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        for text in self._path.read_bytes().splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue  # cut off by a kill: its answer was sealed, and is entered when it is sent
            if isinstance(line, dict) and {"run", "round", "kind", "sha256", "epsilon", "delta"} <= line.keys():
                yield line


class RunLedger:
    """The answers of one run: those that have left, and those that are kept to be sent again."""

    def __init__(
        self, ledger: SiteLedger, policy: Policy, run: str, folder: Path, epsilon_of: EpsilonOf, delta: float
    ) -> None:
        self._ledger, self._policy = ledger, policy
        self._run, self._epsilon_of, self._delta = run, epsilon_of, delta
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)

    def hold_to(self, terms: dict[str, Any]) -> None:
        """Refuse terms other than those the run began with: what earlier rounds have cost depends on them."""
        digest = hashlib.sha256(json.dumps(terms, sort_keys=True).encode()).hexdigest().encode()
        began = self._sealed(_TERMS)
        if began is None:
            self._seal(_TERMS, digest)
        elif began != digest:
            raise Refused("the options of the run differ from those it started with")

    def state_of(self, round: int) -> Path:
        """Where the client's state after the training of a round is kept beside the answer."""
        return self._folder / f"state-{round}"

    def upload(self, round: int, make: Callable[[], bytes | None]) -> bytes | None:
        """The one answer to the training of a round, sealed or made now; None where it fails, which costs nothing."""
        kept = self._sealed(_upload_name(round))
        if kept is not None:
            self._enter("train", round, kept)
            return kept
        self._refuse_beyond(round)
        self._forget_before(round)
        answer = make()
        if answer is not None:
            self._seal(_upload_name(round), answer)
            self._enter("train", round, answer)
        return answer

    def score(self, kind: str, round: int, question: bytes, make: Callable[[], bytes | None]) -> bytes | None:
        """The answer to any other question about a round: the same one for the same question."""
        name = f"{kind}-{round}-{hashlib.sha256(question).hexdigest()}"
        kept = self._sealed(name)
        if kept is not None:
            return kept
        self._refuse_older(round)
        asked = sum(line["kind"] != "train" and line["round"] == round + 1 for line in self._ledger.of_run(self._run))
        if asked >= self._policy.evaluations:
            raise Refused(f"its policy allows {self._policy.evaluations} evaluations per round, and all are used")
        answer = make()
        if answer is not None:
            self._seal(name, answer)
            self._enter(kind, round, answer)
        return answer

    def spent(self) -> dict[str, Any]:
        """What this run has cost."""
        rounds = self._rounds()
        return {"rounds": len(rounds), "epsilon": self._epsilon_of(rounds) if rounds else 0.0, "delta": self._delta}

    def _rounds(self) -> list[int]:
        """The rounds of the run whose uploads have left, once for each different upload."""
        uploads = {
            (line["round"], line["sha256"]) for line in self._ledger.of_run(self._run) if line["kind"] == "train"
        }
        return sorted(round - 1 for round, _ in uploads)

    def _refuse_beyond(self, round: int) -> None:
        """Refuse an upload that the budget has no room for."""
        policy, rounds, budget = self._policy, self._rounds(), self._ledger.budget()
        self._refuse_older(round)
        if round in rounds:
            raise Refused(f"it has already answered round {round + 1}, and the answer is no longer kept")
        if policy.rounds is not None and max(len(rounds), round) >= policy.rounds:
            raise Refused(f"its policy allows {policy.rounds} rounds per run, and all are used")
        if policy.total_rounds is not None and budget.rounds >= policy.total_rounds:
            raise Refused(f"its policy allows {policy.total_rounds} rounds in total, and all are used")
        if policy.epsilon is None:
            return
        after = self._epsilon_of([*rounds, round])
        now = self._epsilon_of(rounds) if rounds else 0.0
        if after is None or now is None or budget.epsilon is None:
            raise Refused("its policy has a budget of epsilon, but no epsilon is known for what was or would be sent")
        total = budget.epsilon - now + after
        if total > policy.epsilon:
            raise Refused(
                f"its budget is epsilon {policy.epsilon:g}, of which {budget.epsilon:.3g} is spent; "
                f"round {round + 1} would make it {total:.3g}"
            )

    def _refuse_older(self, round: int) -> None:
        rounds = self._rounds()
        if rounds and round < rounds[-1]:
            raise Refused(f"it is already at round {rounds[-1] + 1}, and no longer answers round {round + 1}")

    def _enter(self, kind: str, round: int, answer: bytes) -> None:
        """Write an answer into the ledger, once."""
        digest = hashlib.sha256(answer).hexdigest()
        entry = (kind, round + 1, digest)
        if any((line["kind"], line["round"], line["sha256"]) == entry for line in self._ledger.of_run(self._run)):
            return
        rounds = [*self._rounds(), round] if kind == "train" else self._rounds()
        self._ledger.append(
            {
                "time": datetime.now(UTC).isoformat(timespec="seconds"),
                "run": self._run,
                "round": round + 1,
                "kind": kind,
                "bytes": len(answer),
                "sha256": digest,
                "epsilon": self._epsilon_of(rounds) if rounds else 0.0,
                "delta": self._delta,
            }
        )

    def _sealed(self, name: str) -> bytes | None:
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def _seal(self, name: str, answer: bytes) -> None:
        path = self._folder / name
        write_atomically(path, answer)
        path.chmod(0o600)
        with path.open("rb") as file:
            os.fsync(file.fileno())

    def _forget_before(self, round: int) -> None:
        """A later round begins: earlier ones are answered no more."""
        for path in self._folder.iterdir():
            number = path.name.split("-")[1] if "-" in path.name else ""
            if number.isdecimal() and int(number) < round:
                path.unlink()


def _upload_name(round: int) -> str:
    return f"train-{round}"
