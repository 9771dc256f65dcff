"""Checks that every method must pass, for authors of new ones: `check_method(MyMethod)`. Also the toy data they run on.

from protofed.testing import check_method

def test_my_method():
    check_method(MyMethod)
    check_method(MyMethod, model="resnet10", **{"model.width": 4, "my_knob": 0.5})
"""

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load
from torch import Tensor

from protofed.clients import Job, Result, Train, Trained
from protofed.engines.loop import LoopEngine
from protofed.federation import Federation, RoundPolicy, RunFolder
from protofed.method import Method
from protofed.records import Message, Record, Tally, decode, encode
from protofed.records.types import LabelledRows
from protofed.registry import knobs, make_method, registered
from protofed.runs import Run, run
from protofed.runs.assembly import assemble
from protofed.runs.options import make_options

_BRIGHTEST_TRAINING_PIXEL, _MARK_OF_TEST_IMAGES = 200, 255
_ROUNDS = 2


def check_method(method: type[Method], *, model: str = "mlp", engine: str = "loop", **settings: object) -> None:
    """Raise an AssertionError that says what is wrong with a method, if anything.

    The method runs in small federations on toy images: with clients that lack classes, that hold a single class or one
    sample of each, that sit out rounds, and with a single client. Everything it sends must survive encoding, contain
    no image, and lead to the same result whatever the order of arrival; a run that is stopped and resumed must equal
    an uninterrupted one. `settings` are those of `--set`, including `model.KEY` and `data.KEY`.
    """
    _check_description(method, settings)
    with tempfile.TemporaryDirectory(prefix="protofed-check-") as folder:
        if model == "mlp":
            settings = {"model.hidden": 16, **settings}
        trial = _Trial(method, Path(folder), {"model": model, "engine": engine, "set": settings})
        trial.check_exchange()
        trial.check_repetition_and_resume()
        trial.check_odd_clients()


def toy_data(
    folder: Path,
    domains: Iterable[str] = ("a", "b", "c"),
    *,
    classes: int = 4,
    train: int | Mapping[str, int] = 24,
    test: int = 12,
    size: int = 8,
    channels: int = 1,
    absent: Mapping[str, Iterable[int]] | None = None,
    labels: Mapping[str, Iterable[int]] | None = None,
    seed: int = 0,
) -> str:
    """Write one npz file per domain and return the folder, ready for `data=`.

    A class is a pattern and a domain a brightness, so that a few steps of training show. `absent` names classes of
    which a domain has no training image; `labels` gives a domain's training labels outright. The first pixel of every
    test image is white, of no training image.
    """
    rng = np.random.default_rng(seed)
    patterns = rng.integers(0, 120, (classes, size, size, channels))
    folder.mkdir(parents=True, exist_ok=True)

    def pictures(y: NDArray[np.int64], brightness: int) -> NDArray[np.uint8]:
        noise = rng.integers(0, 50, (len(y), size, size, channels))
        return (patterns[y] + noise + brightness).clip(0, _BRIGHTEST_TRAINING_PIXEL).astype(np.uint8)

    for position, domain in enumerate(domains):
        held = [k for k in range(classes) if k not in set((absent or {}).get(domain, ()))]
        count = train[domain] if isinstance(train, Mapping) else train
        given = (labels or {}).get(domain)
        y_train = np.array(list(given) if given is not None else [held[i % len(held)] for i in range(count)])
        y_test = np.arange(test) % classes
        x_train, x_test = pictures(y_train, 10 * position), pictures(y_test, 10 * position)
        x_test[:, 0, 0] = _MARK_OF_TEST_IMAGES
        np.savez(
            folder / f"{domain}.npz",
            x_train=x_train,
            y_train=y_train,
            x_test=x_test,
            y_test=y_test,
            classes=np.array([f"class{k}" for k in range(classes)]),
        )
    return str(folder)


def results_of(path: str | Path) -> dict[str, Any]:
    """Everything a run leaves behind that must not depend on engine, time or interruptions, file by file."""
    folder = Path(path)
    found: dict[str, Any] = {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}
    found.update({f"clients/{file.name}": file.read_bytes() for file in (folder / "clients").iterdir()})
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    found["rounds.jsonl"] = [{key: value for key, value in line.items() if key != "seconds"} for line in lines]
    return found


def _check_description(method: type[Method], settings: Mapping[str, object]) -> None:
    """It can be made without settings, and describes itself."""
    name = method.__name__
    with _checking(f"{name} cannot be constructed with its defaults"):
        method()
    # A dataclass without a docstring is given its signature for one.
    explained = not (method.__doc__ or f"{name}(").startswith(f"{name}(")
    assert explained, f"{name} has no docstring; say in a sentence what it does"
    assert method.paper, f"{name} does not say where it comes from; set `paper` (or say that it is new)"
    for knob in knobs(method):
        assert knob.description, f"{name}.{knob.name} has no description; write knob('what it does', default=...)"
        with _checking(f"the default of {name}.{knob.name} is not one of its valid values"):
            make_method(method, {knob.name: knob.default})
    for preset in method.presets:
        with _checking(f"the preset {preset} of {name} cannot be used"):
            make_method(method, {}, preset)
    with _checking(f"{name} does not take these settings"):
        make_method(method, {key: value for key, value in settings.items() if "." not in key})


