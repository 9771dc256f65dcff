"""What `--guard` takes, and what it refuses: each refusal says what would be right."""

import pytest

import protofed
from protofed.errors import UserError
from protofed.guards import UNGUARDED, parse_guard


def test_a_guard_is_read() -> None:
    guard = parse_guard("clip=1.0, noise=0.5,subsample=.5,quantise=8")
    assert (guard.clip, guard.noise, guard.subsample, guard.quantise, guard.unit) == (1.0, 0.5, 0.5, 8, "sample")
    assert guard.trains_privately
    assert guard.promises
    assert parse_guard(None) == UNGUARDED
    assert parse_guard("secure=on").secure


def test_what_is_promised() -> None:
    assert not parse_guard("clip=1").promises
    assert not parse_guard("clip=1,noise=1,train=plain").promises
    assert parse_guard("unit=client,clip=1,noise=1").promises
    assert not parse_guard("unit=client,clip=1,noise=1").trains_privately


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("noise=1", "give both"),
        ("clip=1,row_noise=2", "give both"),
        ("clip=-1", "clip=-1 is not valid"),
        ("clip", "use KEY=VALUE"),
        ("clap=1", "did you mean clip"),
        ("quantise=9", "quantise=9 is not valid"),
        ("subsample=0", "subsample=0 is not valid"),
        ("unit=hospital", "unit=hospital is not valid"),
        ("delta=1", "delta=1 is not valid"),
    ],
)
def test_mistakes(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_guard(text)


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("i2pfl", {"guard": "clip=1,noise=1"}, "couples samples.*--guard unit=client,clip=1,noise=1"),
        ("fedavg", {"guard": "clip=1,noise=1", "model": "resnet10"}, "--set model.norm=group"),
        (
            "fedproto",
            {"guard": "clip=1,noise=1", "set": {"proto_pass": "last_epoch"}},
            "--set proto_pass=extra_eval",
        ),
        ("conffedproto", {"guard": "clip=1,noise=1", "set": {"conf_normaliser": "confidence"}}, "couples samples"),
        ("fedavg", {"guard": "clip=1,noise=1", "balanced": True}, "omit --balanced"),
        ("fedmp", {"guard": "unit=client,clip=1,noise=1"}, "also sends U .Features."),
        ("fednova", {"guard": "unit=client,clip=1,noise=1"}, "also sends steps"),
        ("centralized", {"guard": "clip=1,noise=1"}, "sends nothing"),
        ("i2pfl", {"guard": "secure=on"}, "needs P of every client.*only sums"),
        ("fedavg", {"guard": "secure=on,quantise=8"}, "omit quantise"),
        ("fedavg", {"guard": "secure=on", "robust": "median"}, "use only one"),
        ("fedavg", {"guard": "secure=on", "participation": 0.5}, "at least 3 clients in a round, not 2"),
        ("fedavg", {"robust": "median", "participation": 0.5}, "at least 3 clients in a round, not 2"),
        ("fedavg", {"robust": "mode"}, "robust=mode is not valid"),
    ],
)
def test_what_cannot_work_is_refused(method: str, options: dict[str, object], words: str, tiny_run) -> None:
    pytest.importorskip("opacus")
    pytest.importorskip("flwr")
    with pytest.raises(UserError, match=words):
        tiny_run(method, **options)


def test_python_takes_a_dictionary(tiny_run) -> None:
    pytest.importorskip("opacus")
    run: protofed.Run = tiny_run("fedavg", guard={"unit": "client", "clip": 1.0, "noise": 1}, rounds=1)
    assert run.config["guard"]["noise"] == 1.0
