"""The audit: what it attacks, what its figures mean, and that it tells a leak from none."""

import base64
import html
import json
import re

import pytest
import torch
from torch import nn

from protofed.audit.audit import audit
from protofed.audit.decoder import Decoder, Effort, decoder_step_seconds, rebuilt, train_decoder
from protofed.audit.extractor import make_extractor
from protofed.audit.inception import Inception, Unit, _Branches
from protofed.audit.membership import Auc, auc, mean_auc, nearness
from protofed.audit.verdicts import of_features, of_membership, of_prototypes
from protofed.audit.victim import SENT_MODEL
from protofed.cli import main
from protofed.errors import UserError
from protofed.records import decode
from protofed.report import write_report

SMALL = {"image_size": 12, "model": "resnet10", "set": {"model.width": 4, "proto_pass": "extra_eval"}}


@pytest.fixture(scope="module")
def images():
    return torch.rand(40, 1, 12, 12, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(40, 16), (40, 3, 12, 12), (40, 5, 6, 6), (40, 7, 3, 3)])
@pytest.mark.parametrize("image", [(1, 12, 12), (3, 30, 31)])
def test_a_decoder_gives_images_of_the_size_asked_for(shape, image):
    decoder = Decoder(torch.randn(shape), image)
    made = rebuilt(decoder.eval(), torch.randn(shape), batch=7)
    assert made.shape == (40, *image)
    assert 0 <= float(made.min()) <= float(made.max()) <= 1


def test_a_decoder_of_the_image_itself_finds_it_again_and_one_of_noise_does_not(images):
    effort = Effort(steps=60)
    seen, unseen = images[:30], images[30:]
    honest = rebuilt(train_decoder(seen, seen, effort, 0, "a"), unseen)
    noise = torch.randn(40, 8)
    blind = rebuilt(train_decoder(noise[:30], seen, effort, 0, "a"), noise[30:])
    assert float((honest - unseen).square().mean()) < 0.2 * float((blind - unseen).square().mean())


def test_messages_of_a_quantising_guard_can_be_read(tiny_run):
    run = tiny_run("fedproto_avg", keep_messages=True, guard="quantise=8")
    assert audit(run.path, steps=5, clients="a-0")["model"] == SENT_MODEL


def test_features_that_hardly_move_in_the_attackers_half_do_not_drown_the_others(images):
    features = torch.randn(len(images), 12)
    features[:, 0], features[:, 1] = 0.0, features[:, 1] * 1e-6
    decoder = train_decoder(features, images, Effort(steps=3), 0, "a")
    elsewhere = features.clone()
    elsewhere[:, :2] = 0.05
    same, other = rebuilt(decoder, features), rebuilt(decoder, elsewhere)
    assert (other - same).abs().max() < 0.2
    elsewhere[:, 1] = features[:, 1]
    elsewhere[:, 0] = 6.0
    assert torch.equal(rebuilt(decoder, elsewhere), same), "what never moved says nothing"


def test_a_step_of_the_decoder_for_larger_images_is_estimated_to_take_longer():
    small, large = (decoder_step_seconds((8, side // 4, side // 4), (3, side, side), Effort()) for side in (16, 96))
    assert 0 <= small < large


def test_the_same_seed_trains_the_same_decoder(images):
    first, second = (train_decoder(images, images, Effort(steps=3), 5, "a") for _ in range(2))
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_auc_by_hand():
    found = auc(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([2.0, 0.0]))
    assert found.auc == pytest.approx((2 + 1.5 + 1) / 6)  # pairs won, a tie counting half
    # DeLong: variances of (1, .75, .5) over 3 and of (.5, 1) over 2
    assert found.error == pytest.approx((0.0625 / 3 + 0.125 / 2) ** 0.5)
    assert (found.members, found.outsiders) == (3, 2)


def test_auc_of_chance_has_chance_in_its_interval_and_a_leak_has_not():
    rng = torch.Generator().manual_seed(1)
    scores = torch.randn(2, 500, generator=rng)
    chance, leak = auc(scores[0], scores[1]), auc(scores[0] + 1, scores[1])
    assert chance.low < 0.5 < chance.high
    assert leak.low > 0.7
    both = mean_auc([chance, leak])
    assert both.auc == pytest.approx((chance.auc + leak.auc) / 2)
    assert both.error < max(chance.error, leak.error)


def test_auc_of_scores_without_a_row_of_their_class():
    """They are minus infinity, which is less than any other score and equal to itself."""
    infinite = -float("inf")
    result = auc(torch.tensor([1.0, 2.0, infinite]), torch.tensor([infinite, 0.0]))
    assert result.auc == pytest.approx((2 + 2 + 0.5) / 6)


def test_nearness_looks_at_the_own_class_only():
    rows, labels = torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1])
    found = nearness(torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1, 2]), rows, labels)
    assert found.tolist() == [0.0, -1.0, -float("inf")]


