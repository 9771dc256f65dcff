import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protofed.data import Dataset, Domain, Images, Normalise, Partition, make_partition
from protofed.data.partition import stratified_split
from protofed.errors import UserError


def dataset(classes=4, **sizes):
    def images(labels):
        return Images(torch.zeros(len(labels), 1, 4, 4, dtype=torch.uint8), labels)

    domains = {
        name: Domain(name, images(torch.arange(size) * 7 % classes), images(torch.arange(2)))
        for name, size in sizes.items()
    }
    return Dataset("toy", tuple("abcdefghij"[:classes]), domains, Normalise.default(1))


def dealt(partition):
    parts = [part[client] for client in partition.clients for part in (partition.train, partition.holdout)]
    return np.concatenate(parts)


def check_sound(partition, data):
    everything = dealt(partition)
    assert len(np.unique(everything)) == len(everything)
    assert everything.min() >= 0
    assert everything.max() < len(data.pooled_labels())
    assert set(partition.train) == set(partition.holdout) == set(partition.domain) == set(partition.clients)
    assert all(len(partition.train[client]) for client in partition.clients)
    for client, domain in partition.domain.items():
        if domain:
            assert np.isin(partition.train[client], data.offsets[domain]).all()
            assert len(partition.holdout[client]) == 0


DATA = dataset(mnist=200, usps=90, svhn=61)
SEEDS = st.integers(0, 2**31)


@given(SEEDS, st.integers(1, 15))
def test_equal_deals_out_everything(seed, number):
    partition = make_partition(DATA, f"equal={number}", seed=seed)
    check_sound(partition, DATA)
    assert len(dealt(partition)) == 351
    assert len(partition.clients) == 3 * number
    for name in DATA.domains:
        sizes = [len(partition.train[f"{name}-{i}"]) for i in range(number)]
        assert max(sizes) - min(sizes) <= 1


