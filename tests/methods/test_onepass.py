"""The one-pass family: OP-1 to OP-8, what adds up, what is forgotten, every knob."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from by_hand import total
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from protofed.closed_form.selection import LAMS, TEMPERATURES, best, scores
from protofed.closed_form.sketch import expanded, sketched
from protofed.closed_form.sums import ClassSumsUpload, means_of
from protofed.errors import UserError
from protofed.methods.fed3r import Fed3R, ridge
from protofed.methods.fedcgs import FedCGS, pooled_covariance
from protofed.methods.fedcof import FedCOF, deviations
from protofed.methods.fedncm import FedNCM
from protofed.methods.protoridge import ProtoRidge
from protofed.models import Split
from protofed.models.net import Net
from protofed.records import ClassTable, Sum, Tally
from protofed.verbs import pack_symmetric, unpack_symmetric

SITES: dict[str, tuple[list[list[float]], list[int]]] = {
    "A": ([[1.0, 0.0], [0.6, 0.8]], [0, 1]),
    "B": ([[0.8, 0.6], [0.0, 1.0], [0.6, 0.8]], [0, 1, 1]),
}


class Played:
    """One exchange of a method between the two sites, or some of them, in float64."""

    def __init__(self, method: Any, make_at: Any, samples_of: Any, sites: str = "AB", domains: str = "") -> None:
        self.method, self.sites = method, sites
        self.memory: dict[str, Any] = {}
        base = Split({"same": nn.Identity(), "fc": nn.Linear(2, 2)}, cut="same", dim=2, classes=2)
        clients = {site: len(SITES[site][1]) for site in sites}
        of = dict(zip(sites, domains or sites, strict=True))
        self.at = make_at(clients=clients, domains=of, client=None, plan=method.plan(make_at().plan))
        self.net = net = Net(method.build(base, self.at).double())
        server = method.server_state(net, self.at)
        for round in range(self.at.plan.rounds):
            uploads = {}
            for site in sites:
                at = replace(self.at, round=round, client=site, down=method.broadcast(server, self.at))
                at = replace(at, memory=self.memory.get(site, method.client_state(net, at)))
                x, y = SITES[site]
                samples = samples_of(torch.tensor(x, dtype=torch.float64), y)
                uploads[site], self.memory[site] = method.upload(net, samples, at)
            server = method.aggregate(server, total(uploads), replace(self.at, round=round, participants=tuple(sites)))
        self.server = server

    @property
    def head(self) -> tuple[Tensor, Tensor]:
        return head_of(self.server)

    def at_site(self, site: str) -> Any:
        """Where a site stands that has been told the sums of all."""
        sums, gram = (means_of(table) for table in (self.server.total.sums, self.server.total.gram))
        down = replace(self.server.shared, sums=sums, gram=gram)
        return replace(self.at, round=1, client=site, down=down, memory=self.memory[site])

    def without(self, site: str) -> Any:
        rest = tuple(other for other in self.sites if other != site)
        return self.method.forget(self.server, self.memory[site], replace(self.at, client=site, participants=rest))


def head_of(server: Any) -> tuple[Tensor, Tensor]:
    """W as the vectors have it, one column per class, and b."""
    return server.shared.weights.params["fc.weight"].T, server.shared.weights.params["fc.bias"]


@pytest.fixture
def play(make_at: Any, samples_of: Any) -> Any:
    return lambda method, sites="AB", domains="": Played(method, make_at, samples_of, sites, domains)


def near(found: Tensor, expected: Any) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-8, rtol=0)


@pytest.mark.parametrize("method", [Fed3R(), FedCGS(), ProtoRidge()])
def test_op_1(method: Any, play: Any) -> None:
    sums = play(method).server.total
    near(sums.sums.count, [2, 3])
    near(sums.sums.rows, [[1.8, 0.6], [1.2, 2.6]])
    near(unpack_symmetric(sums.gram.rows[0], 2), [[2.36, 1.44], [1.44, 2.64]])


def test_op_2(play: Any) -> None:
    W, b = play(FedNCM()).head
    near(W.T, [[0.948683298, 0.316227766], [0.419058177, 0.907959385]])
    near(b, [0, 0])


def test_op_3(play: Any) -> None:
    played = play(Fed3R())
    sums = played.server.total
    raw = ridge(unpack_symmetric(sums.gram.rows[0], 2), sums.sums.rows, 0.01).T
    near(raw, [[0.928474649, -0.134065464], [-0.278114526, 1.053982743]])
    near(played.head[0], [[0.957947700, -0.126182227], [-0.286942859, 0.992007079]])


def test_op_4(play: Any) -> None:
    played = play(FedCGS(gamma=0.1))
    sums = played.server.total
    means = means_of(sums.sums)
    Sigma = pooled_covariance(unpack_symmetric(sums.gram.rows[0], 2), means.rows, means.count)
    near(Sigma, [[0.086666667, -0.046666667], [-0.046666667, 0.068888889]])
    W, b = played.head
    near(W, [[5.656234225, 3.679959616], [3.339222615, 6.148409894]])
    near(b, [-3.962479525, -3.911128501])


def test_op_5(play: Any) -> None:
    sent = play(FedCOF()).server.sent
    m, n = (torch.stack([getattr(table, name) for table in sent.values()]) for name in ("rows", "count"))
    d = deviations(m, n)
    near(d[:, 0].T @ d[:, 0], [[0.02, -0.06], [-0.06, 0.18]])
    near(d[:, 1].T @ d[:, 1], [[0.06, -0.02], [-0.02, 0.006666667]])


def test_op_6(play: Any) -> None:
    W, b = play(ProtoRidge()).head
    near(W, [[0.241453109, -0.197145638], [-0.312444451, 0.255109826]])
    near(b, [0.055092583, -0.044982906])


@pytest.mark.parametrize("balance", ["site", "domain"])
def test_op_7(balance: str, play: Any) -> None:
    W, b = play(ProtoRidge(balance=balance)).head
    near(W, [[0.224553616, -0.189782444], [-0.322289750, 0.272384554]])
    near(b, [0.051156560, -0.043235184])


@pytest.mark.parametrize("balance", ["none", "site", "domain"])
def test_op_8(balance: str, play: Any) -> None:
    W, b = head_of(play(ProtoRidge(balance=balance)).without("A"))
    near(W, [[0.474358974, -0.335422447], [-0.423076923, 0.299160561]])
    near(b, [0.117094017, -0.082797974])


FORGETTING = [
    FedNCM(),
    Fed3R(),
    FedCGS(),
    FedCOF(parts=2),
    ProtoRidge(gram="sketch"),
    ProtoRidge(gram="none"),
    ProtoRidge(balance="site"),
]


@pytest.mark.parametrize("method", FORGETTING, ids=str)
@pytest.mark.parametrize("gone", ["A", "B"])
def test_what_is_left_after_forgetting_is_a_run_without_the_site(method: Any, gone: str, play: Any) -> None:
    left = head_of(play(method).without(gone))
    alone = play(method, "B" if gone == "A" else "A").head
    for ours, theirs in zip(left, alone, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)


def test_sites_of_a_domain_count_as_one_where_domains_balance(play: Any) -> None:
    together, plain = play(ProtoRidge(balance="domain"), domains="xx").head, play(ProtoRidge()).head
    torch.testing.assert_close(together, plain)


@pytest.mark.parametrize("method", [FedNCM(finetune=1), Fed3R(finetune=2), ProtoRidge(tune="lam"), ProtoRidge(rho=1.0)])
def test_what_was_learnt_from_more_than_sums_cannot_be_forgotten(method: Any, play: Any) -> None:
    with pytest.raises(UserError, match=r"run (again )?with"):
        play(method).without("A")


def test_a_class_that_nobody_has_is_never_predicted(play: Any) -> None:
    method = ProtoRidge(min_count=2)
    W, b = play(method, "B").head
    assert b[0] < -1e6
    assert not W[:, 0].any()


def test_classes_of_few_images_are_named(make_at: Any) -> None:
    each = [make_at(client=name, held=torch.tensor(held)) for name, held in (("a", [1.0, 4.0]), ("b", [0.0, 9.0]))]
    (text,) = FedNCM().cautions(each, ["cat", "dog"])
    assert "a (cat)" in text
    assert "b" not in text.rpartition(":")[2]
    (text,) = FedNCM(min_count=5).cautions(each, ["cat", "dog"])
    assert "a (cat, dog)" in text
    assert not FedNCM().cautions(each[1:], ["cat", "dog"])


@pytest.mark.parametrize("images", [0, 1, 5, 6, 40])
def test_a_sketch_is_of_singular_vectors_however_many_images_there_are(images: int) -> None:
    within = torch.randn(images, 6, generator=torch.Generator().manual_seed(images), dtype=torch.float64)
    _, s, V = torch.linalg.svd(within / max(images, 1) ** 0.5, full_matrices=False)
    leading = s[:2, None] * V[:2]
    found = sketched(within, 2)
    directions = (found.rows.double() - 128) * found.scale[:, None]
    torch.testing.assert_close(directions.T @ directions, leading.T @ leading, rtol=0.02, atol=0.02)
    assert len(found.rows) == min(2, images)


def test_a_sketch_keeps_the_trace_and_the_leading_directions() -> None:
    within = torch.randn(40, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    within[:, :2] *= 20
    exact = within.T @ within / 40
    found = expanded(sketched(within, 4), 6)
    assert found.trace().item() == pytest.approx(exact.trace().item(), rel=1e-6)
    torch.testing.assert_close(found[:2, :2], exact[:2, :2], rtol=0.02, atol=1.0)
    assert torch.equal(unpack_symmetric(pack_symmetric(exact), 6), exact)


def test_sites_choose_the_temperature_by_heads_made_without_them(play: Any) -> None:
    plain, tuned = play(ProtoRidge()), play(ProtoRidge(tune="temperature"))
    lam, tau = tuned.server.shared.chosen.tolist()
    assert lam == 1.0
    torch.testing.assert_close(tuned.head[0] * tau, plain.head[0])
    assert not tuned.server.shared.gram.held.any(), "nobody needs the sums any more"


def test_the_temperature_divides_weights_and_bias(play: Any) -> None:
    played = play(ProtoRidge(tune="temperature"))
    tau = float(played.server.shared.chosen[1])
    assert tau != pytest.approx(1)
    for tuned, plain in zip(played.head, play(ProtoRidge()).head, strict=True):
        torch.testing.assert_close(tuned * tau, plain, atol=1e-12, rtol=0)


def test_the_likeliest_candidate_is_chosen() -> None:
    told = torch.full((len(LAMS), len(TEMPERATURES)), -2.0)
    told[4, 7], told[1, 3] = -0.5, -3.0
    assert best(told, LAMS) == (LAMS[4], TEMPERATURES[7])


def test_a_site_scores_heads_of_the_others(play: Any, samples_of: Any) -> None:
    played = play(ProtoRidge(tune="lam"))
    x, y = torch.tensor(SITES["A"][0], dtype=torch.float64), torch.tensor(SITES["A"][1])
    told = played.method.scores(played.net, samples_of(x, y.tolist()), played.at_site("A"))
    heads = [play(ProtoRidge(lam=lam), "B").head for lam in LAMS]
    torch.testing.assert_close(told.value, scores([x @ W + b for W, b in heads], y, LAMS).value, atol=1e-6, rtol=0)
    assert told.weight == 2


def test_in_a_head_of_its_own_a_site_counts_rho_times_more(play: Any) -> None:
    method = ProtoRidge(rho=3.0)
    W, b = method.head_of_own(play(method).at_site("A"))
    x, y = (torch.cat([torch.tensor(SITES[site][part]) for site in "AAAAB"]) for part in (0, 1))
    x, own = x.double(), functional.one_hot(y).double()
    expected = method.head_of(own.sum(0), own.T @ x, x.T @ x, method.lam)
    for found, right in zip((W, b), expected, strict=True):
        torch.testing.assert_close(found, right, atol=1e-6, rtol=0)


def test_a_sum_is_exact_and_its_parts_can_be_taken_away() -> None:
    tally: Tally[Any] = Tally()
    rows = torch.tensor([[0.1, 0.2]], dtype=torch.float32)
    for count in (3.0, 5.0):
        tally.add(str(count), ClassSumsUpload(Sum(ClassTable(rows, torch.tensor([count])), torch.tensor([count]))))
    seen = tally.total().sums
    assert seen.rows.dtype == torch.float64
    assert torch.equal(seen.rows, rows.double() * 8)
    assert seen.count.tolist() == [8]


@pytest.mark.parametrize(
    "method",
    [FedNCM(), Fed3R(), FedCGS(), FedCOF(), ProtoRidge(), ProtoRidge(gram="sketch")],
    ids=["fedncm", "fed3r", "fedcgs", "fedcof", "protoridge", "sketch"],
)
def test_twenty_orders_of_join_and_forget_end_in_the_same_head(method: Any, make_at: Any, samples_of: Any) -> None:
    """Sites come and go in any order; what counts is who is there in the end."""
    dim, classes = 5, 3
    rng = torch.Generator().manual_seed(1)
    base = Split({"same": nn.Identity(), "fc": nn.Linear(dim, classes)}, cut="same", dim=dim, classes=classes)
    clients = {f"s{i}": 12 + i for i in range(6)}
    at = make_at(clients=clients, client=None, dim=dim, classes=classes, rounds=1)
    net = Net(method.build(base, at).double())
    sent = {}
    for site, size in clients.items():
        x = torch.randn(size, dim, generator=rng, dtype=torch.float64)
        y = torch.randint(0, classes, (size,), generator=rng)
        sent[site] = method.statistics(net, samples_of(x, y), replace(at, client=site))
    final = ("s0", "s2", "s3")
    heads = []
    for order in range(20):
        dice, state, present = random.Random(order), method.server_state(net, at), set()
        steps = [dice.choice(list(clients)) for _ in range(30)]
        there = {site for site in clients if steps.count(site) % 2}
        for site in [*steps, *sorted(there ^ set(final), key=lambda _: dice.random())]:
            change = method.forget if site in present else method.include
            present ^= {site}
            where = replace(at, client=site, participants=tuple(sorted(present)))
            state = change(state, sent[site], where)
        assert present == set(final)
        heads.append(torch.cat([part.flatten() for part in head_of(state)]))
    for other in heads[1:]:
        torch.testing.assert_close(other, heads[0], atol=1e-9, rtol=0)


# Runs


def test_bytes_are_the_closed_forms(tiny_run: Any) -> None:
    """Class sums: D numbers for each class held; second moments: D (D + 1) / 2."""
    options: dict[str, Any] = {"model": "mlp", "set": {"model.hidden": 16}}
    for name, moments in (("fedncm", 0), ("fed3r", 1), ("fedcgs", 1), ("protoridge", 1)):
        run = tiny_run(name, **options)
        sites = run.config["partition"]["clients"].values()
        held = sum(sum(count > 0 for count in site["per_class"]) for site in sites)
        assert run.summary["bytes"]["up"]["prototypes"] == 4 * (held * 16 + moments * len(sites) * 16 * 17 // 2), name
        assert len(run.rounds) == 1
        assert run.rounds[0]["train_loss"] is None
        assert run.rounds[0]["samples"] == 0


@pytest.mark.parametrize("name", ["fedncm", "fed3r", "fedcgs", "protoridge"])
def test_the_secure_sum_gives_the_same_head(name: str, tiny_run: Any) -> None:
    pytest.importorskip("flwr")
    plain, secure = tiny_run(name), tiny_run(name, guard="secure=on")
    for key, tensor in load_file(plain.path / "model.safetensors").items():
        torch.testing.assert_close(load_file(secure.path / "model.safetensors")[key], tensor, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", ["fedncm", "fed3r"])
def test_training_starts_from_the_computed_head(name: str, tiny_run: Any) -> None:
    run = tiny_run(name, set={"finetune": 2}, epochs=2)
    assert [record["train_loss"] is None for record in run.rounds] == [True, False, False]
    assert run.rounds[1]["bytes"]["up"]["prototypes"] == 0
    assert run.rounds[0]["bytes"]["up"]["prototypes"] > 0


def test_a_head_of_its_own_is_what_a_site_uses(tiny_run: Any) -> None:
    run = tiny_run("protoridge", set={"rho": 5.0, "tune": "lam"})
    assert len(run.rounds) == 3
    final = run.summary["accuracy_final"]
    assert final["global"] is not None
    assert final["personal"] is not None
    heads = [load_file(path)["model/params/fc.weight"] for path in sorted((run.path / "clients").glob("*.safetensors"))]
    assert not torch.allclose(heads[0], heads[1])


@pytest.mark.parametrize("settings", [{"project": 8, "gram": "none"}, {"gram": "sketch"}, {"tune": "both"}])
def test_a_finished_run_is_a_plain_network(settings: dict[str, Any], tiny_run: Any) -> None:
    run = tiny_run("protoridge", set=settings)
    model = run.model()
    assert isinstance(model, Split)
    assert model.stage_names[-2:] == ("unit", "fc")
    h = model.features(torch.rand(3, 1, 8, 8))
    torch.testing.assert_close(h.norm(dim=1), torch.ones(3))
