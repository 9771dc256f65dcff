"""What the server knows of images that are elsewhere."""

from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from protofed.data import Domain, Images
from protofed.deploy.census import Census, Hello
from protofed.errors import UserError
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


def hello(*classes: str) -> Hello:
    return Hello(version("protofed"), classes, (1, 8, 8), (3,) * len(classes), (1,) * len(classes))


HONEST = ("cat", "dog", "owl")


def test_one_site_cannot_widen_the_list_of_classes() -> None:
    """A class that all agree on is among them, so that it is no stranger."""
    many = hello("cat", *(f"class {k}" for k in range(101)))
    hellos = {"a": hello(*HONEST), "b": hello(*HONEST[:2]), "c": many}
    (name, reason), *others = Census.differing(hellos).items()
    assert not others
    assert name == "c"
    assert "101 classes that no other site has (class 0, class 1, " in reason
    assert "class 20," not in reason
    with pytest.raises(UserError, match="c has 101 classes"):
        Census.of(hellos)


def test_some_classes_of_its_own_a_site_may_have() -> None:
    hellos = {"a": hello(*HONEST), "b": hello(*HONEST), "c": hello("cat", *(f"class {k}" for k in range(100)))}
    assert Census.differing(hellos) == {}
    assert len(Census.of(hellos).classes) == 103


def test_who_shares_many_classes_may_have_as_many_of_its_own() -> None:
    shared = [f"class {k}" for k in range(300)]
    hellos = {"a": hello(*shared), "b": hello(*shared), "c": hello(*shared, *(f"own {k}" for k in range(300)))}
    assert Census.differing(hellos) == {}


def test_all_classes_of_a_run_are_bounded() -> None:
    """Each of them is within its own bound."""
    shared = [f"class {k}" for k in range(4_000)]
    hellos = {name: hello(*shared, *(f"{name}{k}" for k in range(3_000))) for name in "abc"}
    assert set(Census.differing(hellos)) == set(hellos)
    with pytest.raises(UserError, match="a run can have 10000"):
        Census.of(hellos)
    with pytest.raises(UserError, match="13999 classes together; a run can have at most 10000"):
        Census.of({name: hello(*(f"{name}{k}" for k in range(6_999)), "cat") for name in "ab"})


def test_another_spelling_of_the_others_classes_leaves_that_site_out() -> None:
    hellos = {"a": hello("cat", "dog"), "b": hello("cat", "dog"), "c": hello("cat", "Dog")}
    assert list(Census.differing(hellos)) == ["c"]