def test_inception_is_that_of_the_paper():
    network = Inception()
    # torchvision's Inception-v3 without its auxiliary head has 23,834,568 parameters, of which 2,049,000 classify.
    assert sum(param.numel() for param in network.parameters()) == 23_834_568 - 2_049_000
    with torch.no_grad():
        assert network.eval()(torch.rand(1, 3, 20, 20)).shape == (1, 2048)


def test_extractors_are_named(tmp_path):
    fixed = make_extractor()
    assert (fixed.label, "untrained resnet10" in fixed.name) == ("FID-like", True)
    x = torch.rand(6, 1, 12, 12)
    assert fixed.distance(x, x) == pytest.approx(0, abs=1e-4)
    assert fixed.distance(x, 1 - x) > fixed.distance(x, x)
    assert fixed.distance(x[:1], x) is None
    torch.save(Inception().state_dict(), tmp_path / "inception.pth")
    given = make_extractor(tmp_path / "inception.pth")
    assert (given.label, given.name) == ("FID", "Inception-v3 (inception.pth)")
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "other.pth")
    with pytest.raises(UserError, match="is not Inception-v3"):
        make_extractor(tmp_path / "other.pth")


@pytest.mark.parametrize(
    ("share", "rms", "word"), [(0.5, 0.05, "At risk"), (0.0, 0.15, "Some leakage"), (0.0, 0.25, "Nothing found")]
)
def test_verdicts_on_features(share, rms, word):
    figures = {"below_risk_line": share, "class_mean_below_risk_line": 0.0, "rms": rms, "class_mean_rms": 0.25}
    assert of_features("layer1", figures, True).startswith(word)
    assert "were not sent" in of_features("layer1", figures, False)


def test_verdict_and_reason_agree():
    """A high share below the risk line is no finding where the class mean has a higher one, and the verdict says so."""
    alike = {"below_risk_line": 0.3, "class_mean_below_risk_line": 0.75, "rms": 0.12, "class_mean_rms": 0.09}
    said = of_features("pool", alike, True)
    assert said.startswith("Nothing found")
    assert "30 % come within 0.1, against 75 % of class means" in said
    # Some images are given away although the mean distance is no better.
    some = {"below_risk_line": 0.3, "class_mean_below_risk_line": 0.1, "rms": 0.25, "class_mean_rms": 0.25}
    assert of_features("pool", some, True).startswith("At risk: some images")


def test_verdicts_on_prototypes_and_members():
    figures = {
        "rms_to_nearest": 0.2,
        "rms_of_class_mean_to_nearest": 0.2,
        "below_risk_line": 0.0,
        "class_mean_below_risk_line": 0.0,
        "fewest_samples_behind_one": 1.0,
    }
    assert of_prototypes("P", figures).startswith("Nothing found")
    assert "single sample" in of_prototypes("P", figures)
    assert "chance" in of_membership("weights", Auc(0.52, 0.02, 9, 9))
    assert "strongly better than chance" in of_membership("weights", Auc(0.9, 0.02, 9, 9))


def test_messages_are_kept_as_they_were_sent_and_change_nothing(tiny_run, same_results):
    kept, plain = tiny_run("i2pfl", keep_messages=True), tiny_run("i2pfl")
    same_results(kept, plain)
    found = sorted(str(path.relative_to(kept.path)) for path in (kept.path / "messages").rglob("*.safetensors"))
    assert found == [f"messages/round-{n}/{client}-0.safetensors" for n in (1, 2) for client in "abc"]
    sent = sum((kept.path / name).stat().st_size for name in found)
    assert sent == kept.summary["bytes"]["up"]["total"]
    assert not (plain.path / "messages").exists()


def test_audit_of_fedmp(tiny_run, tmp_path, capsys):
    run = tiny_run("fedmp", keep_messages=True, **SMALL)
    content = audit(run.path, steps=20, clients="a-0,c-0", stages="layer1")
    stored = json.loads((run.path / "audit" / "audit.json").read_text())
    assert stored == content
    assert [(entry["stage"], entry["source"]) for entry in content["reconstruction"]] == [
        ("pool", "computed"), ("pool", "sent"), ("layer1", "computed")
    ]  # fmt: skip
    assert set(content["reconstruction"][0]["clients"]) == {"a-0", "c-0"}
    assert [entry["by"] for entry in content["membership"]] == ["features U", "weights"]
    # Embeddings of a clean pass are exactly those of the members, so nobody else is as near.
    assert content["membership"][0]["mean"]["auc"] > 0.95
    assert content["model"] == "the model that was sent"
    for item in content["items"]:
        assert (run.path / "audit" / item["image"]).read_bytes().startswith(b"\x89PNG")
    assert "did not try to invert updates into images" in content["verdicts"][-1]
    assert content["title"] in (run.path / "audit" / "audit.md").read_text()

    assert main(["audit", str(run.path), "--steps", "20", "--clients", "a-0,c-0", "--stages", "layer1", "--json",
                 "--out", str(tmp_path / "again")]) == 0  # fmt: skip
    assert json.loads(capsys.readouterr().out) == content, "the same attack finds the same"


