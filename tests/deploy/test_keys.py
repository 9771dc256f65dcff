"""Keys, policies and the commands that need no network."""

import json
import shutil
import ssl
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from protofed.cli import main
from protofed.deploy.policy import Policy, Refused
from protofed.errors import UserError

pytest.importorskip("flwr")

from protofed.deploy.keys import host_and_port, make_keys, public_bytes, revoke, server_keys, site_keys
from protofed.deploy.masked_site import site_identity


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", "federation.example.org:9443", ["north", "south"])
    return tmp_path / "keys"


def test_every_party_gets_its_own(keys: Path) -> None:
    server, north = server_keys(keys), site_keys(keys / "sites/north")
    assert list(server.sites()) == ["north", "south"]
    assert (north.name, north.server) == ("north", "federation.example.org:9443")
    assert public_bytes(server.sites()["north"]) != public_bytes(server.sites()["south"])
    secrets = [keys / "authority.key", server.private, north.private]
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets} == {0o600}
    assert not list((keys / "sites/north").glob("*server*"))


def test_tls_takes_the_certificate(keys: Path) -> None:
    server = server_keys(keys)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server.certificate, server.private)
    ssl.create_default_context(cafile=str(server.authority))


def test_names_under_which_the_server_is_known(keys: Path) -> None:
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate(server_keys(keys).certificate.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["federation.example.org", "localhost"]
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]


def test_more_sites_later(keys: Path) -> None:
    before = (keys / "sites/north/site.key").read_bytes()
    made = make_keys(keys, "federation.example.org:9443", ["north", "west"])
    assert [folder.name for folder in made] == ["west"]
    assert (keys / "sites/north/site.key").read_bytes() == before


def test_every_site_is_given_the_public_keys_of_all(keys: Path) -> None:
    make_keys(keys, "federation.example.org:9443", ["west"])
    for name in ("north", "south", "west"):
        identity = site_identity(site_keys(keys / "sites" / name))
        assert list(identity.members) == ["north", "south", "west"]
        assert identity.private.public_key() == identity.members[name]
    (keys / "sites/north/members/north.pub").write_bytes((keys / "server/sites/south.pub").read_bytes())
    with pytest.raises(Refused, match=r"lacks its own public key, north\.pub"):
        site_identity(site_keys(keys / "sites/north"))


def test_a_site_may_make_its_own_key(keys: Path) -> None:
    """As SECURITY.md says, so that nobody else has ever had it."""
    if shutil.which("ssh-keygen") is None:
        pytest.skip("there is no ssh-keygen")
    own = keys / "sites/north"
    (own / "site.key").unlink()
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(own / "site.key")], check=True)
    public = (own / "site.key.pub").read_bytes()
    for place in (keys / "server/sites", own / "members", keys / "sites/south/members"):
        (place / "north.pub").write_bytes(public)
    identity = site_identity(site_keys(own))
    assert identity.members["north"] == site_identity(site_keys(keys / "sites/south")).members["north"]
    assert public_bytes(server_keys(keys).sites()["north"])


def test_revoked(keys: Path) -> None:
    revoke(keys, "north")
    assert list(server_keys(keys).sites()) == ["south"]
    with pytest.raises(UserError, match="north is not a member"):
        revoke(keys / "server", "north")
    with pytest.raises(UserError, match="no longer a member; remove it"):
        make_keys(keys, "federation.example.org:9443", ["north"])


@pytest.mark.parametrize("name", ["../etc", "a/b", "average", "", ".a", "a=b"])
def test_names_that_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs another name"):
        make_keys(tmp_path / "keys", "host:1", [name])
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("address", ["host", "host:", ":9443", "host:port", "host:0", "host:70000"])
def test_addresses_that_are_refused(address: str) -> None:
    with pytest.raises(UserError, match="HOST:PORT"):
        host_and_port(address)


def test_a_key_that_others_can_read_is_refused(keys: Path) -> None:
    (keys / "sites/north/site.key").chmod(0o644)
    with pytest.raises(UserError, match="is readable by others"):
        site_keys(keys / "sites/north")


@pytest.mark.parametrize("file", ["site.key", "ca.pem", "site.json"])
def test_a_broken_or_missing_file_is_named(file: str, keys: Path) -> None:
    path = keys / "sites/north" / file
    path.write_text("rubbish")
    with pytest.raises(UserError):
        site_keys(keys / "sites/north")
    path.unlink()
    with pytest.raises(UserError, match=file):
        site_keys(keys / "sites/north")


