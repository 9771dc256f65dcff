"""Local training: what is frozen stays, small batches, notes, and samples clean or augmented."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from protofed.clients import ClientSide, RunContext, Train, Trained, prepare
from protofed.clients.optimizers import make_optimizers
from protofed.clients.samples import ClientSamples
from protofed.clients.store import ClientState, ClientStore
from protofed.clients.training import dropout_seed, train, training_batches
from protofed.data import Augment, Images, Normalise
from protofed.method import Method, Plan, Step
from protofed.methods.fedavg import FedAvg
from protofed.models import everything, head, normalisation
from protofed.models.net import Net
from protofed.records import Weights, decode, encode
from protofed.runs.assembly import assemble
from protofed.runs.options import make_options
from protofed.seeding import generator


@pytest.fixture
def setting_of(tiny_data: str, tmp_path: Path) -> Any:
    """A setting from options; `method` may be an instance."""

    def make(method: Method | None = None, data: str | None = None, **options: Any) -> RunContext:
        chosen = {"method": "fedavg", "data": data or tiny_data, "model": "mlp", "batch": 8, **options}
        context = assemble(make_options(chosen), tmp_path / "clients").context
        (tmp_path / "clients").mkdir(exist_ok=True)
        return context if method is None else replace(context, method=method)

    return make


def trained(context: RunContext, client: str = "a-0") -> tuple[Weights, Weights, Any]:
    """The model before and after local training."""
    method, net, at = context.method, Net(deepcopy(context.model)), context.at(0, client)
    before = net.pick()
    result = train(method, net, context.samples(client), at, make_optimizers(method, net, context.plan, at.lr))
    return before, net.pick(), result


def changed(before: Weights, after: Weights) -> set[str]:
    one, other = before.tensors(), after.tensors()
    return {name for name in one if not torch.equal(one[name], other[name])}


class HeadOnly(FedAvg):
    """Trains the last layer."""

    steps = (Step(trains=head),)


class NormalisationToo(FedAvg):
    """Trains the head and batch normalisation."""

    steps = (Step(trains=head), Step(trains=normalisation))


RESNET: dict[str, Any] = {"model": "resnet10", "set": {"model.width": 4}}


def test_frozen_parts_do_not_move_at_all(setting_of: Any) -> None:
    before, after, _ = trained(setting_of(HeadOnly(), **RESNET))
    assert changed(before, after) == {"fc.weight", "fc.bias"}
    assert after.stats  # running means and variances, none of which drifted


def test_trained_normalisation_moves_with_its_statistics(setting_of: Any) -> None:
    context = setting_of(NormalisationToo(), **RESNET)
    before, after, _ = trained(context)
    norms = Net(context.model).names(normalisation)
    assert changed(before, after) == norms | {"fc.weight", "fc.bias"}


def test_everything_moves_by_default(setting_of: Any) -> None:
    context = setting_of(**RESNET)
    before, after, _ = trained(context)
    assert changed(before, after) == Net(context.model).names(everything)


def test_a_quiet_look_moves_no_statistics(setting_of: Any) -> None:
    net = Net(setting_of(**RESNET).model)
    net.model.train()
    before = net.pick()
    with net.quiet():
        net.features(torch.rand(4, 1, 8, 8))
    assert changed(before, net.pick()) == set()
    net.features(torch.rand(4, 1, 8, 8))
    assert changed(before, net.pick()) == set(before.stats)


class Counting(FedAvg):
    """Reports how large batches were, through its notes."""

    proto_pass = "last_epoch"

    def loss(self, net: Any, x: Tensor, y: Tensor, at: Any) -> Any:
        """Cross-entropy, with the size of the batch noted per sample."""
        return super().loss(net, x, y, at), {"size": torch.full((len(y),), len(y))}


@pytest.mark.parametrize(("drop", "sizes"), [(True, {8}), (False, {8, 1})])
def test_a_trailing_batch_of_one(drop: bool, sizes: set[int], setting_of: Any, make_data: Any) -> None:
    data = make_data(["only"], train=17)
    method = Counting(proto_pass="last_epoch", drop_singleton_batch=drop)
    _, _, result = trained(setting_of(method, data=data, epochs=2), "only-0")
    assert set(result.notes["size"].tolist()) == sizes
    assert len(result.notes["size"]) == (16 if drop else 17)  # the last epoch only
    assert result.samples == 2 * (16 if drop else 17)


def test_a_client_of_one_sample_takes_part(make_data: Any, tiny_run: Any) -> None:
    """Its only batch is skipped; what it sends is the model it received, and prototypes from a clean look."""
    data = make_data(["a", "b"], labels={"a": [2]})
    for method in ("fedavg", "i2pfl"):
        for proto_pass in ("extra_eval", "last_epoch"):
            run = tiny_run(method, data, set={"proto_pass": proto_pass})
            assert run.rounds[-1]["events"] == []
            assert run.rounds[-1]["participants"] == ["a-0", "b-0"]


def test_only_clients_of_one_sample(make_data: Any, tiny_run: Any) -> None:
    data = make_data(["a", "b"], labels={"a": [2], "b": [1]})
    run = tiny_run("fedavg", data)
    assert run.complete
    assert run.rounds[0]["samples"] == 0


# Samples


def pictures(count: int = 10) -> Images:
    x = torch.randint(0, 256, (count, 1, 8, 8), generator=generator(0, "x"), dtype=torch.uint8)
    return Images(x, torch.arange(count) % 3)


def samples(augment: str = "none") -> ClientSamples:
    return ClientSamples(pictures(), Normalise.default(1), Augment.parse(augment), torch.float32, torch.device("cpu"))


def gathered(batches: Any) -> tuple[Tensor, Tensor]:
    found = list(batches)
    return torch.cat([x for x, _ in found]), torch.cat([y for _, y in found])


@pytest.mark.parametrize("augment", ["none", "flip", "crop"])
def test_clean_batches_are_clean_and_in_order(augment: str) -> None:
    known = samples(augment)
    expected = Normalise.default(1)(pictures().x, torch.float32)
    for _ in range(2):
        x, y = gathered(known.batches(4))
        assert torch.equal(x, expected)
        assert torch.equal(y, pictures().y)
        list(known.epoch(4, generator(0, "order"), generator(0, "chance")))


def test_an_epoch_shows_every_sample_once_in_the_drawn_order() -> None:
    x, y = gathered(samples().epoch(4, generator(3, "order"), generator(0, "chance")))
    order = torch.randperm(10, generator=generator(3, "order"))
    assert torch.equal(x, Normalise.default(1)(pictures().x, torch.float32)[order])
    assert torch.equal(y, pictures().y[order])


def test_balanced_epochs_draw_every_class_equally_often() -> None:
    rare = Images(pictures(1000).x, (torch.arange(1000) < 50).long())
    drawn = ClientSamples(rare, Normalise.default(1), Augment(), torch.float32, torch.device("cpu"), balanced=True)
    _, y = gathered(drawn.epoch(100, generator(0, "order"), generator(0, "chance")))
    assert len(y) == 1000
    # Six standard deviations about a half; by frequency it would be a twentieth.
    assert y.float().mean().item() == pytest.approx(0.5, abs=0.1)


def test_notes_are_kept_of_the_last_epoch_only(make_at: Any) -> None:
    class Noting(FedAvg):
        keeps_notes = True

    at = make_at(plan=Plan(epochs=(3,), batch=4))
    assert [batch.noted for batch in training_batches(Noting(), samples(), at)] == [False] * 6 + [True] * 3


def test_dropout_differs_between_rounds_and_clients(make_at: Any) -> None:
    places = [make_at(round=round, client=client) for round in (0, 1) for client in ("a", "b")]
    assert len({dropout_seed(at) for at in places}) == 4


def test_augmentation_happens_in_training_and_follows_its_generator() -> None:
    def epoch(chance: int) -> Tensor:
        return gathered(samples("flip").epoch(4, generator(3, "order"), generator(chance, "chance")))[0]

    clean = gathered(samples().epoch(4, generator(3, "order"), generator(0, "chance")))[0]
    assert torch.equal(epoch(1), epoch(1))
    assert not torch.equal(epoch(1), epoch(2))
    assert not torch.equal(epoch(1), clean)


def test_test_samples_are_never_augmented(setting_of: Any) -> None:
    plain, augmented = setting_of(), setting_of(set={"data.augment": "flip"})
    for context in (plain, augmented):
        assert torch.equal(
            gathered(context.test_samples("a", None).batches())[0], gathered(plain.test_samples("a", None).batches())[0]
        )


# Validation


def rows_of(found: ClientSamples) -> set[bytes]:
    return {row.numpy().tobytes() for row in gathered(found.batches())[0]}


def test_validation_is_apart_from_training(setting_of: Any) -> None:
    context = setting_of(set={"data.validation": 0.25})
    whole = setting_of()
    for client in context.partition.clients:
        kept = context.samples(client)
        assert len(kept) == context.sizes[client] == 18
        assert len(kept.validation) == 6
        assert not rows_of(kept) & rows_of(kept.validation)
        assert rows_of(kept) | rows_of(kept.validation) == rows_of(whole.samples(client))
        assert torch.equal(context.at(0, client).held, torch.bincount(kept.y, minlength=4).float())
        assert whole.samples(client).validation is None


def test_validation_does_not_change_between_rounds_or_objects(setting_of: Any) -> None:
    one, other = (setting_of(set={"data.validation": 0.25}) for _ in range(2))
    assert torch.equal(one.samples("b-0").y, other.samples("b-0").y)


def test_at_least_one_sample_stays_to_train_on(setting_of: Any, make_data: Any) -> None:
    context = setting_of(data=make_data(["a"], labels={"a": [0]}), set={"data.validation": 0.9})
    assert context.sizes == {"a-0": 1}


# A client's round


def test_what_a_client_sends_and_keeps(setting_of: Any) -> None:
    context = setting_of()
    prepared = prepare(context)
    templates = prepared.templates
    side = ClientSide(prepared)
    result = side.perform(Train(0, "a-0"), encode(templates.down, "server"))
    assert isinstance(result, Trained)
    upload = decode(result.blob, templates.upload, "a-0")
    store = ClientStore(context.clients_folder)
    state = store.read("a-0", 0, templates.clients[0])
    assert isinstance(state, ClientState)
    assert changed(upload.weights.value, state.model) == set()
    assert changed(templates.clients[0].model, state.model) == set(state.model.tensors())
    assert float(upload.weights.weight) == 24
    # Nothing is committed yet: before the commit the round can be forgotten.
    assert store.read("a-0", 1, templates.clients[0]) is None
    store.commit(["a-0"], 0)
    assert store.read("a-0", 1, templates.clients[0]) is not None


def test_training_does_not_depend_on_who_went_before(setting_of: Any) -> None:
    context = setting_of()
    prepared = prepare(context)
    templates = prepared.templates
    message = encode(templates.down, "server")
    after_others, alone = ClientSide(prepared), ClientSide(prepared)
    for client in ("a-0", "c-0"):
        after_others.perform(Train(0, client), message)
    one, other = (side.perform(Train(0, "b-0"), message) for side in (after_others, alone))
    assert isinstance(one, Trained)
    assert one == other


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("persist", ["on", "off"])
def test_optimisers_are_kept_between_rounds(
    optimizer: str, persist: str, tiny_run: Any, make_data: Any, tmp_path: Path
) -> None:
    """One client, two rounds: with the optimiser kept this is torch's optimiser over both."""
    data = make_data(["only"], train=16)
    run = tiny_run(
        "fedavg", data, optimizer=optimizer, lr=0.02, momentum=0.9, weight_decay=0.01, dtype="float64",
        set={"persist_optimizer": persist},
    )  # fmt: skip
    context = assemble(make_options(run.options), tmp_path / "none").context
    model = context.model

    def fresh() -> torch.optim.Optimizer:
        if optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.01)
        return torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=0.01)

    reference = fresh()
    for round in range(2):
        if persist == "off":
            reference = fresh()
        at = context.at(round, "only-0")
        for x, y in context.samples("only-0").epoch(8, at.rng("order"), at.rng("augment")):
            reference.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            reference.step()
    found = run.model()
    for name, param in model.named_parameters():
        torch.testing.assert_close(dict(found.named_parameters())[name], param, rtol=1e-10, atol=1e-12)