@given(SEEDS, st.floats(0.02, 1), st.integers(1, 12), st.booleans())
def test_fraction_is_drawn_without_replacement(seed, fraction, number, complete):
    share = int(fraction * 200 + 1e-9)
    fitting = -(-200 // share)
    options = {"clients": f"mnist={number}", "fraction": fraction, "seed": seed, "ensure_all_classes": complete}
    if number > fitting:
        with pytest.raises(UserError, match=f"{fitting} clients fit, not {number}"):
            make_partition(DATA, **options)
        return
    partition = make_partition(DATA, **options)
    check_sound(partition, DATA)
    sizes = [len(partition.train[client]) for client in partition.clients]
    assert sizes[:-1] == [share] * (number - 1)
    assert sizes[-1] == min(share, 200 - share * (number - 1))
    assert any("instead of" in warning for warning in partition.warnings) == (sizes[-1] < share)
    assert partition.held_out == ("usps", "svhn")


@given(SEEDS, st.sampled_from([0.1, 0.3, 0.5, 5.0]), st.integers(1, 8), st.sampled_from([0.0, 0.2, 0.5]))
@settings(max_examples=50)
def test_dirichlet_keeps_the_minimum_and_loses_nothing(seed, alpha, number, holdout):
    partition = make_partition(DATA, f"dirichlet={alpha},clients={number},min=3", seed=seed, holdout=holdout)
    check_sound(partition, DATA)
    assert len(dealt(partition)) == 351
    for client in partition.clients:
        train, kept = len(partition.train[client]), len(partition.holdout[client])
        assert train + kept >= 3
        assert kept == min(max(round(holdout * (train + kept)), 1 if holdout else 0), train + kept - 1)


@given(SEEDS, st.integers(1, 40))
def test_iid_is_even(seed, number):
    partition = make_partition(DATA, f"iid={number}", seed=seed)
    check_sound(partition, DATA)
    assert len(dealt(partition)) == 351
    sizes = [len(partition.train[client]) + len(partition.holdout[client]) for client in partition.clients]
    assert max(sizes) - min(sizes) <= 1


@given(SEEDS, st.integers(1, 3), st.integers(1, 12))
def test_shards_bound_the_classes_of_a_client(seed, shards, number):
    partition = make_partition(DATA, f"shards={shards},clients={number}", seed=seed, holdout=0)
    check_sound(partition, DATA)
    assert len(dealt(partition)) == 351
    if shards * number >= 4:
        # A run of at most a quarter of the images touches two of the four classes at most.
        held = (partition.counts(DATA.pooled_labels(), 4) > 0).sum(1)
        assert held.max() <= 2 * shards


def test_which_shards_a_client_gets_is_chance():
    """In turn the first of two clients would always have the first half of the classes."""
    firsts = {
        tuple(make_partition(DATA, "shards=2,clients=2", seed=seed, holdout=0).counts(DATA.pooled_labels(), 4)[0] > 9)
        for seed in range(20)
    }
    assert len(firsts) > 2


def test_a_class_keeps_its_last_sample_while_others_have_more():
    for seed in range(20):
        keep, aside = stratified_split(np.array([0, 1, 1, 1]), 0.5, np.random.default_rng(seed))
        assert keep[0] == 0
        assert len(aside) == 2


@given(st.lists(st.integers(0, 4), min_size=2, max_size=80), st.floats(0.01, 0.99), SEEDS)
def test_stratified_split(labels, fraction, seed):
    y = np.array(labels)
    keep, aside = stratified_split(y, fraction, np.random.default_rng(seed))
    assert np.array_equal(np.sort(np.concatenate([keep, aside])), np.arange(len(y)))
    assert len(aside) == min(max(round(fraction * len(y)), 1), len(y) - 1)
    for label, size in zip(*np.unique(y, return_counts=True), strict=True):
        # A class whose last sample is kept hands its turn to others, at most one per class.
        assert abs((y[aside] == label).sum() - len(aside) * size / len(y)) <= 5


@pytest.mark.parametrize(
    "protocol", ["domains", "equal=3", "one-per-domain", "leave-out=usps", "dirichlet=0.5,clients=5", "iid=4"]
)
def test_the_seed_decides(protocol):
    first = make_partition(DATA, protocol, seed=1, samples_per_client=20)
    assert make_partition(DATA, protocol, seed=1, samples_per_client=20).hash == first.hash
    assert make_partition(DATA, protocol, seed=2, samples_per_client=20).hash != first.hash


def test_hash_follows_content_and_nothing_else():
    def build(**changes):
        parts = {
            "protocol": "iid=2",
            "clients": ("a", "b"),
            "train": {"a": np.array([0, 1]), "b": np.array([2])},
            "holdout": {"a": np.array([3]), "b": np.array([], dtype=np.int64)},
            "domain": {"a": "", "b": ""},
        }
        return Partition(**(parts | changes)).hash

    base = build()
    assert build(warnings=("odd",)) == base
    assert build(train={"b": np.array([2]), "a": np.array([0, 1], dtype=np.int32)}) == base
    others = [
        build(train={"a": np.array([0]), "b": np.array([1, 2])}),
        build(train={"a": np.array([0, 1, 3]), "b": np.array([2])}, holdout={"a": np.array([]), "b": np.array([])}),
        build(holdout={"a": np.array([4]), "b": np.array([])}),
        build(domain={"a": "x", "b": ""}),
        build(held_out=("y",)),
        build(clients=("b", "a")),
    ]
    assert len({base, *others}) == 1 + len(others)


def test_hash_is_the_same_on_every_machine():
    assert make_partition(DATA, "iid=3", seed=0).hash == "541a19bf28ee47440e25a223409f86c7"


def test_round_trip(tmp_path):
    partition = make_partition(DATA, "leave-out=usps", clients="mnist=3,svhn=1", fraction=0.4, seed=3)
    path = tmp_path / "partition.npz.tmp"
    partition.save(path)
    again = Partition.load(path)
    assert again.hash == partition.hash
    assert (again.protocol, again.warnings, again.held_out) == (partition.protocol, partition.warnings, ("usps",))
    assert again.train["mnist-0"].dtype == np.int64
    first = path.read_bytes()
    partition.save(path)
    assert path.read_bytes() == first


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\x03\x04 cut short"])
def test_a_broken_file_is_named(tmp_path, content):
    path = tmp_path / "partition.npz"
    with pytest.raises(UserError, match="there is no partition"):
        Partition.load(path)
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"partition\.npz is not a readable partition"):
        Partition.load(path)