@pytest.mark.parametrize(("method", "by"), [("fedproto", ["prototypes P"]), ("scaffold", ["weights"])])
def test_audit_of_other_messages(method, by, tiny_run):
    content = audit(tiny_run(method, keep_messages=True).path, steps=5, clients="a-0")
    assert [entry["by"] for entry in content["membership"]] == by
    assert content["model"].startswith("the client's own model")
    if method == "fedproto":
        (entry,) = content["prototypes"]
        assert entry["mean"]["prototypes"] == 3  # client a lacks a class
        assert entry["mean"]["rms_of_class_mean_to_nearest"] > 0


def test_a_run_without_messages_is_attacked_by_its_models(tiny_run):
    content = audit(tiny_run("fedavg").path, steps=5, clients="a-0")
    assert content["messages"] is False
    assert "kept no messages" in content["verdicts"][0]
    assert [entry["source"] for entry in content["reconstruction"]] == ["computed"]


def test_mistakes(tiny_run, tmp_path):
    run = tiny_run("fedavg")
    for options, words in (
        ({"clients": "z-0"}, "unknown client"),
        ({"stages": "layer9"}, "unknown stage"),
        ({"steps": 0}, "steps=0"),
        ({"inception": tmp_path / "none.pth"}, "there is no weights file"),
    ):
        with pytest.raises(UserError, match=words):
            audit(run.path, **options)
    with pytest.raises(UserError, match="is not a run folder"):
        audit(tmp_path / "nowhere")
    with pytest.raises(UserError, match="pools the data"):
        audit(tiny_run("centralized").path)


def test_a_kept_message_can_be_read_by_anyone_with_the_template(tiny_run):
    from protofed.runs.assembly import assemble
    from protofed.runs.options import make_options

    run = tiny_run("fedavg", keep_messages=True)
    templates = assemble(make_options(run.options), run.path / "clients").prepared.templates
    blob = (run.path / "messages" / "round-2" / "a-0.safetensors").read_bytes()
    assert decode(blob, templates.upload, "a-0").weights.weight > 0


@pytest.mark.slow
def test_leakage_falls_with_depth(tiny_run):
    """FedMP's claim, on the embedded digits: stage 4 gives away less than stage 1, in similarity and in distance."""
    found = {}
    for stage in (1, 4):
        run = tiny_run(
            "fedmp", "digits", samples_per_client=200, model="resnet10", rounds=2, batch=32, keep_messages=True,
            set={"model.width": 8, "stage": stage}, name=f"stage{stage}",
        )  # fmt: skip
        content = audit(run.path, steps=200, clients="mnist-0")
        (found[stage],) = [entry["mean"] for entry in content["reconstruction"] if entry["source"] == "sent"]
    assert found[1]["ssim"] > found[4]["ssim"] + 0.2
    assert found[1]["ssim_max"] > found[4]["ssim_max"]
    assert found[1]["rms"] < 0.5 * found[4]["rms"]
    assert found[1]["rms_min"] < found[4]["rms_min"]


def test_inception_pools_the_mean_beside_its_convolutions():
    """A single bright pixel: its ninth in all nine places, where a maximum would be the whole of it."""
    unit = Unit(1, 1, 1)
    block = _Branches({"branch_pool": unit}, (), "average").eval()
    with torch.no_grad():
        unit.conv.weight.fill_(1.0)
        x = torch.zeros(1, 1, 5, 5)
        x[0, 0, 2, 2] = 9.0
        found = block(x)[0, 0]
    expected = torch.zeros(5, 5)
    expected[1:4, 1:4] = 1.0
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_no_training_image_is_on_a_page_unless_it_is_asked_for(tiny_run):
    run = tiny_run("fedproto_avg", keep_messages=True)
    told = []
    content = audit(run.path, steps=5, clients="a-0", tell=told.append)
    pictures = [(run.path / "audit" / item["image"]).read_bytes() for item in content["items"]]
    assert pictures
    inside = [base64.b64encode(png).decode() for png in pictures]
    own_page = (run.path / "audit" / "index.html").read_text()
    report = write_report(run.path).read_text()
    for page in (own_page, report):
        assert not any(png in page for png in inside)
        assert html.escape(content["verdicts"][0]) in re.sub("</?strong>", "", page)
        assert "class mean: &lt; 0.1" in page
        assert "training images" in page
    assert all(png in write_report(run.path, with_training_images=True).read_text() for png in inside)
    audit(run.path, steps=5, clients="a-0", with_training_images=True)
    shown = (run.path / "audit" / "index.html").read_text()
    assert all(base64.b64encode(png).decode() in shown for png in pictures)
    assert "Send it only to people who may see them" in shown
    assert told == ["attacking a-0 (1 of 1)"]


def test_a_long_attack_says_how_far_it_is(images, monkeypatch):
    monkeypatch.setattr("protofed.audit.decoder._SILENCE", 0.0)
    told = []
    train_decoder(images, images, Effort(steps=4), 5, "a", progress=lambda step, left: told.append((step, left)))
    assert [step for step, _ in told][-1] == 3
    assert all(left >= 0 for _, left in told)
