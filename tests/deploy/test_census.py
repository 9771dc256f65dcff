"""What the server knows of images that are elsewhere."""

from pathlib import Path

import pytest
import torch

from protofed.data import Domain, Images
from protofed.deploy.census import Census, Hello
from protofed.runs.assembly import assemble
from protofed.runs.options import make_options

SHAPE = (3, 256, 256)
MANY = 200_000
"""So many images would take 37 GiB a site."""


@pytest.fixture
def census() -> Census:
    hello = Hello("1.0.0", ("healthy", "diseased"), SHAPE, (MANY, MANY // 2), (MANY, 0))
    return Census(hello.classes, SHAPE, {"north": hello, "south": hello, "west": hello})


def test_blank_images_cost_no_memory(census: Census, tmp_path: Path) -> None:
    options = {"method": "i2pfl", "data": "sites", "protocol": "one-per-domain", "model": "lenet5", "engine": "loop"}
    assembly = assemble(make_options(options), tmp_path, census.dataset(None))
    assert assembly.context.sizes == {f"{name}-0": MANY + MANY // 2 for name in census.sites}
    for domain in assembly.context.dataset.domains.values():
        assert domain.train.x.shape == (MANY + MANY // 2, *SHAPE)
        assert domain.train.x.untyped_storage().nbytes() == domain.test.x.untyped_storage().nbytes() == 1


def test_a_site_has_its_own_images_among_blank_ones(census: Census) -> None:
    own = Images(torch.randint(256, (3, *SHAPE), dtype=torch.uint8), torch.tensor([0, 1, 1]))
    dataset = census.dataset(None, Domain("south", own, own))
    assert list(dataset.domains) == list(census.sites)
    begin = dataset.offsets["south"].start
    assert torch.equal(dataset.take_train([begin + 2, begin]).x, own.x[[2, 0]])
    with pytest.raises(IndexError, match="1 of 2 positions are outside the training set"):
        dataset.take_train([begin, len(dataset.pooled_labels())])
    assert dataset.domains["south"].train.x.data_ptr() == own.x.data_ptr()