class _Stop(Exception):
    """Ends a run between two rounds."""


class _StopAfterFirstRound:
    """A callback that does so."""

    def round_end(self, run: Run, record: dict[str, Any]) -> None:
        raise _Stop


@dataclass
class _Trial:
    """One method on toy data."""

    method: type[Method]
    folder: Path
    options: dict[str, Any]

    def check_exchange(self) -> None:
        """Two rounds in which everything that is sent and seen is looked at."""
        data = toy_data(self.folder / "data", absent={"a": [3], "b": [0, 1]})
        recording = _Recording()
        spy = _spy(self.method, recording)
        with _checking(f"{self.method.__name__} fails in an ordinary federation"), registered(spy) as name:
            folder = RunFolder(self.folder / "exchange")
            options = {**self._defaults(), **self.options, "engine": "loop", "method": name, "data": data}
            assembly = assemble(make_options(options), folder.clients)
            prepared = assembly.prepared
            context, templates = prepared.context, prepared.templates
            engine = _Recorder(LoopEngine(prepared), recording)
            folder.create()
            recording.inputs.clear()  # what the rehearsal showed was blank
            federation = Federation(prepared, engine, folder, RoundPolicy())
            records = list(federation.rounds())
            folder.release()
        self._refuse_trouble(records, "in an ordinary federation")

        normalised = context.dataset.normalise
        limit = normalised(torch.full((1, 1, 1, 1), _BRIGHTEST_TRAINING_PIXEL, dtype=torch.uint8), context.dtype)
        brightest = max(float(x[:, 0, 0, 0].max()) for x in recording.inputs)
        assert brightest < float(limit) + 1e-3, f"{self.method.__name__} has seen test data"
        pool = context.dataset.pooled_train().x[:]
        images = torch.cat([forms.double().flatten(1) for forms in (pool, pool / 255, normalised(pool, context.dtype))])
        for what, messages in (("broadcast", recording.broadcasts), ("upload", recording.uploads)):
            for (round, client), message in messages.items():
                for leaf, tensor in load(message).items():
                    assert not _holds_a_row_of(tensor, images), (
                        f"the {what} of {client} in round {round + 1} contains a training image, in {leaf}"
                    )
        for (_, client), message in recording.uploads.items():
            again = encode(decode(message, templates.upload, client), client)
            assert again.blob == message, f"the upload of {client} changes when it is decoded and encoded"
        for server, at, result in recording.aggregations:
            blob = encode(result, "server").blob
            back = encode(decode(blob, templates.server, "server"), "server")
            assert back.blob == blob, "the server's state changes when it is stored and read"
            tally = Tally()
            for client in reversed(at.participants):
                tally.add(client, decode(recording.uploads[at.round, client], templates.upload, client))
            difference = _difference(result, context.method.aggregate(server, tally.total(), at))
            assert not difference, f"aggregate depends on the order in which uploads arrive: {difference}"

    def check_repetition_and_resume(self) -> None:
        """The same seed gives the same bits, also when the run is stopped and resumed."""
        data = str(self.folder / "data")
        with _checking(f"{self.method.__name__} fails when it is stopped and resumed"):
            straight = self._run("straight", data)
            with suppress(_Stop), registered(self.method) as name:
                self._start("stopped", data, name, callbacks=[_StopAfterFirstRound()])
            with registered(self.method):
                run(out=self.folder / "stopped", resume=True)
        differs = _differing(straight.path, self.folder / "stopped")
        if differs:
            again = _differing(straight.path, self._run("again", data).path)
            assert not again, f"two runs with the same seed differ in {', '.join(again)}; draw only from the given rng"
        assert not differs, (
            f"a run that is stopped and resumed differs from an uninterrupted one in {', '.join(differs)}"
        )

    def check_odd_clients(self) -> None:
        """Clients as they are in the world."""
        one_of_each, one_class = {"a": range(4)}, {"a": [2] * 10}
        for what, options, extra in (
            ("with one client", {"domains": ["only"]}, {}),
            ("with a client that holds one sample of each class", {"labels": one_of_each}, {}),
            ("with a client that holds a single class", {"labels": one_class}, {}),
            ("when clients sit out rounds", {}, {"participation": 0.5, "rounds": 3}),
        ):
            name = what.replace(" ", "-")
            with _checking(f"{self.method.__name__} fails {what}"):
                records = self._run(name, toy_data(self.folder / f"data-{name}", **options), **extra).rounds
            self._refuse_trouble(records, what)

    def _run(self, out: str, data: str, **options: Any) -> Run:
        with registered(self.method) as name:
            return self._start(out, data, name, **options)

    def _start(self, out: str, data: str, name: str, **options: Any) -> Run:
        return run(name, data, out=self.folder / out, **{**self._defaults(), **self.options, **options})

    def _defaults(self) -> dict[str, Any]:
        return {"rounds": _ROUNDS, "batch": 8}

    def _refuse_trouble(self, records: Sequence[Mapping[str, Any]], what: str) -> None:
        for record in records:
            where = f"{self.method.__name__} {what}, round {record['round']}"
            assert not record["events"], f"{where}: {record['events'][0]['client']} is left out: " + str(
                record["events"][0]["reason"]
            )
            # A round without local training has no loss.
            losses = {"the loss": record["train_loss"], **record["loss_parts"]} if record["samples"] else {}
            for term, value in losses.items():
                assert value is not None, f"{where}: {term} is not finite"
            assert record["accuracy"] is not None, f"{where}: nothing was evaluated"


