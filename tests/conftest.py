"""What many tests need: tiny data on disk, tiny runs, a network whose features are its input, comparisons of runs.

Fixtures that make something are functions, so that a test says what it wants:

    def test_it(make_data, tiny_run, make_at, identity_net, same_results): ...
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from safetensors.torch import load
from torch import Tensor, nn

import protofed
from protofed import At, Plan, registry
from protofed.data import catalog as data_catalog
from protofed.models import Split
from protofed.models import catalog as model_catalog
from protofed.models.net import Net
from protofed.testing import results_of, toy_data

DataFactory = Callable[..., str]
RunFactory = Callable[..., protofed.Run]

# A busy machine is no reason to fail.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(autouse=True)
def own_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    registry.method_names()  # ours are registered when first asked for, and must not be forgotten
    for module, name in ((data_catalog, "_REGISTRY"), (model_catalog, "_models"), (registry, "_methods")):
        monkeypatch.setattr(module, name, dict(getattr(module, name)))


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """What a test draws without a generator of its own is the same, whichever tests went before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def cache_of_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fixtures that outlive a test do not touch the user's cache either."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTOFED_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds features of another run, or leaves its own behind."""
    monkeypatch.setenv("PROTOFED_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny tensors are slower on several threads, and the machine is shared."""
    torch.set_num_threads(1)


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """While something short is timed: in a process as large as that of all tests, a collection takes far longer."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def make_data(tmp_path: Path) -> DataFactory:
    """Write a data folder; the options are those of `toy_data`, and `name` for a second one."""

    def make(domains: Iterable[str] = ("a", "b", "c"), *, name: str = "data", **options: Any) -> str:
        return toy_data(tmp_path / name, domains, **options)

    return make


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three domains of 4 classes, 8x8 grey; a lacks class 3, b lacks class 0. Made once, for reading only."""
    return toy_data(tmp_path_factory.mktemp("tiny") / "data", absent={"a": [3], "b": [0]})


@pytest.fixture(scope="session")
def noisy_data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three domains of 2 classes whose test labels are partly wrong, so that no model is right everywhere."""
    folder = Path(toy_data(tmp_path_factory.mktemp("noisy") / "data", classes=2, train=20, test=25))
    for every, path in zip((3, 5, 7), sorted(folder.glob("*.npz")), strict=True):
        with np.load(path) as file:
            arrays = dict(file)
        arrays["y_test"][::every] ^= 1
        np.savez(path, **arrays)
    return str(folder)


@pytest.fixture
def tiny_run(tmp_path: Path, tiny_data: str) -> RunFactory:
    """Run a method on tiny data with tiny defaults, each of which the test may override; `name` names the folder."""
    made = 0

    def start(method: str, data: str | None = None, *, name: str | None = None, **options: Any) -> protofed.Run:
        nonlocal made
        made += 1
        defaults: dict[str, Any] = {"model": "mlp", "rounds": 2, "batch": 8, "engine": "loop"}
        if options.get("model", "mlp") == "mlp":
            options["set"] = {"model.hidden": 16, **options.get("set", {})}
        out = tmp_path / (name or f"run{made}")
        return protofed.run(method, data or tiny_data, out=out, **{**defaults, **options})

    return start


@pytest.fixture
def make_at() -> Callable[..., At]:
    """Where a hook stands, with as little filled in as a unit test needs."""

    def make(**given: Any) -> At:
        rounds = given.pop("rounds", 2)
        defaults: dict[str, Any] = {
            "plan": Plan(epochs=(1,) * rounds, batch=8),
            "classes": 2,
            "dim": 2,
            "clients": {"a": 1},
            "client": "a",
        }
        at = At(**{**defaults, **given})
        return at if at.held.numel() else At(**{**defaults, **given, "held": torch.ones(at.classes)})

    return make


@pytest.fixture
def identity_net() -> Callable[..., Net]:
    """A network whose features are its input; the head is `head` [classes, dim] without bias, or zero."""

    def make(dim: int = 2, classes: int = 2, head: Tensor | None = None) -> Net:
        linear = nn.Linear(dim, classes, bias=False)
        with torch.no_grad():
            linear.weight.copy_(torch.zeros(classes, dim) if head is None else head)
        return Net(Split({"same": nn.Identity(), "fc": linear}, cut="same", dim=dim, classes=classes))

    return make


@pytest.fixture
def samples_of() -> Callable[..., Any]:
    """A client's samples, as `upload` takes them, from features (or images) and labels."""
    return _Samples


class _Samples:
    """Tensors in the place of a client's data."""

    def __init__(self, x: Any, y: Any, validation: Any = None) -> None:
        self.x, self.y, self.validation = torch.as_tensor(x), torch.as_tensor(y), validation

    def __len__(self) -> int:
        return len(self.y)

    def batches(self, size: int = 256) -> Any:
        """All samples, clean and in order."""
        yield from zip(self.x.split(size), self.y.split(size), strict=True)


@pytest.fixture
def close_results() -> Callable[..., None]:
    """Assert that two runs left the same behind up to rounding: every tensor, every loss, the same accuracies."""

    def check(left: protofed.Run, right: protofed.Run, tolerance: float) -> None:
        one, other = (results_of(run.path) for run in (left, right))
        assert sorted(one) == sorted(other)
        rounds = one.pop("rounds.jsonl"), other.pop("rounds.jsonl")
        for name in one:
            mine, theirs = load(one[name]), load(other[name])
            assert mine.keys() == theirs.keys(), name
            for key in mine:
                torch.testing.assert_close(mine[key], theirs[key], rtol=tolerance, atol=tolerance, msg=f"{name} {key}")
        for mine, theirs in zip(*rounds, strict=True):
            totals = [{key: line.pop(key) for key in ("train_loss", "cross_entropy")} for line in (mine, theirs)]
            losses = [{**each, **line.pop("loss_parts")} for each, line in zip(totals, (mine, theirs), strict=True)]
            losses = [{name: loss for name, loss in each.items() if loss is not None} for each in losses]
            assert losses[0] == pytest.approx(losses[1], rel=tolerance, abs=tolerance)
            assert mine == theirs

    return check


@pytest.fixture
def same_results() -> Callable[[protofed.Run | str | Path, protofed.Run | str | Path], None]:
    """Assert that two runs left the same behind, bit for bit: model, prototypes, clients, rounds without seconds."""

    def check(left: protofed.Run | str | Path, right: protofed.Run | str | Path) -> None:
        one, other = (results_of(run.path if isinstance(run, protofed.Run) else run) for run in (left, right))
        assert sorted(one) == sorted(other)
        assert one["rounds.jsonl"] == other["rounds.jsonl"]
        assert [name for name in one if one[name] != other[name]] == []

    return check
