"""The audit of one-pass methods: class sums, second moments, classes of one image, and what noise leaves of it all."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from protofed.audit.audit import audit
from protofed.audit.membership import auc
from protofed.audit.moments import leading_directions, lies_within, second_moment_in
from protofed.audit.verdicts import of_single_images
from protofed.audit.victim import SentRows
from protofed.verbs import pack_symmetric


def verdict_of(content: dict[str, Any], words: str) -> str:
    (found,) = [text for text in content["verdicts"] if words in text]
    return found


@pytest.mark.parametrize(("method", "settings"), [("fedncm", {}), ("protoridge", {"gram": "none"})])
def test_class_sums_are_attacked(method: str, settings: dict[str, Any], tiny_run) -> None:
    run = tiny_run(method, keep_messages=True, set=settings)
    content = audit(run.path, steps=10)
    assert [entry["by"] for entry in content["membership"]] == [
        "prototypes sums",
        "class sums sums compared with a reference",
    ]
    assert [entry["field"] for entry in content["prototypes"]] == ["sums"]
    assert content["not_attacked"] == {}
    for entry in content["membership"]:
        told = verdict_of(content, f"Membership by {entry['by']}")
        assert ("no better than chance" in told) == (entry["mean"]["low"] <= 0.5), "verdict and figure agree"


@pytest.mark.parametrize("method", ["fed3r", "fedcgs", "protoridge"])
def test_second_moments_are_attacked_and_tell_who_took_part(method: str, tiny_run) -> None:
    run = tiny_run(method, keep_messages=True, set={"model.hidden": 64})
    content = audit(run.path, steps=10, clients="a-0")
    assert [entry["field"] for entry in content["prototypes"]] == ["sums", "gram-directions"]
    (moment,) = [entry for entry in content["membership"] if entry["by"] == "second moment gram"]
    assert moment["mean"]["auc"] > 0.9, "fewer images than dimensions: nobody else lies in their span"


def test_a_sketch_is_said_not_to_be_attacked(tiny_run) -> None:
    content = audit(tiny_run("protoridge", keep_messages=True, set={"gram": "sketch"}).path, steps=5, clients="a-0")
    assert "sketch" in content["not_attacked"]


def test_classes_of_one_image_are_named_with_their_sites(tiny_run) -> None:
    run = tiny_run("fedncm", keep_messages=True, samples_per_client=6, protocol="equal=2")
    content = audit(run.path, steps=5, clients="a-0")
    counts, classes = run.config["partition"]["clients"], run.config["data"]["classes"]
    expected = {
        client: [classes[k] for k, count in enumerate(entry["per_class"]) if count == 1]
        for client, entry in counts.items()
    }
    assert content["single_images"] == {client: named for client, named in expected.items() if named}
    assert content["single_images"], "there are some"
    told = verdict_of(content, "sends that image's embedding itself")
    for client, named in content["single_images"].items():
        assert f"{client} ({', '.join(named)})" in told


def test_noise_hides_which_classes_are_single_and_who_took_part(tiny_run) -> None:
    plain = tiny_run("fedncm", keep_messages=True, samples_per_client=6, protocol="equal=2")
    noised = tiny_run(
        "fedncm", keep_messages=True, samples_per_client=6, protocol="equal=2", guard="epsilon=1,delta=1e-5"
    )
    found, hidden = (audit(run.path, steps=5, clients="a-0,b-0,c-0") for run in (plain, noised))
    assert found["single_images"]
    assert hidden["single_images"] == {}
    of = [content["membership"][-1]["mean"]["auc"] for content in (found, hidden)]
    assert of[0] > 0.8 > of[1]


def test_under_a_secure_sum_the_audit_says_whom_it_speaks_of(tiny_run) -> None:
    pytest.importorskip("flwr")
    run = tiny_run("fedncm", keep_messages=True, guard="secure=on")
    assert verdict_of(audit(run.path, steps=5, clients="a-0"), "Secure aggregation hides single uploads")


def test_a_second_moment_is_known_by_its_length() -> None:
    moment = torch.eye(4).double()
    rows = SentRows("prototypes", "gram", pack_symmetric(moment)[None].float(), torch.zeros(1).long())
    found = second_moment_in(rows, 4)
    assert found is not None
    torch.testing.assert_close(found, moment)
    assert second_moment_in(rows, 5) is None


def test_the_second_moment_of_one_image_is_that_image() -> None:
    h = functional.normalize(torch.rand(1, 5).double(), dim=1)
    means = SentRows("prototypes", "sums", h.float(), torch.tensor([2]))
    (leading, *_) = leading_directions(h.T @ h, means, "gram").rows
    torch.testing.assert_close(leading, h[0].float(), atol=1e-5, rtol=0)
    others = functional.normalize(torch.randn(50, 5).double(), dim=1)
    assert auc(lies_within(h, h.T @ h), lies_within(others, h.T @ h)).auc == 1


def test_nothing_is_said_where_every_class_has_several() -> None:
    assert of_single_images({}) == []