@dataclass
class _Recording:
    """What a method was shown and what it sent."""

    inputs: list[Tensor] = field(default_factory=list)
    broadcasts: dict[tuple[int, str], bytes] = field(default_factory=dict)
    uploads: dict[tuple[int, str], bytes] = field(default_factory=dict)
    aggregations: list[tuple[Any, Any, Record]] = field(default_factory=list)


class _Recorder:
    """An engine that keeps what passes through it."""

    name = "loop"
    workers = 1
    scattered = False
    trains_groups = False

    def __init__(self, engine: LoopEngine, recording: _Recording) -> None:
        self._engine = engine
        self._recording = recording

    def perform(self, jobs: Sequence[tuple[Job, Message]]) -> Iterator[tuple[Job, Result]]:
        """As the engine does."""
        for job, message in jobs:
            if isinstance(job, Train):
                self._recording.broadcasts[job.round, job.client] = message.blob
        for job, result in self._engine.perform(jobs):
            if isinstance(job, Train) and isinstance(result, Trained):
                self._recording.uploads[job.round, job.client] = result.blob
            yield job, result

    def close(self) -> None:
        """Nothing was started."""


def _spy(method: type[Method], recording: _Recording) -> type[Method]:
    """The same method, whose hooks note what they are given."""

    def recorded(name: str) -> Any:
        original = getattr(method, name)

        def loss(self: Any, net: Any, x: Tensor, y: Tensor, at: Any) -> Any:
            recording.inputs.append(x)
            return original(self, net, x, y, at)

        return loss

    def upload(self: Any, net: Any, data: Any, at: Any) -> Any:
        for samples in (data, data.validation):
            if samples is not None:
                recording.inputs.extend(x for x, _ in samples.batches())
        return method.upload(self, net, data, at)

    def aggregate(self: Any, server: Any, total: Any, at: Any) -> Any:
        result = method.aggregate(self, server, total, at)
        if not any(known is at for _, known, _ in recording.aggregations):
            recording.aggregations.append((server, at, result))
        return result

    losses = {step.loss: recorded(step.loss) for step in method().steps}
    about = {"__doc__": method.__doc__, "__module__": method.__module__}
    return type(method.__name__, (method,), {**losses, "upload": upload, "aggregate": aggregate, **about})


def _holds_a_row_of(tensor: Tensor, images: Tensor) -> bool:
    """Whether a tensor contains an image, row by row."""
    if not tensor.numel() or tensor.numel() % images.shape[1]:
        return False
    rows = tensor.double().reshape(-1, 1, images.shape[1])
    return any(bool((row == images).all(1).any()) for row in rows)


def _difference(left: Any, right: Any, path: str = "") -> str:
    """Where two states differ by more than rounding, or nothing; the order of labelled rows has no meaning."""
    if isinstance(left, Tensor):
        close = left.shape == right.shape and torch.allclose(left.double(), right.double(), rtol=1e-3, atol=1e-5)
        return "" if close else path
    if isinstance(left, LabelledRows):
        left, right = ({"rows": _sorted_rows(one), "labels": one.labels.sort().values} for one in (left, right))
    elif isinstance(left, Record):
        left, right = ({entry.name: getattr(one, entry.name) for entry in fields(one)} for one in (left, right))  # type: ignore[arg-type]
    if isinstance(left, dict):
        found = (_difference(left[key], right[key], f"{path}/{key}" if path else str(key)) for key in left)
        return next((difference for difference in found if difference), "")
    return "" if left == right else path


def _sorted_rows(table: LabelledRows) -> Tensor:
    """The rows in an order that does not depend on how they were put together."""
    rows = table.rows.double().flatten(1)
    keys = [table.labels.double(), *rows.round(decimals=3).T]
    order = np.lexsort([key.numpy() for key in reversed(keys)])
    return rows[torch.from_numpy(order)]


def _differing(one: Path, other: Path) -> list[str]:
    left, right = results_of(one), results_of(other)
    return sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))


@contextmanager
def _checking(what: str) -> Iterator[None]:
    """Turns an error inside into a failed check with this text."""
    try:
        yield
    except (_Stop, AssertionError):
        raise
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