# Policy


@pytest.mark.parametrize(
    ("wanted", "offered", "fine"),
    [
        (None, None, True),
        (None, "clip=1", True),
        ("clip=1", None, False),
        ("clip=1", "clip=0.5", True),
        ("clip=1", "clip=2", False),
        ("clip=1,noise=0.5", "clip=1,noise=0.6", True),
        ("clip=1,noise=0.5", "clip=1,noise=0.4", False),
        ("clip=1,noise=0.5", "clip=1,noise=0.5,train=plain", False),
        ("clip=1,noise=0.5,train=plain", "clip=1,noise=0.5", True),
        ("clip=1,noise=0.5", "unit=client,clip=1,noise=0.5", False),
        ("clip=1,noise=0.5", "clip=1,noise=0.5,row_clip=1e6", False),
        ("clip=1,noise=0.5", "clip=1,noise=0.5,row_clip=0.1", True),
        ("clip=1,noise=0.5", "clip=1,noise=0.5,row_noise=1e-9", False),
        ("clip=1,noise=0.5", "clip=1,noise=0.5,delta=0.1", False),
        ("clip=1,noise=0.5,delta=0.1", "clip=1,noise=0.5", True),
        ("clip=1,noise=0.5,source=system", "clip=1,noise=0.5", False),
        ("clip=1,noise=0.5", "clip=1,noise=0.5,source=system", True),
        ("row_clip=1", "clip=0.5", True),
        ("row_clip=1", "clip=0.5,row_clip=2", False),
        ("quantise=4", "quantise=8", False),
        ("quantise=4", "quantise=2", True),
        ("quantise=4", None, False),
        ("subsample=0.5", "subsample=0.6", False),
        ("subsample=0.5", "clip=1,subsample=0.5", True),
        ("secure=true", "clip=1,secure=true", True),
        ("secure=true", "clip=1", False),
    ],
)
def test_the_least_guard(wanted: str | None, offered: str | None, fine: bool) -> None:
    policy = Policy(guard=wanted)
    if fine:
        policy.admit("i2pfl", 1, offered)
    else:
        with pytest.raises(Refused, match="guard"):
            policy.admit("i2pfl", 1, offered)


@pytest.mark.parametrize("text", ["methods = 3", "rounds = 0", "colour = 'red'", "rounds =", "guard = 'noise=1'"])
def test_a_broken_policy_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(UserError, match="policy"):
        Policy.read(tmp_path / "policy.toml")


# Commands


@pytest.fixture
def site(tmp_path: Path, make_data: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_data(["north"])
    assert main(["deploy", "keys", "--server", "127.0.0.1:9443", "--sites", "north", "--out", "keys"]) == 0
    return tmp_path


def test_check_looks_at_everything_and_ends(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site / "policy.toml").write_text('methods = ["i2pfl"]\nrounds = 5\n')
    arguments = ["deploy", "site", "--data", "data", "--keys", "keys/sites/north", "--policy", "policy.toml", "--check"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "Images of north, 1x8x8" in shown
    assert "rounds=5" in shown


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"--data": "nowhere"}, "nowhere"),
        ({"--keys": "keys"}, "no keys of a site"),
        ({"--policy": "nothing.toml"}, "no policy file"),
        ({"--classes": "cat,dog"}, "not among --classes"),
    ],
)
@pytest.mark.usefixtures("site")
def test_check_names_what_is_wrong(change: dict[str, str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"--data": "data", "--keys": "keys/sites/north", **change}
    assert main(["deploy", "site", "--check", *(part for pair in given.items() for part in pair)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert reason in error


@pytest.mark.usefixtures("site")
def test_a_site_has_one_domain(make_data: Any, capsys: pytest.CaptureFixture[str]) -> None:
    make_data(["north", "south"], name="two")
    assert main(["deploy", "site", "--check", "--data", "two", "--keys", "keys/sites/north"]) == 2
    assert "a site has only its own" in capsys.readouterr().err


def test_revoke_and_status_without_a_server(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "status", "--keys", "keys"]) == 2
    assert "no server has been started" in capsys.readouterr().err
    assert main(["deploy", "keys", "revoke", "north", "--keys", "keys"]) == 0
    assert main(["deploy", "keys", "revoke", "north", "--keys", "keys"]) == 2
    assert json.loads((site / "keys/sites/north/site.json").read_text())["name"] == "north"


def test_keys_need_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "keys"]) == 2
    assert "--server HOST:PORT and --sites" in capsys.readouterr().err
