"""Training images that are bad on purpose: at the clients named, in the amount asked for, and nowhere else."""

import numpy as np
import pytest
import torch

from protofed.data import load, make_partition
from protofed.data.corruption import corrupted
from protofed.errors import UserError
from protofed.runs.assembly import assemble
from protofed.runs.options import make_options
from protofed.testing import toy_data


@pytest.fixture
def dealt(tmp_path):
    dataset = load(str(toy_data(tmp_path / "toy", ["a", "b"], classes=4, train=80, test=8)))
    return dataset, make_partition(dataset, "iid=4", seed=0)


def test_so_many_labels_of_a_client_become_another_class(dealt):
    dataset, partition = dealt
    own = partition.train["client-1"]
    noisy = corrupted(dataset, partition, label_noise="client-1=0.25", seed=3)
    changed = np.flatnonzero((noisy.pooled_labels() != dataset.pooled_labels()).numpy())
    assert len(changed) == round(0.25 * len(own)), "a wrong label is never the right one"
    assert set(changed) <= set(own), "neither other clients nor what a client keeps for its test"
    assert noisy.pooled_labels().max() < 4
    assert torch.equal(noisy.pooled_train().x, dataset.pooled_train().x)
    again = corrupted(dataset, partition, label_noise="client-1=0.25", seed=3)
    assert torch.equal(again.pooled_labels(), noisy.pooled_labels())
    assert not torch.equal(
        corrupted(dataset, partition, label_noise="client-1=0.25", seed=4).pooled_labels(), noisy.pooled_labels()
    )


def test_wrong_labels_are_every_other_class(dealt):
    dataset, partition = dealt
    noisy = corrupted(dataset, partition, label_noise="client-0=1,client-1=1,client-2=1,client-3=1")
    trained = np.concatenate(list(partition.train.values()))
    steps = (noisy.pooled_labels() - dataset.pooled_labels()).numpy()[trained] % 4
    # 128 images in three boxes: 43 each, with a deviation of 5.3.
    assert (np.bincount(steps, minlength=4)[1:] > 20).all()
    assert not (steps == 0).any()


def test_noise_has_the_deviation_asked_for_and_the_image_as_its_mean(tmp_path):
    folder = tmp_path / "grey"
    folder.mkdir()
    grey = np.full((40, 16, 16, 1), 128, np.uint8)
    y = np.arange(40) % 2
    for site in ("a", "b"):
        np.savez(folder / f"{site}.npz", x_train=grey, y_train=y, x_test=grey[:4], y_test=y[:4], classes=["n", "p"])
    dataset = load(str(folder))
    partition = make_partition(dataset, "one-per-domain")
    noisy = corrupted(dataset, partition, image_noise="b-0=0.1")
    assert torch.equal(noisy.domains["a"].train.x, dataset.domains["a"].train.x)
    assert torch.equal(noisy.domains["b"].test.x, dataset.domains["b"].test.x)
    pixels = noisy.domains["b"].train.x[:].double()
    # 10,240 pixels: the mean is within five deviations of 25.5 / 101.
    assert abs(float(pixels.mean()) - 128) < 1.3
    assert float(pixels.std()) == pytest.approx(25.5, rel=0.05)
    assert len({image.numpy().tobytes() for image in noisy.domains["b"].train.x[:]}) == 40, "each has noise of its own"


@pytest.mark.parametrize(
    ("noise", "said"),
    [
        ({"label_noise": "client-9=0.4"}, "did you mean client-"),
        ({"label_noise": "client-0"}, "is not CLIENT=AMOUNT"),
        ({"label_noise": "client-0=1.4"}, "at most 1"),
        ({"image_noise": "client-0=much"}, "not a number"),
    ],
)
def test_mistakes_are_named(dealt, noise, said):
    with pytest.raises(UserError, match=said):
        corrupted(*dealt, **noise)


def test_a_run_trains_on_what_was_asked_for(tmp_path):
    data = toy_data(tmp_path / "toy", ["a"], classes=2, train=40, test=8)
    chosen = {"method": "fedavg", "data": str(data), "model": "mlp", "protocol": "iid=2", "engine": "loop"}
    clean, noisy = (
        assemble(make_options({**chosen, "set": settings}), tmp_path / "clients").context
        for settings in ({}, {"data.label_noise": "client-0=1", "data.image_noise": "client-1=0.3"})
    )
    own = {client: torch.from_numpy(clean.partition.train[client]) for client in clean.partition.clients}
    assert clean.partition.hash == noisy.partition.hash
    before, after = clean.dataset.pooled_train(), noisy.dataset.pooled_train()
    assert torch.equal(after.y[own["client-0"]], 1 - before.y[own["client-0"]])
    assert torch.equal(after.y[own["client-1"]], before.y[own["client-1"]])
    assert torch.equal(after.x[own["client-0"]], before.x[own["client-0"]])
    assert not torch.equal(after.x[own["client-1"]], before.x[own["client-1"]])