def test_defaults():
    partition = make_partition(DATA)
    assert partition.protocol == "one-per-domain"
    assert partition.clients == ("mnist-0", "usps-0", "svhn-0")
    assert make_partition(DATA, clients="usps=2").protocol == "domains"


def test_paper_sizes():
    digits = dataset(mnist=60000, usps=7291, svhn=73257, syn=10000)
    partition = make_partition(digits, clients="mnist=6,usps=4,svhn=3,syn=7", fraction="0.01")
    sizes = {client.split("-")[0]: len(partition.train[client]) for client in partition.clients}
    assert sizes == {"mnist": 600, "usps": 72, "svhn": 732, "syn": 100}
    assert len(partition.clients) == 20


def test_the_last_client_of_a_scarce_domain_gets_the_rest():
    partition = make_partition(dataset(sketch=3929), clients="sketch=4", fraction=0.3)
    assert [len(partition.train[client]) for client in partition.clients] == [1178, 1178, 1178, 395]
    assert partition.warnings == ("client sketch-3 gets 395 images instead of 1178: domain sketch has no more",)


def test_values_per_domain():
    partition = make_partition(DATA, clients="mnist=2,usps=1", fraction="mnist=.1,usps=.5")
    assert [len(part) for part in partition.train.values()] == [20, 20, 45]
    partition = make_partition(DATA, "leave-out=svhn", samples_per_client="mnist=7,usps=8")
    assert [len(part) for part in partition.train.values()] == [7, 8]


@given(SEEDS)
def test_ensure_all_classes_swaps_only_with_the_unused(seed):
    data = dataset(classes=10, office=300)
    partition = make_partition(data, clients="office=10", samples_per_client=12, seed=seed, ensure_all_classes=True)
    check_sound(partition, data)
    counts = partition.counts(data.pooled_labels(), 10)
    assert (counts > 0).all()
    assert (counts.sum(1) == 12).all()


def test_ensure_all_classes_says_what_it_could_not_do():
    partition = make_partition(DATA, clients="svhn=30", samples_per_client=2, seed=0, ensure_all_classes=True)
    check_sound(partition, DATA)
    assert any("lacks class" in warning for warning in partition.warnings)


def test_label_protocols_use_an_average_share():
    partition = make_partition(DATA, "iid=4", samples_per_client=10, seed=0)
    assert [len(partition.train[c]) + len(partition.holdout[c]) for c in partition.clients] == [10] * 4
    assert len(dealt(make_partition(DATA, "dirichlet=1,clients=4", fraction=0.1, min_size=2))) == 4 * 35
    assert make_partition(DATA, "iid=4", samples_per_client=1000).warnings


def test_the_default_minimum_scales_with_the_set():
    data = dataset(cifar=14000)
    for seed in range(5):
        partition = make_partition(data, "dirichlet=0.1,clients=10", seed=seed, holdout=0)
        assert min(len(part) for part in partition.train.values()) >= 100


def test_many_clients_get_a_dirichlet_share_each():
    partition = make_partition(dataset(classes=10, cifar=10_000), "dirichlet=0.3,clients=200", seed=0, holdout=0)
    assert len(partition.clients) == 200
    assert min(len(part) for part in partition.train.values()) >= 5


def test_rows():
    rows = make_partition(DATA, "iid=2", seed=0).rows(DATA.pooled_labels(), DATA.classes)
    assert list(rows[0]) == ["client", "domain", "train", "holdout", "classes", "a", "b", "c", "d"]
    assert rows[0]["train"] + rows[0]["holdout"] == 176
    assert sum(rows[0][name] for name in "abcd") == rows[0]["train"]


