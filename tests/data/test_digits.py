import subprocess
import sys
from hashlib import blake2b

import pytest
import torch

from protofed.data import describe, digits, load
from protofed.data.digits import DOMAINS, load_digits


def digests(images):
    return {picture.numpy().tobytes() for picture in images.x}


def test_counts_and_shapes():
    data = load("digits")
    assert tuple(data.domains) == DOMAINS
    assert data.classes == tuple("0123456789")
    assert data.image_shape == (3, 28, 28)
    assert data.warnings == ()
    sizes = {name: (len(domain.train), len(domain.test)) for name, domain in data.domains.items()}
    assert sizes == {
        "mnist": (4000, 1000),
        "optdigits": (1438, 359),
        "mnistm_generated": (3000, 750),
        "syn_generated": (3000, 750),
    }
    for domain in data.domains.values():
        for part in (domain.train, domain.test):
            share = part.y.bincount(minlength=10) / len(part)
            assert (share - 0.1).abs().max() < 0.01
    assert [len(rows) for rows in data.offsets.values()] == [4000, 1438, 3000, 3000]
    assert len(data.pooled_train()) == 11438


def test_grey_domains_alone_stay_grey():
    data = load("digits", domains="optdigits,mnist")
    assert list(data.domains) == ["optdigits", "mnist"]
    assert data.image_shape == (1, 28, 28)
    assert load("digits", channels=1).image_shape == (1, 28, 28)
    assert load("digits", domains="mnist", image_size=32, channels=3).image_shape == (3, 32, 32)


def test_training_and_test_images_differ():
    for domain in load_digits().domains.values():
        assert not digests(domain.train) & digests(domain.test)


def test_generated_images_keep_to_their_part_of_mnist(monkeypatch):
    sources = {}
    original = digits._mnistm

    def watched(base, count, part):
        sources[part] = base
        return original(base, count, part)

    monkeypatch.setattr(digits, "_mnistm", watched)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    fresh = load_digits.__wrapped__()
    assert torch.equal(before, torch.random.get_rng_state())
    mnist = fresh.domains["mnist"]
    assert sources == {"train": mnist.train, "test": mnist.test}
    for name, domain in load_digits().domains.items():
        assert torch.equal(fresh.domains[name].train.x, domain.train.x)
        assert torch.equal(fresh.domains[name].test.x, domain.test.x)


def test_another_process_makes_the_same_images():
    script = (
        "import hashlib, torch; torch.manual_seed(5); torch.set_num_threads(1)\n"
        "from protofed.data import load; x = load('digits').pooled_train().x\n"
        "print(hashlib.blake2b(x.numpy().tobytes()).hexdigest())"
    )
    there = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    assert there == blake2b(load("digits").pooled_train().x.numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("name", DOMAINS)
def test_pictures_are_neither_flat_nor_clipped(name):
    x = load_digits().domains[name].train.x.float()
    assert (x.flatten(1).std(1) > 5).all()
    if name.endswith("_generated"):
        assert ((x == 0) | (x == 255)).float().mean() < 0.25


def test_description():
    summary = describe("digits")
    assert summary.domains[0].train_per_class == (400,) * 10
    assert "MNIST" in summary.licence