@pytest.mark.parametrize(
    ("protocol", "options", "line"),
    [
        ("domain", {}, "did you mean"),
        ("equal", {}, "needs a value"),
        ("equal=0", {}, "whole number of at least 1"),
        ("equal=two", {}, "'two' is not a number"),
        ("one-per-domain=3", {}, "takes no value"),
        ("one-per-domain", {"clients": "mnist=2"}, "omit --clients"),
        ("leave-out=minst", {}, "did you mean mnist"),
        ("leave-out=mnist", {"clients": "mnist=2"}, "left out"),
        ("dirichlet=0.3", {}, "needs a number of clients"),
        ("dirichlet=0,clients=3", {}, "above 0"),
        ("dirichlet=nan,clients=3", {}, "not a number"),
        ("dirichlet=0.3,client=3", {}, "not understood"),
        ("dirichlet=0.3,clients=3", {"clients": 4}, "disagree"),
        ("dirichlet=0.3,clients=10,min=50", {}, "need 500, not 351"),
        ("dirichlet=0.01,clients=10,min=34", {}, "larger alpha than 0.01, fewer clients, or a smaller min"),
        ("iid=400", {}, "at most 351 are possible"),
        ("iid=4", {"fraction": "mnist=.1"}, "give one number"),
        ("shards=100,clients=10", {}, "fewer shards or clients"),
        (None, {"clients": "minst=2"}, "did you mean mnist"),
        (None, {"clients": "mnist=900"}, "50 clients fit, not 900"),
        (None, {"clients": "mnist=0"}, "no domain has a client"),
        (None, {"clients": "mnist=-1"}, "whole number of at least 0"),
        (None, {"clients": "mnist=1,mnist=2"}, "more than once"),
        (None, {"clients": "mnist="}, "not DOMAIN=VALUE"),
        (None, {"clients": "5"}, "equal=N"),
        (None, {"fraction": 0}, "above 0 and at most 1"),
        (None, {"fraction": "1.5"}, "above 0 and at most 1"),
        (None, {"fraction": "0.001"}, "at least 0.005"),
        (None, {"fraction": "mnist=.5"}, "does not mention usps, svhn"),
        (None, {"fraction": 0.5, "samples_per_client": 5}, "not both"),
        (None, {"samples_per_client": 0}, "whole number of at least 1"),
        ("iid=4", {"holdout": 1}, "below 1"),
        ("iid=4", {"ensure_all_classes": True}, "needs a domain protocol"),
    ],
)
def test_mistakes_get_one_line(protocol, options, line):
    with pytest.raises(UserError, match=line) as caught:
        make_partition(DATA, protocol, **options)
    assert "\n" not in str(caught.value)


def test_a_single_domain_cannot_be_left_out():
    with pytest.raises(UserError, match="leaves no domain"):
        make_partition(dataset(only=20), "leave-out=only")


@pytest.mark.parametrize("seed", range(5))
def test_a_client_that_has_its_even_part_gets_no_more(seed):
    """Before the last class that a client got images of, it held less than an even part of all."""
    data = dataset(classes=8, mnist=800)
    partition = make_partition(data, "dirichlet=0.2,clients=5,min=1", seed=seed, holdout=0)
    labels = data.pooled_labels().numpy()
    for client in partition.clients:
        counts = np.bincount(labels[partition.train[client]], minlength=8)
        last = counts.nonzero()[0].max()
        assert counts[:last].sum() < 800 / 5


def test_which_images_of_a_class_a_client_gets_is_chance():
    data = dataset(classes=2, mnist=400)
    partition = make_partition(data, "dirichlet=5,clients=4,min=1", seed=0, holdout=0)
    labels = data.pooled_labels().numpy()
    for label in (0, 1):
        members = np.flatnonzero(labels == label)
        for client in partition.clients:
            own = np.flatnonzero(np.isin(members, partition.train[client]))
            assert own.max() - own.min() + 1 > 1.5 * len(own)  # not one stretch of the file
